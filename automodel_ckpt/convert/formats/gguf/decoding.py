"""The values of tensors that differ between GGUF and Hugging Face files: quantized, permuted or offset."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.tensors.float_cast import Array, storage_dtype
from automodel_ckpt.convert.formats.gguf.header import TensorInfo
from automodel_ckpt.convert.formats.gguf.model import GgufTensor
from automodel_ckpt.convert.formats.gguf.positions import rotary_order
from automodel_ckpt.errors import RecipeError

# About this many bytes of single precision are decoded at a time.
_BLOCK_BYTES = 16 << 20


def require_library() -> Any:
    """Return the module ``gguf``. Raises :class:`RecipeError` if it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise RecipeError(
            "decoding quantized tensors of GGUF needs the package gguf",
            where="a GGUF file",
            value=str(error),
            hint="pip install 'automodel_ckpt[gguf]'",
        ) from error


def decoded_blocks(
    path: Path, info: TensorInfo, target: GgufTensor | None, head_dim: int
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor's values in row-major order, about ``_BLOCK_BYTES`` at a time.

    *info* is its place in the file *path*, and *target* describes how its values differ. None: they do not. Quantized
    values are yielded in single precision.
    """
    rows = _rows(path, info)
    order = np.arange(rows.shape[0])
    if target is not None and target.heads is not None:
        # The inverse: where each row of transformers is in llama.cpp's.
        order = np.argsort(rotary_order(target.heads, head_dim))
    row_length = info.shape[-1] if info.shape else 1
    num_rows = max(1, _BLOCK_BYTES // max(4 * row_length, 1))
    for first in range(0, rows.shape[0], num_rows):
        block = rows[order[first : first + num_rows]]
        if info.kind.is_quantized:
            library = require_library()
            block = library.quants.dequantize(block, library.GGMLQuantizationType[info.kind.name])
        if target is not None and target.offset:
            block = block - np.float32(target.offset)
        yield np.ascontiguousarray(block).data


def _rows(path: Path, info: TensorInfo) -> Array:
    """Return the rows of a tensor, mapped: blocks as bytes if it is quantized, else values."""
    if not info.nbytes:
        return np.empty((0, 1), np.float32)
    num_rows = math.prod(info.shape[:-1])
    row_bytes = info.nbytes // num_rows
    dtype = np.dtype(np.uint8)
    if info.kind.dtype is not None:
        dtype = storage_dtype(info.kind.dtype, DTYPE_BITS[info.kind.dtype])
    shape = (num_rows, row_bytes // dtype.itemsize)
    return np.memmap(path, dtype, "r", info.start, shape)
