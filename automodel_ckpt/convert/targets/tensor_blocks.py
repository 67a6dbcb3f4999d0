"""The bytes of a stored tensor, in blocks: memory does not grow with the tensor. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS, ORDINARY_FLOATS
from automodel_ckpt.checkpoint.parts.slices import Box, Tensor
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader, boxes, require_intact
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


def difference(root: Path, copy: Tensor, base: Tensors, names: Sequence[str]) -> str:
    """Return how the tensor *copy* differs from the base's tensor with one of the *names*. Empty if it does not.

    The base's values are rounded to the dtype of the copy first: peft saves the dtype that the base had in training.
    """
    found = [base.tensors[name] for name in names if name in base.tensors]
    if not found:
        return f"the base has no {names[0]}"
    original = found[0]
    if copy.shape != original.shape:
        return f"in the file {list(copy.shape)}, in the base {list(original.shape)}"
    if not {copy.dtype, original.dtype} <= ORDINARY_FLOATS and copy.dtype != original.dtype:
        return f"in the file {copy.dtype}, in the base {original.dtype}"
    pairs = zip(
        tensor_blocks(root, copy, copy.dtype),
        tensor_blocks(base.root, original, copy.dtype),
        strict=True,
    )
    return "" if all(ours == theirs for ours, theirs in pairs) else "other values"
