"""A Triton kernel for AdamW with 8-bit moments, which reads and writes each element once.

A moment is decoded by its table of 256 values. To find the nearest code without a search, the first bits of a number
select an entry of a lookup table: the numbers with these bits lie on both sides of at most one middle between two
codes, and the entry has the lower code and the place of that middle. See :func:`lookup_of`.

Import this module only where Triton is installed. The kernel also runs on a CPU, in Triton's interpreter
(TRITON_INTERPRET=1).
"""

# Triton evaluates annotations when it compiles a kernel, and accepts no types of Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

Nearest = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The codes of numbers by a table."""

_BLOCK = 1024
"""Elements that a program updates, if a row has no more: 8 in each thread of 4 warps."""
_WARPS = 4
_LONGEST_ROW = 8192
"""Elements of the longest row, whose threads have 32 each, as the registers suffice for no more."""
_EVICTION = "evict_first"
"""The policy of the cache for all elements: none is read again before the next step."""
_WIDTH = tl.constexpr(4)
"""Neighboring elements of a thread: 16 bytes in float32."""
_SIGNED_SHIFT = tl.constexpr(17)
"""Last bits of a number that select no entry. 6 bits of the mantissa do: the table has 64 codes from 0.1 to 1."""
_UNSIGNED_SHIFT = tl.constexpr(16)
"""As above; 7 bits of the mantissa, for 128 codes."""
_SIGN = tl.constexpr(31)
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
_INFINITY = tl.constexpr(float("inf"))
_NAN = tl.constexpr(0x7FC0)
"""The bits of NaN in bfloat16."""


@triton.jit
def _nearest(numbers, lookup, SHIFT: tl.constexpr):
    """The codes of float32 *numbers*, by a table of :func:`lookup_of`."""
    bits = numbers.to(tl.int32, bitcast=True)
    entries = tl.load(lookup + (bits.to(tl.uint32, bitcast=True) >> SHIFT))
    # The place of a number among those with the same first bits.
    places = (bits ^ (bits >> _SIGN)) & ((1 << SHIFT) - 1)
    return ((entries + places) >> SHIFT).to(tl.uint8)


@triton.jit
def _scales(moments):
    """The largest absolute value of each row [1, rows, 1, 1]; NaN if there is one."""
    # The maximum of floats would leave out NaN.
    bits = moments.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(tl.max(bits, 3, keep_dims=True), 2, keep_dims=True), 0, keep_dims=True)
    return largest.to(tl.float32, bitcast=True)


@triton.jit
def _divided(moments, scales):
    """*moments* / *scales*, rounded once, with one division for each row.

    Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990, theorem 7.
    """
    # A row of zeros has the scale 0.
    positive = tl.where(scales < _SMALLEST, _SMALLEST, scales)
    reciprocals = tl.div_rn(1.0, positive)
    # A remainder of infinity times 0 would be NaN.
    finite = tl.where(scales == _INFINITY, 0.0, positive)
    quotients = moments * reciprocals
    remainders = tl.fma(-quotients, finite, moments)
    return tl.fma(remainders, reciprocals, quotients)


@triton.jit
def _joined(rounded, further_bits):
    """The float32 values of the bits of bfloat16 values and further bits, as ``adam8bit.joined`` has them."""
    high = rounded.to(tl.int32) << 16
    bits = further_bits.to(tl.int32)
    bits = tl.where((high << 1) == 0, tl.maximum(bits, 0), bits)
    return (high + bits).to(tl.float32, bitcast=True)


# The number of rows differs between tensors, and would be compiled for multiples of 16 separately.
@triton.jit(do_not_specialize=["num_rows"])
def _update(
    weights, gradients, average_codes, square_codes, average_scales, square_scales, further_bits,
    signed, unsigned, of_signed, of_unsigned,
    num_rows, average_part, square_part, decay, size, correction, eps,
    HAS_BITS: tl.constexpr, EVICTION: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Update rows of elements. *of_signed* and *of_unsigned* are the lookup tables of both tables of codes.

    Elements are [LANES, ROWS, PARTS, 4], so that a thread has neighbors, a warp has a row of 256, and each instruction
    of a warp loads neighbors.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[None, :, None, None]
    lane = tl.arange(0, LANES)[:, None, None, None]
    part = tl.arange(0, PARTS)[None, None, :, None]
    item = tl.arange(0, _WIDTH)[None, None, None, :]
    length: tl.constexpr = LANES * PARTS * _WIDTH
    # Embeddings of large models have more elements than a number of 32 bits can count, but a program has few.
    start = first * length
    places = row * length + (part * LANES + lane) * _WIDTH + item
    is_row = row < num_rows - first
    is_element = is_row & (places >= 0)
    average_code = tl.load(average_codes + start + places, mask=is_element, other=0, eviction_policy=EVICTION)
    square_code = tl.load(square_codes + start + places, mask=is_element, other=0, eviction_policy=EVICTION)
    gradient = tl.load(gradients + start + places, mask=is_element, other=0.0, eviction_policy=EVICTION)
    weight = tl.load(weights + start + places, mask=is_element, other=0, eviction_policy=EVICTION)
    if HAS_BITS:
        bits = tl.load(further_bits + start + places, mask=is_element, other=0, eviction_policy=EVICTION)
    average_scale = tl.load(average_scales + first + row, mask=is_row, other=0.0)
    square_scale = tl.load(square_scales + first + row, mask=is_row, other=0.0)
    average = tl.load(signed + average_code.to(tl.int32)) * average_scale
    square = tl.load(unsigned + square_code.to(tl.int32)) * square_scale

    # As torch.lerp does with weights below 1/2.
    gradient = gradient.to(tl.float32)
    average = tl.fma(gradient - average, average_part, average)
    square = tl.fma(gradient * gradient - square, square_part, square)

    denominator = tl.sqrt(square) * tl.div_rn(1.0, correction) + eps
    change = average / denominator * size
    if HAS_BITS:
        changed = _joined(weight, bits) * decay - change
        changed_bits = changed.to(tl.int32, bitcast=True)
        high = tl.where(changed != changed, _NAN, (changed_bits + 0x8000) >> 16)
        tl.store(weights + start + places, high.to(tl.int16), mask=is_element, eviction_policy=EVICTION)
        rest = (changed_bits - (high << 16)).to(tl.int16)
        tl.store(further_bits + start + places, rest, mask=is_element, eviction_policy=EVICTION)
    else:
        changed = (weight.to(tl.float32) * decay - change).to(weight.dtype)
        tl.store(weights + start + places, changed, mask=is_element, eviction_policy=EVICTION)

    average_scale = _scales(average)
    square_scale = _scales(square)
    tl.store(average_scales + first + row, average_scale, mask=is_row)
    tl.store(square_scales + first + row, square_scale, mask=is_row)
    average_code = _nearest(_divided(average, average_scale), of_signed, _SIGNED_SHIFT)
    square_code = _nearest(_divided(square, square_scale), of_unsigned, _UNSIGNED_SHIFT)
    tl.store(average_codes + start + places, average_code, mask=is_element, eviction_policy=EVICTION)
    tl.store(square_codes + start + places, square_code, mask=is_element, eviction_policy=EVICTION)
