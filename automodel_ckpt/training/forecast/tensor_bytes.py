"""The size of tensors in bytes, in their own dtypes or in another one."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of all *tensors* together, in bytes."""
    return sum(tensor.nbytes for tensor in tensors)


def bytes_in(dtype: torch.dtype | None, tensors: Iterable[torch.Tensor]) -> int:
    """Return the size in bytes that all *tensors* together would have in *dtype*; None: in their own dtypes."""
    if dtype is None:
        return nbytes(tensors)
    return dtype.itemsize * sum(tensor.numel() for tensor in tensors)
