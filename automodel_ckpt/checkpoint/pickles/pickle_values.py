"""Plain data as ``torch.save`` writes it; NumPy's arrays and numbers go in as tensors that know what they were.

So such a file still holds nothing but what ``torch.load(weights_only=True)`` takes, where they are tensors; our own
reader (``pickle_reader.py``) converts them back.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from typing import Any

import numpy as np
import torch

NUMPY_MARK = "automodel_ckpt.numpy"
"""The attribute of a tensor that was NumPy's: ``array`` or ``scalar``."""


class Pickler(pickle.Pickler):
    """The pickler that ``torch.save`` derives from; it looks up this name in the module that it is given."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray | np.generic):
            return NotImplemented
        # A copy, because from_numpy rejects negative strides and warns about read-only arrays.
        tensor = torch.from_numpy(np.array(value))
        setattr(tensor, NUMPY_MARK, "array" if isinstance(value, np.ndarray) else "scalar")
        # torch.save uses protocol 2.
        return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]


def saved(value: Any) -> memoryview:
    """Return the content of a file with *value*.

    Call :func:`~automodel_ckpt.checkpoint.state.storable.check_safe` before: it raises for values that cannot be read.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=sys.modules[__name__])
    return buffer.getbuffer()


def has_counterpart(dtype: np.dtype[Any]) -> bool:
    """Whether torch has this type of NumPy's, in this byte order."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).numpy().dtype == dtype
    except (TypeError, ValueError):
        return False


@functools.cache
def is_saved(dtype: torch.dtype) -> bool:
    """Whether ``torch.save`` knows this type."""
    try:
        torch.save(torch.empty(0, dtype=dtype, device="cpu"), io.BytesIO())
    except (KeyError, RuntimeError):
        return False
    return True
