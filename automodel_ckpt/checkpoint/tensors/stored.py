"""Reading a stored tensor as an array. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.tensors.float_cast import Array, storage_dtype
from automodel_ckpt.checkpoint.tensors.integrity import require_intact
from automodel_ckpt.checkpoint.tensors.strided import map_slice


def whole_checked(root: Path, tensor: Tensor) -> Array:
    """Return a tensor as an array, after its bytes were compared with their digests.

    Raises :class:`CheckpointUnusable` if they do not match.
    """
    require_intact(root, tensor)
    return whole(root, tensor)


def whole(root: Path, tensor: Tensor) -> Array:
    """Return a tensor as a contiguous array of :func:`storage_dtype`. A tensor in one slice is memory-mapped, not read,
    unless its elements are apart in the file."""
    dtype = storage_dtype(tensor.dtype, DTYPE_BITS[tensor.dtype])
    slices = [stored for stored in tensor.slices if stored.nbytes]
    if len(slices) == 1 and slices[0].sizes == tensor.shape:
        (stored,) = slices
        mapped = map_slice(root / stored.file, stored, dtype)
        return mapped if stored.strides is None else np.ascontiguousarray(mapped)
    result: Array = np.empty(tensor.shape, dtype)
    for stored in slices:
        values = map_slice(root / stored.file, stored, dtype)
        result[stored.box.within(tensor.box)] = values
    return result
