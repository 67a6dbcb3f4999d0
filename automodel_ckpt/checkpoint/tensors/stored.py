"""A stored tensor as an array. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.tensors.float_cast import Array, storage_dtype
from automodel_ckpt.checkpoint.tensors.integrity import require_intact


def whole_checked(root: Path, tensor: Tensor) -> Array:
    """A tensor put together from its slices, once their bytes are found to have their digests.

    Raises :class:`CheckpointUnusable` where they have not.
    """
    require_intact(root, tensor)
    return whole(root, tensor)


def whole(root: Path, tensor: Tensor) -> Array:
    """A tensor put together from its slices, as in :func:`storage_dtype`; mapped, not read, where it is one slice."""
    dtype = storage_dtype(tensor.dtype, DTYPE_BITS[tensor.dtype])
    pieces = [
        (piece, _mapped(root / piece.file, dtype, piece.start, piece.sizes))
        for piece in tensor.slices
        if piece.nbytes
    ]
    if len(pieces) == 1 and pieces[0][0].sizes == tensor.shape:
        return pieces[0][1]
    result: Array = np.empty(tensor.shape, dtype)
    for piece, values in pieces:
        result[piece.box.within(tensor.box)] = values
    return result


def _mapped(path: Path, dtype: np.dtype[Any], start: int, sizes: tuple[int, ...]) -> Array:
    array: Array = np.memmap(path, dtype, "r", start, sizes or (1,))
    return array.reshape(sizes)
