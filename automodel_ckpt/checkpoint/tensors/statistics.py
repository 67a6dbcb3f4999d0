"""Statistics of the values of stored tensors, read once, one box at a time. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.checkpoint.files.type_aliases import Shape
from automodel_ckpt.checkpoint.parts.slices import Tensor, boxes
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader, require_intact
from automodel_ckpt.errors import unusable

_COMPLEX = frozenset({"C64", "C128"})


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a tensor, in double precision.

    *min*, *max*, *mean*, *std* (of the population) and *norm* (Euclidean) are computed from the finite values. They are
    None when there are none, or when the dtype is complex.
    """

    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    num_nan: int = 0
    num_inf: int = 0
    num_zero: int = 0
    numel: int = 0


def statistics_of(root: Path, tensor: Tensor) -> Statistics:
    """Read a tensor with files relative to *root*, and return its statistics.

    Raises :class:`CheckpointUnusable` if it cannot be read, or its bytes do not match their digests.
    """
    try:
        require_intact(root, tensor)
        if tensor.dtype in _COMPLEX:
            return Statistics(numel=math.prod(tensor.shape))
        return _computed(BoxReader(root, tensor), tensor.shape)
    # ValueError: a file that is too short for the map that numpy asks for.
    except (OSError, ValueError) as error:
        value = error.strerror if isinstance(error, OSError) else str(error)
        raise unusable(
            f"the tensor {tensor.fqn!r} cannot be read",
            root / tensor.slices[0].file,
            value,
            "run `ckpt verify` to list all damaged files; restore them from a copy",
        ) from error


def _computed(reader: BoxReader, shape: Shape) -> Statistics:
    import numpy as np

    size = num_nan = num_inf = num_zero = 0
    low, high = math.inf, -math.inf
    shift, total, deviations, squares = 0.0, 0.0, 0.0, 0.0
    for box in boxes(shape):
        values = reader.wide(reader.read(box)).reshape(-1)
        num_zero += int(values.size - np.count_nonzero(values))
        num_nan += int(np.count_nonzero(np.isnan(values)))
        num_inf += int(np.count_nonzero(np.isinf(values)))
        if not (finite := values[np.isfinite(values)]).size:
            continue
        low, high = min(low, float(finite.min())), max(high, float(finite.max()))
        with np.errstate(over="ignore", invalid="ignore"):
            # From a value near the mean: the difference of two large sums of squares would lose the variance.
            shift = shift if size else float(finite.mean())
            centered = finite - shift
            total += float(centered.sum())
            deviations += float(np.dot(centered, centered))
            squares += float(np.dot(finite, finite))
        size += finite.size
    counts = (num_nan, num_inf, num_zero, math.prod(shape))
    if not size:
        return Statistics(None, None, None, None, None, *counts)
    offset = total / size
    variance = math.inf if math.isinf(deviations) else max(deviations / size - offset * offset, 0.0)
    return Statistics(low, high, shift + offset, math.sqrt(variance), math.sqrt(squares), *counts)
