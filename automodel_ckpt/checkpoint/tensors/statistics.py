"""Statistics of the values of stored tensors, read once, one box at a time. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader, boxes
from automodel_ckpt.checkpoint.tensors.integrity import require_intact
from automodel_ckpt.errors import CheckpointUnusable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.tensors.float_cast import Array

_COMPLEX = frozenset({"C64", "C128"})


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a tensor, in double precision.

    *min*, *max*, *mean*, *std* (of the population) and *norm* (Euclidean) are those of the finite values. They are None
    if there are none, or if the dtype is complex.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    norm: float | None
    num_nan: int
    num_inf: int
    num_zero: int
    numel: int


class _Sums:
    """Statistics of the blocks so far.

    Means and squared deviations of blocks are combined (Chan, Golub, LeVeque 1979): the difference of two large raw
    sums would lose the variance.
    """

    def __init__(self) -> None:
        self.num_finite = 0
        self.num_nan = 0
        self.num_inf = 0
        self.num_zero = 0
        self.numel = 0
        self.low = math.inf
        self.high = -math.inf
        self.mean = 0.0
        self.squared_deviations = 0.0
        self.squares = 0.0

    def take(self, values: Array) -> None:
        import numpy as np

        flat = values.reshape(-1)
        self.numel += flat.size
        self.num_zero += int(flat.size - np.count_nonzero(flat))
        is_finite = np.isfinite(flat)
        if not is_finite.all():
            num_nan = int(np.count_nonzero(np.isnan(flat)))
            flat = flat[is_finite]
            num_not_finite = int(is_finite.size - flat.size)
            self.num_nan += num_nan
            self.num_inf += num_not_finite - num_nan
        if flat.size:
            with np.errstate(over="ignore"):
                self._combine(flat)

    def _combine(self, flat: Array) -> None:
        import numpy as np

        size = flat.size
        mean = float(flat.mean())
        centered = flat - mean
        total = self.num_finite + size
        difference = mean - self.mean
        within = float(np.dot(centered, centered))
        between = difference * difference * (self.num_finite * size / total)
        self.squared_deviations += within + between
        self.mean += difference * (size / total)
        self.squares += float(np.dot(flat, flat))
        self.low = min(self.low, float(flat.min()))
        self.high = max(self.high, float(flat.max()))
        self.num_finite = total

    def result(self) -> Statistics:
        counts = (self.num_nan, self.num_inf, self.num_zero, self.numel)
        if self.num_finite == 0:
            return Statistics(None, None, None, None, None, *counts)
        std = math.sqrt(self.squared_deviations / self.num_finite)
        norm = math.sqrt(self.squares)
        return Statistics(self.low, self.high, self.mean, std, norm, *counts)


def statistics_of(root: Path, tensor: Tensor) -> Statistics:
    """Read a tensor, whose files are relative to *root*, and return its statistics.

    Raises :class:`CheckpointUnusable` if it cannot be read, or its bytes do not match their digests.
    """
    sums = _Sums()
    try:
        require_intact(root, tensor)
        if tensor.dtype in _COMPLEX:
            return Statistics(None, None, None, None, None, 0, 0, 0, math.prod(tensor.shape))
        reader = BoxReader(root, tensor)
        for box in boxes(tensor.shape):
            sums.take(reader.wide(reader.read(box)))
    # ValueError: a file that is too short for the map that numpy asks for.
    except (OSError, ValueError) as error:
        value = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointUnusable(
            f"the tensor {tensor.fqn!r} cannot be read",
            where=str(root / tensor.slices[0].file),
            value=value,
            hint="run `ckpt verify` to list all damaged files; restore them from a copy",
        ) from error
    return sums.result()
