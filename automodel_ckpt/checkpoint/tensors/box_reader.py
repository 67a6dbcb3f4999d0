"""A stored tensor, a box at a time: memory does not grow with the tensor. Imports no torch, and numpy only to read."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.checkpoint.slices import Box, Slice, Tensor, in_one_piece, intersection

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.tensors.float_cast import Array

# Elements looked at at once.
_BLOCK_ELEMENTS = 256 << 10
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


def boxes(shape: tuple[int, ...]) -> Iterator[Box]:
    """The tensor in boxes of at most 256 Ki elements each, in row-major order."""
    if not shape or not math.prod(shape):
        yield from [Box((), ())] if not shape else []
        return
    inner, cut = 1, len(shape) - 1
    while cut > 0 and inner * shape[cut] <= _BLOCK_ELEMENTS:
        inner *= shape[cut]
        cut -= 1
    step, rest = max(1, _BLOCK_ELEMENTS // inner), shape[cut + 1 :]
    for outer in itertools.product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], step):
            sizes = (*(1 for _ in outer), min(step, shape[cut] - start), *rest)
            yield Box((*outer, start, *(0 for _ in rest)), sizes)


class BoxReader:
    """Boxes of a tensor from its mapped slices, as raw bits; their files are relative to *root*."""

    def __init__(self, root: Path, tensor: Tensor) -> None:
        self._tensor = tensor
        bits = DTYPE_BITS[tensor.dtype]
        self._dtype = f"<u{bits // 8}" if bits <= 64 else "<c16"
        self._maps = [
            (piece, self._mapped(root, piece)) for piece in in_one_piece(tensor) if piece.nbytes
        ]

    def _mapped(self, root: Path, piece: Slice) -> Array:
        import numpy as np

        with os.fdopen(open_safely(root, piece.file), "rb") as file:
            array: Array = np.memmap(file, self._dtype, "r", piece.start, piece.sizes or (1,))
        return array.reshape(piece.sizes)

    def read(self, box: Box) -> Array:
        """The values in *box*, an array of its sizes."""
        import numpy as np

        result = np.empty(box.sizes, self._dtype)
        for piece, values in self._maps:
            common = intersection(piece.box, box) if box.sizes else Box((), ())
            if common is not None:
                result[common.within(box)] = values[common.within(piece.box)]
        return result

    def wide(self, raw: Array) -> Array:
        """Raw bits as double precision."""
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
