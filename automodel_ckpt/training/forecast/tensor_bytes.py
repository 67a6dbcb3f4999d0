"""The size of tensors in bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of all *tensors* together, in bytes."""
    return sum(tensor.nbytes for tensor in tensors)
