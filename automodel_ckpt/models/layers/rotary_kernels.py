"""A Triton kernel that rotates queries or keys by their positions, and reads and writes each element once.

Import this module only where Triton is installed. The kernel also runs on a CPU, in Triton's interpreter
(TRITON_INTERPRET=1).
"""

# Triton evaluates annotations when it compiles a kernel, and accepts no types of Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""About the number of pairs that a program rotates: heads of one token."""
_WARPS = 4


# Otherwise, Triton compiles the kernel again for the first row with a length that 16 divides.
@triton.jit(do_not_specialize=["length"])
def _rotate(
    heads, cosines, sines, rotated,
    num_heads, length, half, head_dim,
    heads_row, heads_head, heads_token,
    cosines_row, cosines_token, sines_row, sines_token,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Store the rotated elements of some heads of one token, and copy the elements behind the rotated ones.

    The element i of a head forms a pair with i + half. *rotated* is contiguous [rows, length, heads, head_dim].
    """
    # Long rows of wide layers have more elements than a number of 32 bits can count.
    token = tl.program_id(0).to(tl.int64)
    row, place = token // length, token % length
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads
    first = tl.arange(0, HALF)
    is_half = first < half
    angle = cosines + row * cosines_row + place * cosines_token
    first_cosine = tl.load(angle + first, mask=is_half, other=0.0).to(tl.float32)[None, :]
    second_cosine = tl.load(angle + half + first, mask=is_half, other=0.0).to(tl.float32)[None, :]
    angle = sines + row * sines_row + place * sines_token
    first_sine = tl.load(angle + first, mask=is_half, other=0.0).to(tl.float32)[None, :]
    second_sine = tl.load(angle + half + first, mask=is_half, other=0.0).to(tl.float32)[None, :]
    source = heads + row * heads_row + place * heads_token + head.to(tl.int64)[:, None] * heads_head
    target = rotated + (token * num_heads + head)[:, None] * head_dim
    is_pair = is_head[:, None] & is_half[None, :]
    one = tl.load(source + first[None, :], mask=is_pair, other=0.0).to(tl.float32)
    other = tl.load(source + half + first[None, :], mask=is_pair, other=0.0).to(tl.float32)
    if INVERSE:
        new_one = one * first_cosine + other * second_sine
        new_other = other * second_cosine - one * first_sine
    else:
        new_one = one * first_cosine - other * first_sine
        new_other = other * second_cosine + one * second_sine
    number = rotated.dtype.element_ty
    tl.store(target + first[None, :], new_one.to(number), mask=is_pair)
    tl.store(target + half + first[None, :], new_other.to(number), mask=is_pair)
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST)
        is_rest = is_head[:, None] & (rest < head_dim)[None, :]
        kept = tl.load(source + rest[None, :], mask=is_rest, other=0.0)
        tl.store(target + rest[None, :], kept, mask=is_rest)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor, *, inverse: bool = False) -> Tensor:
    """Return *heads* [B, H, T, D] with their first R elements rotated, computed in float32; D - R elements are copied.

    *cosines* and *sines* are [B, T, R] or [1, T, R]. The result is a view of a contiguous tensor [B, T, H, D], as
    layers of attention have them. *inverse* applies the transposed rotation, which a backward pass needs.
    """
    rows, num_heads, length, head_dim = heads.shape
    size = cosines.shape[-1]
    heads, cosines, sines = (
        each if each.stride(-1) == 1 else each.contiguous() for each in (heads, cosines, sines)
    )
    rotated = heads.new_empty(rows, length, num_heads, head_dim)
    half_block = triton.next_power_of_2(size // 2)
    heads_block = min(triton.next_power_of_2(num_heads), max(_BLOCK // half_block, 1))
    rest = head_dim - size
    grid = (rows * length, triton.cdiv(num_heads, heads_block))
    _rotate[grid](
        heads, cosines, sines, rotated,
        num_heads, length, size // 2, head_dim,
        heads.stride(0), heads.stride(1), heads.stride(2),
        _row_stride(cosines), cosines.stride(1), _row_stride(sines), sines.stride(1),
        INVERSE=inverse, HEADS=heads_block, HALF=half_block,
        REST=triton.next_power_of_2(rest) if rest else 0, num_warps=_WARPS,
    )  # fmt: skip
    return rotated.transpose(1, 2)


def _row_stride(angles: Tensor) -> int:
    """The distance between rows of *angles* [B, T, R]; 0 if all rows share one."""
    return angles.stride(0) if len(angles) > 1 else 0
