"""A Triton kernel for AdamW with 8-bit moments, which reads and writes each element once.

A moment is decoded by its table of 256 values, and encoded by a lookup table: the first bits of a number select
an entry, without a search (``code_tables.lookup_of``). The codes are equal to ``moment_codes.nearest``.

Import this module only where Triton is installed. The kernel also runs on a CPU, in Triton's interpreter
(TRITON_INTERPRET=1).
"""

# Triton evaluates annotations when it compiles a kernel, and accepts no types of Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from automodel_ckpt.base.code_tables import dynamic_table, lookup_of

_BLOCK = 1024
"""Elements that a program updates, if a row has no more: 8 in each thread of 4 warps."""
_WARPS = 4
_LONGEST_ROW = 8192
"""Elements of the longest row: each thread has 16; the registers of a thread suffice for few more."""
_MOST_WARPS = 16
"""Those of longer rows."""
_EVICTION = "evict_first"
"""The policy of the cache for all elements: none is read again before the next step."""
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of parameters and gradients."""
_WIDTH = tl.constexpr(4)
"""Neighboring elements of a thread: 16 bytes in float32."""
_SIGNED_SHIFT = tl.constexpr(17)
"""Last bits of a number that select no entry. 6 bits of the mantissa do: the table has 64 codes from 0.1 to 1."""
_UNSIGNED_SHIFT = tl.constexpr(16)
"""As above; 7 bits of the mantissa, for 128 codes."""
_SIGNED_REST = tl.constexpr(2**17 - 1)
_UNSIGNED_REST = tl.constexpr(2**16 - 1)
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
_INFINITY = tl.constexpr(float("inf"))
_NAN = tl.constexpr(0x7FC0)
"""The bits of NaN in bfloat16."""


@triton.jit
def _elements(LANES: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The rows [1, ROWS, 1, 1] and the elements [LANES, ROWS, PARTS, 4] of a program.

    So a thread has neighbors, a warp has a row of 256, and each instruction of a warp loads neighbors.
    """
    row = tl.arange(0, ROWS)[None, :, None, None]
    lane = tl.arange(0, LANES)[:, None, None, None]
    part = tl.arange(0, PARTS)[None, None, :, None]
    item = tl.arange(0, _WIDTH)[None, None, None, :]
    return row, ((row * PARTS + part) * LANES + lane) * _WIDTH + item


@triton.jit
def _between(start, end, part, IS_NEAR_START: tl.constexpr):
    """*start* + *part* (*end* - *start*), for parts below 1/2 as torch.lerp computes it.

    For others, that would leave rounding errors of *start*: with a part of 1 (betas of 0), a second moment would be 0
    instead of the square of a small gradient, and a weight would change by many times the learning rate.
    """
    if IS_NEAR_START:
        return tl.fma(end - start, part, start)
    return tl.fma(start, 1.0 - part, end * part)


