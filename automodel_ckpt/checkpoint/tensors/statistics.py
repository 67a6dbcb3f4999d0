"""Statistics of the values of stored tensors, read once, one box at a time. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader, boxes
from automodel_ckpt.checkpoint.tensors.integrity import require_intact
from automodel_ckpt.errors import CheckpointUnusable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.tensors.float_cast import Array

_COMPLEX = frozenset({"C64", "C128"})


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a tensor, in double precision.

    Minimum, maximum, mean, standard deviation (of the population) and Euclidean norm of its finite values; None where
    there are none, or the dtype is complex. And the number of NaN, infinite, zero and all elements.
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
    """Taken in block after block (Chan, Golub, LeVeque 1979: means and squares of parts are combined, not raw sums)."""

    def __init__(self) -> None:
        self.count, self.nans, self.infinities, self.zeros, self.numel = 0, 0, 0, 0, 0
        self.low, self.high, self.mean, self.spread, self.square = (
            math.inf,
            -math.inf,
            0.0,
            0.0,
            0.0,
        )

    def take(self, values: Array) -> None:
        import numpy as np

        flat = values.reshape(-1)
        self.numel += flat.size
        self.zeros += int(flat.size - np.count_nonzero(flat))
        finite = np.isfinite(flat)
        if not finite.all():
            nans = int(np.count_nonzero(np.isnan(flat)))
            flat = flat[finite]
            self.nans, self.infinities = (
                self.nans + nans,
                self.infinities + int(finite.size - flat.size) - nans,
            )
        if flat.size:
            with np.errstate(over="ignore"):
                self._combine(flat)

    def _combine(self, flat: Array) -> None:
        import numpy as np

        size, mean = flat.size, float(flat.mean())
        centred = flat - mean
        gap, total = mean - self.mean, self.count + size
        self.spread += float(np.dot(centred, centred)) + gap * gap * (self.count * size / total)
        self.mean += gap * (size / total)
        self.square += float(np.dot(flat, flat))
        self.low, self.high, self.count = (
            min(self.low, float(flat.min())),
            max(self.high, float(flat.max())),
            total,
        )

    def result(self) -> Statistics:
        counts = (self.nans, self.infinities, self.zeros, self.numel)
        if not self.count:
            return Statistics(None, None, None, None, None, *counts)
        deviation = math.sqrt(self.spread / self.count)
        return Statistics(
            self.low, self.high, self.mean, deviation, math.sqrt(self.square), *counts
        )


def statistics_of(root: Path, tensor: Tensor) -> Statistics:
    """Read a tensor whose files are relative to *root*.

    Raises :class:`CheckpointUnusable` for a tensor that cannot be read, or whose bytes have not their digests.
    """
    sums = _Sums()
    try:
        require_intact(root, tensor)
        if tensor.dtype in _COMPLEX:
            return Statistics(None, None, None, None, None, 0, 0, 0, math.prod(tensor.shape))
        reader = BoxReader(root, tensor)
        for box in boxes(tensor.shape):
            sums.take(reader.wide(reader.read(box)))
    except (OSError, ValueError) as error:
        value = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointUnusable(
            f"the tensor {tensor.fqn!r} cannot be read",
            where=str(root / tensor.slices[0].file),
            value=value,
            hint="run `ckpt verify` to list all damaged files; restore them from a copy",
        ) from error
    return sums.result()
