"""Casts between the four ordinary float dtypes, bit-identical to torch's on a CPU, without torch.

Values are rounded to nearest, ties to even. Overflow becomes infinite. NaN stays NaN (its payload is lost). As in
torch, a double is rounded to single precision first on the way to half and bfloat16.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
        elif source == "F16":
            wide = _single_from_half(values)
        elif target in ("BF16", "F16"):
            # Rounds F64 twice, as torch does: a direct cast would differ for some values.
            wide = values.astype(np.float32, copy=False)
        if target == "BF16":
            return _bfloat16_from_single(wide)
        if target == "F16":
            return _half_from_single(wide)
        return wide.astype(_STORAGE[target], copy=False)


def _single_from_bfloat16(bits: Array) -> Array:
    wide = bits.astype(np.uint32)
    return np.left_shift(wide, np.uint32(16), out=wide).view(np.float32)


# Half has 10 bits of mantissa and an exponent bias of 15; single precision has 23 and 127. The conversions use integer
# arithmetic on arrays: numpy converts halves one by one, at a third of the speed, and floating-point arithmetic
# would depend on whether the processor flushes denormals to zero.
_MANTISSA_SHIFT = np.uint32(23 - 10)
_BIAS_DIFFERENCE = (127 - 15) << 23


def _single_from_half(values: Array) -> Array:
    bits = values.view(np.uint16).astype(np.uint32)
    sign = np.left_shift(bits & np.uint32(0x8000), np.uint32(16))
    bits &= np.uint32(0x7FFF)
    # Zero and subnormals wrap around to large numbers; infinity and NaN are above the largest exponent.
    # 0x0400 is the smallest normal half, 0x0400 + 0x7800 is infinity.
    is_special = bits - np.uint32(0x0400) >= np.uint32(0x7800)
    bits <<= _MANTISSA_SHIFT
    bits += np.uint32(_BIAS_DIFFERENCE)
    bits |= sign
    return _with_specials(bits.view(np.float32), is_special, values)


def _half_from_single(values: Array) -> Array:
    bits = values.view(np.uint32)
    sign = np.right_shift(bits, np.uint32(16))
    sign &= np.uint32(0x8000)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Values whose half is zero, subnormal, infinite or NaN.
    # Normal halves begin at 2**-14 (exponent 113) and end below 2**16, 30 exponents on.
    is_special = magnitude - np.uint32(113 << 23) >= np.uint32(30 << 23)
    # Round to nearest, ties to even: add half a unit less one (0xFFF), and the last bit that stays.
    last_bit = np.right_shift(magnitude, _MANTISSA_SHIFT)
    last_bit &= np.uint32(1)
    magnitude += last_bit
    magnitude -= np.uint32(_BIAS_DIFFERENCE - 0xFFF)
    magnitude >>= _MANTISSA_SHIFT
    magnitude |= sign
    return _with_specials(magnitude.astype(np.uint16).view(np.float16), is_special, values)


def _with_specials(result: Array, is_special: Array, values: Array) -> Array:
    """Replace the elements of *result* at *is_special* by numpy's conversion of *values*."""
    count = np.count_nonzero(is_special)
    if count * 16 > is_special.size:
        # Converting all elements is faster than selecting many.
        return values.astype(result.dtype)
    if count:
        result[is_special] = values[is_special].astype(result.dtype)
    return result


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


class _EightBitFloat(NamedTuple):
    """An 8-bit float: the bits of its mantissa, the exponent's bias, and the bit patterns that are not finite."""

    mantissa_bits: int
    bias: int
    nan: frozenset[int]
    infinite: frozenset[int] = frozenset()
    signed: bool = True


# Sources: the OCP specifications of FP8 (E4M3, E5M2) and of microscaling (E8M0), and ml_dtypes' of the FNUZ forms.
EIGHT_BIT_FLOATS = {
    "F8_E4M3": _EightBitFloat(3, 7, frozenset({0x7F, 0xFF})),
    "F8_E5M2": _EightBitFloat(
        2, 15, frozenset({0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}), frozenset({0x7C, 0xFC})
    ),
    "F8_E4M3FNUZ": _EightBitFloat(3, 8, frozenset({0x80})),
    "F8_E5M2FNUZ": _EightBitFloat(2, 16, frozenset({0x80})),
    "F8_E8M0": _EightBitFloat(0, 127, frozenset({0xFF}), signed=False),
}


@functools.cache
def eight_bit_values(dtype: str) -> Array:
    """Return the values of the 256 bit patterns of an 8-bit float, shape [256], in double precision."""
    form = EIGHT_BIT_FLOATS[dtype]
    values: Array = np.array([_eight_bit_value(form, bits) for bits in range(256)], np.float64)
    return values


def _eight_bit_value(form: _EightBitFloat, bits: int) -> float:
    sign = -1.0 if form.signed and bits & 0x80 else 1.0
    if bits in form.nan:
        return float("nan")
    if bits in form.infinite:
        return sign * float("inf")
    magnitude = bits & 0x7F if form.signed else bits
    num_mantissas = 1 << form.mantissa_bits
    exponent = magnitude >> form.mantissa_bits
    mantissa = magnitude & (num_mantissas - 1)
    if exponent == 0 and form.signed:  # subnormal; E8M0 has none
        return sign * mantissa * 2.0 ** (1 - form.bias - form.mantissa_bits)
    return sign * (1 + mantissa / num_mantissas) * 2.0 ** (exponent - form.bias)
