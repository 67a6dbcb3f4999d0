"""Casts between the four ordinary float dtypes, bit for bit as torch does them on a CPU, without torch.

Rounding is to nearest, ties to even; what overflows becomes infinite; NaN stays NaN (its payload is not kept). As in
torch, a double reaches half and bfloat16 by way of single precision.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# How numpy holds the elements of a safetensors dtype: floats that it lacks, and all else, as raw bits.
_STORAGE_BY_BITS = {8: "<u1", 16: "<u2", 32: "<u4", 64: "<u8", 128: "<c16"}
_CHUNK_ELEMENTS = 64 << 10
_STORAGE = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


def storage_dtype(dtype: str, bits: int) -> np.dtype[Any]:
    """The numpy dtype that holds *dtype*'s elements of *bits* bits without changing them."""
    return np.dtype(_STORAGE.get(dtype, _STORAGE_BY_BITS[bits]))


def cast(values: Array, source: str, target: str) -> Array:
    """*values* of the safetensors dtype *source*, held as in :func:`storage_dtype`, as *target*; the shape stays."""
    if source == target:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        wide = values
        if source == "BF16":
            wide = _single_from_bfloat16(values)
        elif source == "F16":
            wide = _single_from_half(values)
        elif target in ("BF16", "F16"):
            wide = values.astype(np.float32, copy=False)
        if target == "BF16":
            return _bfloat16_from_single(wide)
        return (
            _half_from_single(wide)
            if target == "F16"
            else wide.astype(_STORAGE[target], copy=False)
        )


def _single_from_bfloat16(bits: Array) -> Array:
    wide = bits.astype(np.uint32)
    return np.left_shift(wide, np.uint32(16), out=wide).view(np.float32)


# The arithmetic is that of integers, a pass over a cacheful at a time: numpy converts halves one by one, at a third of
# the speed, and floating point arithmetic would depend on whether the processor flushes denormals.
def _single_from_half(values: Array) -> Array:
    bits = values.view(np.uint16).astype(np.uint32)
    sign = np.left_shift(bits & np.uint32(0x8000), np.uint32(16))
    bits &= np.uint32(0x7FFF)
    odd = bits - np.uint32(0x0400) >= np.uint32(
        0x7800
    )  # no normal number: zero, too small, infinite, NaN
    bits <<= np.uint32(13)
    bits += np.uint32(112 << 23)
    bits |= sign
    return _mended(bits.view(np.float32), odd, values)


def _half_from_single(values: Array) -> Array:
    bits = values.view(np.uint32)
    sign = np.right_shift(bits, np.uint32(16))
    sign &= np.uint32(0x8000)
    size = bits & np.uint32(0x7FFFFFFF)
    odd = size - np.uint32(113 << 23) >= np.uint32(30 << 23)  # no normal half
    last = np.right_shift(size, np.uint32(13))
    last &= np.uint32(1)
    size += last
    size -= np.uint32((112 << 23) - 0xFFF)
    size >>= np.uint32(13)
    size |= sign
    return _mended(size.astype(np.uint16).view(np.float16), odd, values)


def _mended(result: Array, odd: Array, values: Array) -> Array:
    """*result*, with numpy's own conversion of the *values* that are *odd*; of all, where those are many."""
    count = np.count_nonzero(odd)
    if count * 16 > odd.size:
        return values.astype(result.dtype)
    if count:
        result[odd] = values[odd].astype(result.dtype)
    return result


def _bfloat16_from_single(values: Array) -> Array:
    bits = values.view(np.uint32)
    # One temporary, changed in place: fresh memory costs more than the arithmetic.
    rounded = np.right_shift(bits, np.uint32(16), out=np.empty_like(bits))
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    result = rounded.astype(np.uint16)
    # The largest of numbers among which one is none is none.
    if values.size and np.isnan(values.max()):
        result[np.isnan(values)] = 0x7FC0
    return result


def cast_into(values: Array, source: str, target: str, out: Array) -> None:
    """Write *values* of dtype *source* as *target* into *out*, of the same shape, a cacheful at a time."""
    if source == target:
        out[...] = values
    elif values.size <= _CHUNK_ELEMENTS or not values.ndim:
        out[...] = cast(values, source, target)
    else:
        rows = max(1, _CHUNK_ELEMENTS * len(values) // values.size)
        for start in range(0, len(values), rows):
            part = slice(start, start + rows)
            if rows == 1 and values.ndim > 1:
                cast_into(values[start], source, target, out[start])
            else:
                out[part] = cast(values[part], source, target)


class _Eight(NamedTuple):
    """An 8-bit float: bits of its mantissa, the exponent's bias, and which bit patterns are no finite number."""

    mantissa_bits: int
    bias: int
    nan: frozenset[int]
    infinite: frozenset[int] = frozenset()
    signed: bool = True


# Sources: the OCP specifications of FP8 (E4M3, E5M2) and of microscaling (E8M0), and ml_dtypes' of the FNUZ forms.
EIGHT_BIT_FLOATS = {
    "F8_E4M3": _Eight(3, 7, frozenset({0x7F, 0xFF})),
    "F8_E5M2": _Eight(
        2, 15, frozenset({0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}), frozenset({0x7C, 0xFC})
    ),
    "F8_E4M3FNUZ": _Eight(3, 8, frozenset({0x80})),
    "F8_E5M2FNUZ": _Eight(2, 16, frozenset({0x80})),
    "F8_E8M0": _Eight(0, 127, frozenset({0xFF}), signed=False),
}


@functools.cache
def eight_bit_values(dtype: str) -> Array:
    """The value of each of the 256 bit patterns of an 8-bit float, in double precision."""
    form = EIGHT_BIT_FLOATS[dtype]
    values: Array = np.array([_eight_bit_value(form, bits) for bits in range(256)], np.float64)
    return values


def _eight_bit_value(form: _Eight, bits: int) -> float:
    sign = -1.0 if form.signed and bits & 0x80 else 1.0
    if bits in form.nan:
        return float("nan")
    if bits in form.infinite:
        return sign * float("inf")
    magnitude = bits & 0x7F if form.signed else bits
    exponent, mantissa = (
        magnitude >> form.mantissa_bits,
        magnitude & ((1 << form.mantissa_bits) - 1),
    )
    if exponent == 0 and form.signed:  # subnormal; E8M0 has none
        return sign * mantissa * 2.0 ** (1 - form.bias - form.mantissa_bits)
    return sign * (1 + mantissa / (1 << form.mantissa_bits)) * 2.0 ** (exponent - form.bias)