@triton.jit
def _largest(moments):
    """The largest absolute value of each row [1, ROWS, 1, 1]; NaN if there is one."""
    # The maximum of floats would leave out NaN.
    bits = moments.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.max(tl.max(tl.max(bits, 3, keep_dims=True), 2, keep_dims=True), 0, keep_dims=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _quotients(moments, scales):
    """*moments* / *scales*, rounded once, with one division for each row.

    Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990.
    """
    # A row of zeros has the scale 0.
    positive = tl.where(scales < _SMALLEST, _SMALLEST, scales)
    # Otherwise, remainders of small moments would be less than the smallest float32 number.
    factors = tl.where(positive < 2.0**-60, 2.0**64, 1.0)
    positive *= factors
    moments *= factors
    reciprocals = tl.div_rn(1.0, positive)
    quotients = moments * reciprocals
    # A remainder of infinity times 0 would be NaN.
    finite = tl.where(scales == _INFINITY, 0.0, positive)
    remainders = tl.fma(-quotients, finite, moments)
    return tl.fma(remainders, reciprocals, quotients)


@triton.jit
def _codes(moments, scales, lookup, SHIFT: tl.constexpr, REST: tl.constexpr):
    """The codes of *moments* by a table of ``code_tables.lookup_of``."""
    bits = _quotients(moments, scales).to(tl.int32, bitcast=True)
    entries = tl.load(lookup + (bits.to(tl.uint32, bitcast=True) >> SHIFT))
    places = (bits ^ (bits >> 31)) & REST
    return ((entries + places) >> SHIFT).to(tl.uint8)


@triton.jit
def _joined(rounded, further_bits):
    """The float32 values of the bits of bfloat16 values and further bits: ``adam8bit.joined``."""
    high = rounded.to(tl.int32) << 16
    bits = further_bits.to(tl.int32)
    bits = tl.where((high << 1) == 0, tl.maximum(bits, 0), bits)
    return (high + bits).to(tl.float32, bitcast=True)


@triton.jit
def _divided(values):
    """The bits of bfloat16 values and further bits of float32 *values*: ``adam8bit.divided``."""
    bits = values.to(tl.int32, bitcast=True)
    high = tl.where(values != values, _NAN, (bits + 0x8000) >> 16)
    return high.to(tl.int16), (bits - (high << 16)).to(tl.int16)


# The number of rows differs between tensors, and would be compiled for multiples of 16 separately.
@triton.jit(do_not_specialize=["num_rows"])
def _update(
    weights, gradients, average_codes, square_codes, average_scales, square_scales, further_bits,
    signed, unsigned, of_signed, of_unsigned,
    num_rows, average_part, square_part, decay, size, correction, eps,
    HAS_BITS: tl.constexpr, KEEPS_AVERAGE: tl.constexpr, KEEPS_SQUARE: tl.constexpr, EVICTION: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Update some rows. *of_signed* and *of_unsigned* are the lookup tables of both tables of codes.

    With HAS_BITS, *weights* are the bits of bfloat16 weights. KEEPS_AVERAGE and KEEPS_SQUARE: more than half of the
    moment is kept (betas above 1/2).
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, element = _elements(LANES, ROWS, PARTS)
    is_row = row < num_rows - first
    # As large as the elements, so that it needs no broadcast when it is used.
    is_element = is_row & (element >= 0)
    # Embeddings of large models have more elements than a number of 32 bits can count, but a program has few.
    start = first * (LANES * PARTS * _WIDTH)
    average_codes += start
    square_codes += start
    average_code = tl.load(average_codes + element, is_element, other=0, eviction_policy=EVICTION)
    square_code = tl.load(square_codes + element, is_element, other=0, eviction_policy=EVICTION)
    gradient = tl.load(gradients + start + element, is_element, other=0, eviction_policy=EVICTION)
    weight = tl.load(weights + start + element, is_element, other=0, eviction_policy=EVICTION)
    if HAS_BITS:
        bits = tl.load(
            further_bits + start + element, is_element, other=0, eviction_policy=EVICTION
        )
        weight = _joined(weight, bits)
    average_scale = tl.load(average_scales + first + row, is_row, other=0)
    square_scale = tl.load(square_scales + first + row, is_row, other=0)

    average = tl.load(signed + average_code.to(tl.int32)) * average_scale
    square = tl.load(unsigned + square_code.to(tl.int32)) * square_scale
    gradient = gradient.to(tl.float32)
    average = _between(average, gradient, average_part, KEEPS_AVERAGE)
    square = _between(square, gradient * gradient, square_part, KEEPS_SQUARE)
    denominator = tl.sqrt(square) * tl.div_rn(1.0, correction) + eps
    changed = weight.to(tl.float32) * decay - average / denominator * size
    if HAS_BITS:
        changed, bits = _divided(changed)
        tl.store(further_bits + start + element, bits, is_element, eviction_policy=EVICTION)
    changed = changed.to(weights.dtype.element_ty)
    tl.store(weights + start + element, changed, is_element, eviction_policy=EVICTION)

    average_scale = _largest(average)
    square_scale = _largest(square)
    tl.store(average_scales + first + row, average_scale, is_row)
    tl.store(square_scales + first + row, square_scale, is_row)
    average_code = _codes(average, average_scale, of_signed, _SIGNED_SHIFT, _SIGNED_REST)
    square_code = _codes(square, square_scale, of_unsigned, _UNSIGNED_SHIFT, _UNSIGNED_REST)
    tl.store(average_codes + element, average_code, is_element, eviction_policy=EVICTION)
    tl.store(square_codes + element, square_code, is_element, eviction_policy=EVICTION)


def fits(weights: Tensor, gradients: Tensor) -> bool:
    """Whether :func:`update` accepts rows [n, block] of these types and this length."""
    tensors = (weights, gradients)
    # Other subclasses may have no memory.
    is_known = all(type(each) is Tensor and each.dtype in _TYPES for each in tensors)
    return is_known and weights.shape[1] <= _LONGEST_ROW


def update(
    rows: Sequence[Tensor],
    settings: Sequence[float],
    further_bits: Tensor | None = None,
) -> None:
    """Do what ``adam8bit.update_blocks`` does with contiguous *rows*, in one kernel; see :func:`fits`.

    *rows* are a parameter and its gradient [n, block], the codes [n, block] and the scales [n, 1] of both moments;
    *settings* are the settings of ``update_blocks``, as numbers. Changes of weights differ from its changes in the last
    bits.
    """
    parameter, gradient, *moments = rows
    num_rows, block = parameter.shape
    lanes = min(block // _WIDTH.value, 32)
    parts = block // (lanes * _WIDTH.value)
    num_rows_each = max(_BLOCK // block, 1)
    num_warps = min(max(block * _WARPS // _BLOCK, _WARPS), _MOST_WARPS)
    weights = parameter if further_bits is None else parameter.view(torch.int16)
    # On the device of the tensors, which need not be the current one.
    with torch.cuda.device_of(parameter):
        _update[(triton.cdiv(num_rows, num_rows_each),)](
            weights, gradient, *moments,
            gradient if further_bits is None else further_bits,
            *_tables(parameter.device), num_rows, *map(float, settings),
            HAS_BITS=further_bits is not None, EVICTION=_EVICTION,
            KEEPS_AVERAGE=settings[0] < 0.5, KEEPS_SQUARE=settings[1] < 0.5,
            LANES=lanes, ROWS=num_rows_each, PARTS=parts, num_warps=num_warps,
        )  # fmt: skip
    changed = [parameter, *moments]
    if further_bits is not None:
        changed.append(further_bits)
    # As torch's operations do: autograd must not take the old values for the new ones.
    torch.autograd.graph.increment_version(changed)


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, ...]:
    """The signed and the unsigned table, and the lookup tables of both."""
    signed, unsigned = dynamic_table(True), dynamic_table(False)
    lookups = [
        lookup_of(signed, 32 - _SIGNED_SHIFT.value),
        lookup_of(unsigned, 32 - _UNSIGNED_SHIFT.value),
    ]
    return tuple(each.to(device) for each in (signed, unsigned, *lookups))


def try_once(device: torch.device) -> None:
    """Run the kernel on a few elements of *device*. Raises what Triton raises where it cannot compile."""
    weights, gradients = (torch.zeros(1, 32, device=device) for _ in range(2))
    codes = [torch.zeros(1, 32, dtype=torch.uint8, device=device) for _ in range(2)]
    scales = [torch.zeros(1, 1, device=device) for _ in range(2)]
    update([weights, gradients, *codes, *scales], [0, 0, 1, 0, 1, 1])
