"""Statistics of the values of stored tensors, read once, one box at a time. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader, boxes, require_intact
from automodel_ckpt.errors import CheckpointUnusable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.tensors.float_cast import Array

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


class _Block(NamedTuple):
    """The finite values of a box: their number, and sums of squares of the values and of their deviations."""

    size: int
    low: float
    high: float
    mean: float
    squared_deviations: float
    squares: float


def _block(values: Array) -> _Block:
    import numpy as np

    with np.errstate(over="ignore"):
        mean = float(values.mean())
        centered = values - mean
        return _Block(
            values.size,
            float(values.min()),
            float(values.max()),
            mean,
            float(np.dot(centered, centered)),
            float(np.dot(values, values)),
        )


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
        raise CheckpointUnusable(
            f"the tensor {tensor.fqn!r} cannot be read",
            where=str(root / tensor.slices[0].file),
            value=value,
            hint="run `ckpt verify` to list all damaged files; restore them from a copy",
        ) from error


def _computed(reader: BoxReader, shape: tuple[int, ...]) -> Statistics:
    import numpy as np

    blocks: list[_Block] = []
    num_nan = num_inf = num_zero = 0
    for box in boxes(shape):
        values = reader.wide(reader.read(box)).reshape(-1)
        num_zero += int(values.size - np.count_nonzero(values))
        num_nan += int(np.count_nonzero(np.isnan(values)))
        num_inf += int(np.count_nonzero(np.isinf(values)))
        if (finite := values[np.isfinite(values)]).size:
            blocks.append(_block(finite))
    counts = (num_nan, num_inf, num_zero, math.prod(shape))
    if not blocks:
        return Statistics(None, None, None, None, None, *counts)
    size = sum(block.size for block in blocks)
    mean = sum(block.mean * (block.size / size) for block in blocks)
    # Not from sums of squares: the difference of two large ones would lose the variance.
    deviations = 0.0
    for block in blocks:
        # Not `**`, which raises OverflowError where the product is infinite.
        between = (block.mean - mean) * (block.mean - mean)
        deviations += block.squared_deviations + block.size * between
    return Statistics(
        min(block.low for block in blocks),
        max(block.high for block in blocks),
        mean,
        math.sqrt(deviations / size),
        math.sqrt(sum(block.squares for block in blocks)),
        *counts,
    )
