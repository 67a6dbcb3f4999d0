"""Verifies the bytes of a stored tensor, and reads it in boxes. Memory does not grow with the tensor.

Imports no torch, and numpy only to read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.checkpoint.parts.slices import (
    Box,
    Slice,
    Tensor,
    contiguous_slices,
    intersection,
    row_major_boxes,
    whole_box,
)
from automodel_ckpt.checkpoint.parts.tree import FileSlice, damaged
from automodel_ckpt.errors import CheckpointUnusable, Problem, os_problem

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.tensors.float_cast import Array

INTEGERS = {
    "I8": "<i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "U8": "<u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "BOOL": "<u1",
}
"""The numpy dtypes of integers, by safetensors code."""


def map_slice(file: Path | BinaryIO, stored: Slice, dtype: Any) -> Array:
    """Map a slice of *file* as an array of its sizes, with elements of the numpy *dtype*. It is not interleaved.

    Only the pages that are accessed are read. The array of a strided slice is not contiguous.
    """
    import numpy as np

    if stored.strides is None:
        # numpy maps no array without dimensions.
        mapped = np.memmap(file, dtype, "r", stored.start, stored.sizes or (1,))
        return mapped.reshape(stored.sizes)
    # The stride of a dimension of one element has no meaning, and can be any number.
    pairs = list(zip(stored.sizes, stored.strides, strict=True))
    strides = [stride if size > 1 else 0 for size, stride in pairs]
    last = sum((size - 1) * stride for (size, _), stride in zip(pairs, strides, strict=True))
    # Raises ValueError where the file is shorter: no element is outside of the mapping.
    elements = np.memmap(file, dtype, "r", stored.start, (last + 1,))
    steps = [stride * elements.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(elements, stored.sizes, steps, writeable=False)


class BoxReader:
    """Reads boxes of a tensor as raw bits, from its memory-mapped slices. Their files are relative to *root*."""

    def __init__(self, root: Path, tensor: Tensor) -> None:
        self._tensor = tensor
        bits = DTYPE_BITS[tensor.dtype]
        # Bits are compared, not floats: NaN is not equal to itself, and -0.0 equals 0.0. numpy has
        # no integers of 128 bits.
        self._dtype = f"<u{bits // 8}" if bits <= 64 else "<c16"
        self._maps: list[tuple[Slice, Array]] = []
        for stored in contiguous_slices(tensor):
            if stored.nbytes:  # an empty range cannot be mapped
                with os.fdopen(open_safely(root, stored.file), "rb") as file:
                    self._maps.append((stored, map_slice(file, stored, self._dtype)))

    def read(self, box: Box) -> Array:
        """Return the values in *box*, as an array of its sizes."""
        import numpy as np

        result = np.empty(box.sizes, self._dtype)
        for stored, values in self._maps:
            common = intersection(stored.box, box) if box.sizes else Box((), ())
            if common is not None:
                result[common.within(box)] = values[common.within(stored.box)]
        return result

    def wide(self, raw: Array) -> Array:
        """Convert raw bits to double precision."""
        import numpy as np

        from automodel_ckpt.checkpoint.tensors.float_cast import (
            EIGHT_BIT_FLOATS,
            cast,
            eight_bit_values,
            storage_dtype,
        )

        dtype = self._tensor.dtype
        if dtype in INTEGERS:
            return raw.view(INTEGERS[dtype]).astype(np.float64)
        if dtype in EIGHT_BIT_FLOATS:
            return eight_bit_values(dtype)[raw]
        return cast(raw.view(storage_dtype(dtype, DTYPE_BITS[dtype])), dtype, "F64")


def damage_problem(root: Path, tensor: Tensor) -> Problem | None:
    """Return the damage of a tensor's bytes; None when they match their digests. Slices without a digest are skipped.

    Files are relative to *root*. A file that cannot be read is damaged.
    """
    hint = "restore the file from another copy; `ckpt verify` reports everything that is damaged"
    by_file: dict[str, list[FileSlice]] = {}
    for stored in tensor.slices:
        if stored.nbytes and stored.digest is not None:
            by_file.setdefault(stored.file, []).append(FileSlice(stored, tensor.shape))
    wrong = []
    try:
        for file, slices in by_file.items():
            wrong += [one.stored for one in damaged(root, file, slices)]
    except OSError as error:
        return os_problem(error, f"a file of the checkpoint {root.name} cannot be read", hint=hint)
    if not wrong:
        return None
    places = sorted({f"slice at {list(stored.offsets)}" for stored in wrong})
    return Problem(
        f"the tensor {tensor.fqn!r} is damaged: its digest differs",
        str(root / wrong[0].file),
        ", ".join(places[:3]),
        hint,
    )


def require_intact(root: Path, tensor: Tensor) -> None:
    """Raise :class:`CheckpointUnusable` if the stored bytes of a tensor are damaged."""
    problem = damage_problem(root, tensor)
    if problem is not None:
        raise CheckpointUnusable.all_of([problem])


def read_row_major(root: Path, stored: Slice, first: int, memory: memoryview) -> None:
    """Fill *memory* with the row-major bytes of a strided slice in a file below *root*, from element *first* on.

    Raises OSError, and ValueError if the file is too short.
    """
    import numpy as np

    from automodel_ckpt.checkpoint.tensors.float_cast import storage_dtype

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
    import numpy as np

    from automodel_ckpt.checkpoint.tensors.float_cast import storage_dtype

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
