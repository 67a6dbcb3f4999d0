"""Casts between the four ordinary float dtypes, bit-identical to torch's on a CPU, without torch.

Values are rounded to nearest, ties to even. Overflow becomes infinite. NaN stays NaN (its payload is lost). As in
torch, a double is rounded to single precision first on the way to half and bfloat16.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from automodel_ckpt.checkpoint.files.dtypes import TORCH_NAMES

Array = npt.NDArray[Any]

# The numpy dtypes of a safetensors dtype's elements: raw bits, except for the floats that numpy has.
_STORAGE_BY_BITS = {8: "<u1", 16: "<u2", 32: "<u4", 64: "<u8", 128: "<c16"}
# A chunk and its temporaries fit into the processor's cache.
_CHUNK_ELEMENTS = 64 << 10
_STORAGE = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


def storage_dtype(dtype: str, bits: int) -> np.dtype[Any]:
    """Return the numpy dtype that stores elements of *dtype*, of *bits* bits each, without changing them."""
    return np.dtype(_STORAGE.get(dtype, _STORAGE_BY_BITS[bits]))


def cast(values: Array, source: str, target: str) -> Array:
    """Cast *values* from the safetensors dtype *source* to *target*.

    Values and result have the dtypes of :func:`storage_dtype`, and the same shape.
    """
    if source == target:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        wide = values
        if source == "BF16":
            wide = _single_from_bfloat16(values)
        elif target in ("BF16", "F16"):
            # Rounds F64 twice, as torch does: a direct cast would differ for some values.
            wide = values.astype(np.float32, copy=False)
        if target == "BF16":
            return _bfloat16_from_single(wide)
        return wide.astype(_STORAGE[target], copy=False)


def _single_from_bfloat16(bits: Array) -> Array:
    wide = bits.astype(np.uint32)
    return np.left_shift(wide, np.uint32(16), out=wide).view(np.float32)


def _bfloat16_from_single(values: Array) -> Array:
    bits = values.view(np.uint32)
    # One temporary, changed in place: allocating memory costs more than the arithmetic. 0x7FFF and the last bit that
    # stays round to nearest, ties to even.
    rounded = np.right_shift(bits, np.uint32(16), out=np.empty_like(bits))
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    result = rounded.astype(np.uint16)
    # The maximum is NaN if any value is, and is faster than a mask. Rounding would turn some NaN into infinity.
    if values.size and np.isnan(values.max()):
        result[np.isnan(values)] = 0x7FC0
    return result


def cast_into(values: Array, source: str, target: str, out: Array) -> None:
    """Cast *values* from *source* to *target* into *out*, which has the same shape, in chunks that fit the cache."""
    if source == target:
        out[...] = values
        return
    if values.size <= _CHUNK_ELEMENTS:
        out[...] = cast(values, source, target)
        return
    rows = max(1, _CHUNK_ELEMENTS * len(values) // values.size)
    for start in range(0, len(values), rows):
        part = slice(start, start + rows)
        if rows == 1 and values.ndim > 1:
            cast_into(values[start], source, target, out[start])
        else:
            out[part] = cast(values[part], source, target)


EIGHT_BIT_FLOATS = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"})


@functools.cache
def eight_bit_values(dtype: str) -> Array:
    """Return the values of the 256 bit patterns of an 8-bit float, shape [256], in double precision."""
    import torch  # NumPy does not have these dtypes

    bits = torch.arange(256, dtype=torch.uint8).view(getattr(torch, TORCH_NAMES[dtype]))
    return bits.to(torch.float32).numpy().astype(np.float64)
