"""The bytes of a stored tensor, in blocks: memory does not grow with the tensor. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS, ORDINARY_FLOATS
from automodel_ckpt.checkpoint.parts.slices import Box, Tensor, boxes
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader, require_intact
from automodel_ckpt.checkpoint.tensors.float_cast import cast, storage_dtype

_ZEROS = bytes(1 << 16)


def tensor_blocks(
    root: Path,
    tensor: Tensor,
    dtype: str,
    part: Box | None = None,
    *,
    num_zeros: int = 0,
) -> Iterator[memoryview]:
    """Yield the row-major bytes of a tensor in files below *root*, or of a *part* of it, cast to *dtype*, in blocks of
    at most 256 Ki elements, and then *num_zeros* bytes of zeros.

    The stored bytes are compared with their digests first, if there are any.
    Raises :class:`CheckpointUnusable` for a damaged tensor.
    """
    require_intact(root, tensor)
    outer = part or tensor.box
    reader = BoxReader(root, tensor)
    stored_dtype = storage_dtype(tensor.dtype, DTYPE_BITS[tensor.dtype])
    for inner in boxes(outer.sizes):
        offsets = tuple(map(sum, zip(outer.offsets, inner.offsets, strict=True)))
        values = reader.read(Box(offsets, inner.sizes)).reshape(-1).view(stored_dtype)
        yield cast(values, tensor.dtype, dtype).view("u1").data
    for first in range(0, num_zeros, len(_ZEROS)):
        yield memoryview(_ZEROS)[: num_zeros - first]


def is_copy(root: Path, copy: Tensor, other_root: Path, original: Tensor) -> bool:
    """Return whether *copy* has the values of *original*, rounded to its dtype. Each is in files below its root."""
    dtypes = {copy.dtype, original.dtype}
    if copy.shape != original.shape or (len(dtypes) > 1 and not dtypes <= ORDINARY_FLOATS):
        return False
    pairs = zip(
        tensor_blocks(root, copy, copy.dtype),
        tensor_blocks(other_root, original, copy.dtype),
        strict=True,
    )
    return all(ours == theirs for ours, theirs in pairs)
