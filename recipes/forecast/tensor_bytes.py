"""The bytes of tensors, by their types or by another one."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of all elements of *tensors*."""
    return sum(tensor.nbytes for tensor in tensors)


def bytes_in(dtype: torch.dtype | None, tensors: Iterable[torch.Tensor]) -> int:
    """The bytes that *tensors* would have in *dtype*; None: in their types."""
    if dtype is None:
        return nbytes(tensors)
    return dtype.itemsize * sum(tensor.numel() for tensor in tensors)
