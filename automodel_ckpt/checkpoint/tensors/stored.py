"""Reading a stored tensor as an array, also where its elements are apart in the file. Imports no torch.

``torch.save`` stores a transposed tensor, or one in channels_last, as the storage of the original and its strides.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, row_major_boxes, whole_box
from automodel_ckpt.checkpoint.tensors.box_reader import map_slice, require_intact
from automodel_ckpt.checkpoint.tensors.float_cast import Array, storage_dtype


def read_row_major(root: Path, stored: Slice, first: int, memory: memoryview) -> None:
    """Fill *memory* with the row-major bytes of a strided slice in a file below *root*, from element *first* on.

    Raises OSError, and ValueError if the file is too short.
    """
    dtype = storage_dtype(stored.dtype, DTYPE_BITS[stored.dtype])
    target = np.frombuffer(memory, dtype)
    with os.fdopen(open_safely(root, stored.file), "rb") as file:
        values = map_slice(file, stored, dtype)
    done = 0
    for box in row_major_boxes(stored.sizes, first, first + target.size):
        index = box.within(whole_box(stored.sizes))
        target[done : done + box.numel].reshape(box.sizes)[...] = values[index]
        done += box.numel


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
    result = np.empty(tensor.shape, dtype)
    for stored in slices:
        values = map_slice(root / stored.file, stored, dtype)
        result[stored.box.within(tensor.box)] = values
    return result
