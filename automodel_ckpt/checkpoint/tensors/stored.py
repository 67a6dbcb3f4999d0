"""Reading a stored tensor as an array. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.tensors.float_cast import Array, storage_dtype
from automodel_ckpt.checkpoint.tensors.integrity import require_intact


def whole_checked(root: Path, tensor: Tensor) -> Array:
    """Return a tensor as an array, after its bytes were compared with their digests.

    Raises :class:`CheckpointUnusable` if they do not match.
    """
    require_intact(root, tensor)
    return whole(root, tensor)


def whole(root: Path, tensor: Tensor) -> Array:
    """Return a tensor as an array of :func:`storage_dtype`. A tensor in one slice is memory-mapped, not read."""
    dtype = storage_dtype(tensor.dtype, DTYPE_BITS[tensor.dtype])
    slices = [stored for stored in tensor.slices if stored.nbytes]
    if len(slices) == 1 and slices[0].sizes == tensor.shape:
        (stored,) = slices
        return _mapped(root / stored.file, dtype, stored.start, stored.sizes)
    result: Array = np.empty(tensor.shape, dtype)
    for stored in slices:
        values = _mapped(root / stored.file, dtype, stored.start, stored.sizes)
        result[stored.box.within(tensor.box)] = values
    return result


def _mapped(path: Path, dtype: np.dtype[Any], start: int, sizes: tuple[int, ...]) -> Array:
    # numpy maps no array without dimensions.
    array: Array = np.memmap(path, dtype, "r", start, sizes or (1,))
    return array.reshape(sizes)
