"""Build the archive that ``torch.save`` makes of one tensor, as the parts before and after the tensor's raw bytes.

The process that writes the bytes therefore needs no torch. The records (``torch_zip.py``), in torch's order: the
pickled description, format marks, ``data/0`` with the tensor's bytes, version, an identifier.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import _utils as rebuilders
from torch.storage import UntypedStorage, _dtype_to_storage_type_map

from automodel_ckpt.checkpoint.pickles.torch_zip import TensorArchive, archive_around


@functools.lru_cache(maxsize=4096)
def tensor_archive(dtype: torch.dtype, sizes: tuple[int, ...], nbytes: int) -> TensorArchive:
    """The archive that ``torch.save`` writes for a contiguous tensor on the CPU, without the bytes of the tensor."""
    return archive_around(_pickled(dtype, sizes, nbytes), nbytes)


class _Described:
    """Pickles like a tensor of these sizes whose storage is in another record."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...], nbytes: int) -> None:
        self.dtype, self.sizes, self.nbytes = dtype, sizes, nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        storage = _Storage(self.dtype, self.nbytes)
        hooks: OrderedDict[str, Any] = OrderedDict()
        plain = (storage, 0, self.sizes, _strides(self.sizes), False, hooks)
        if self.dtype in _dtype_to_storage_type_map():
            return rebuilders._rebuild_tensor_v2, plain
        return rebuilders._rebuild_tensor_v3, (*plain, self.dtype)


class _Storage(NamedTuple):
    dtype: torch.dtype
    nbytes: int

    def identifier(self) -> tuple[Any, ...]:
        name = _dtype_to_storage_type_map().get(self.dtype)
        kind = getattr(torch, name) if name is not None else UntypedStorage
        return (
            "storage",
            kind,
            "0",
            "cpu",
            self.nbytes // (self.dtype.itemsize if name is not None else 1),
        )


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.identifier() if isinstance(obj, _Storage) else None


def _pickled(dtype: torch.dtype, sizes: tuple[int, ...], nbytes: int) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Described(dtype, sizes, nbytes))
    return buffer.getvalue()


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        # torch counts an empty dimension as 1 in the strides of a contiguous tensor.
        step *= max(size, 1)
    return tuple(reversed(strides))
