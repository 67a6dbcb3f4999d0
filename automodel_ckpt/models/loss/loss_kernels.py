"""Triton kernels for the cross-entropy of a chunk of logits and its gradient, in float32.

A program computes one row of logits. The gradient overwrites the logits in memory, in the dtype in which it is
multiplied next: bfloat16 gradients fill the first half of each row. Or it is stored elsewhere, in blocks of columns.
Import this module only where Triton is installed. The kernels also run on a CPU, in Triton's interpreter
(TRITON_INTERPRET=1).
"""

# Triton evaluates annotations when it compiles a kernel, and accepts no types of Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from automodel_ckpt.base.labels import IGNORE_INDEX

_IGNORED = tl.constexpr(IGNORE_INDEX)
_BLOCK = 8192
"""Columns that a program loads at a time. A row of 128k float32 logits is 512 kB, much more than a program can keep."""
_WARPS = 16
_SCALE_BLOCK = 2048
"""Elements that a program of :func:`scale` reads: 16 in each thread of 4 warps."""
_SCALE_WARPS = 4


@triton.jit
def _capped(logits, scale, cap, HAS_CAP: tl.constexpr):
    """Return cap * tanh(scale * logits / cap), and the tangent itself; without a cap, scale * logits and 0."""
    scaled = logits * scale
    tangent = tl.zeros_like(scaled)
    if HAS_CAP:
        argument = scaled / cap
        size = tl.abs(argument)
        power = tl.exp(-2.0 * size)
        large = (1.0 - power) / (1.0 + power)
        # 1 - exp(-x) loses most digits for a small x.
        square = size * size
        small = size * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315))))
        tangent = tl.where(size < 0.125, small, large)
        tangent = tl.where(argument < 0, -tangent, tangent)
        scaled = cap * tangent
    return scaled, tangent


@triton.jit
def _largest_and_sum(row, num_columns, scale, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit of a row, and the sum of exp(logit - largest)."""
    largest = float("-inf")
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_column = columns < num_columns
        logits, _ = _capped(
            tl.load(row + columns, mask=is_column, other=0.0).to(tl.float32), scale, cap, HAS_CAP
        )
        logits = tl.where(is_column, logits, float("-inf"))
        largest_so_far = tl.maximum(largest, tl.max(logits, 0))
        total = total * tl.exp(largest - largest_so_far)
        total += tl.sum(tl.exp(logits - largest_so_far), 0)
        largest = largest_so_far
    return largest, total


@triton.jit
def _label_logit(row, label, num_columns, scale, cap, HAS_CAP: tl.constexpr):
    """Return the logit of column *label*; 0 if the row has no such column."""
    is_here = (label >= 0) & (label < num_columns)
    logit, _ = _capped(
        tl.load(row + label, mask=is_here, other=0.0).to(tl.float32), scale, cap, HAS_CAP
    )
    return tl.where(is_here, logit, 0.0)


@triton.jit
def _place_in_blocks(start, row_number, num_rows, num_columns, WIDTH: tl.constexpr):
    """Return where column *start* of a row is in blocks [num_rows, WIDTH], of which the last one can be narrower."""
    first = start // WIDTH * WIDTH
    width = tl.minimum(num_columns - first, WIDTH)
    # Blocks can have more than 2^31 bytes.
    return tl.cast(first, tl.int64) * num_rows + row_number * width + (start - first)


@triton.jit
def _write_errors(
    row,
    errors,
    label,
    largest,
    inverse_total,
    num_columns,
    scale,
    cap,
    row_number,
    num_rows,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Write the gradient of a row's logits: softmax minus one-hot, times the slope of scale and cap.

    *inverse_total* is 1 / sum of exp(logit - largest); 0 with a *label* that is no column gives a gradient of 0.
    *errors* is where the row begins. With a WIDTH, it is where blocks of so many columns begin: BLOCK divides WIDTH, or
    there is only one. These have *num_rows* rows, and this is row *row_number*. IS_ALIGNED: 8 divides the number of
    columns.
    """
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_column = columns < num_columns
        loaded = tl.load(row + columns, mask=is_column, other=0.0).to(tl.float32)
        logits, tangent = _capped(loaded, scale, cap, HAS_CAP)
        gradient = tl.exp(logits - largest) * inverse_total
        gradient -= tl.where(columns == label, 1.0, 0.0)
        gradient *= scale * (1.0 - tangent * tangent)
        # Gradients that are narrower than logits overwrite columns that other threads of this
        # program read in this iteration or in an earlier one. All must have been loaded.
        tl.debug_barrier()
        place = errors + start
        if WIDTH > 0:
            offset = _place_in_blocks(start, row_number, num_rows, num_columns, WIDTH)
            if IS_ALIGNED:
                offset = tl.multiple_of(offset, 8)
            place = errors + offset
        tl.store(place + tl.arange(0, BLOCK), gradient.to(errors.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _losses_and_errors(
    logits,
    errors,
    labels,
    losses,
    penalties,
    num_columns,
    logits_stride,
    errors_stride,
    scale,
    cap,
    z_coefficient,
    first_row,
    num_rows,
    HAS_CAP: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    WITH_ERRORS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Compute the loss of one row, and overwrite its logits with their gradient, or store that in blocks (WIDTH > 0).

    The z-loss is added to the loss, and stored in *penalties* as well.
    """
    # A chunk can have more than 2^31 bytes.
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * logits_stride
    label = tl.load(labels + number)
    largest, total = _largest_and_sum(row, num_columns, scale, cap, HAS_CAP, BLOCK)
    of_label = _label_logit(row, label, num_columns, scale, cap, HAS_CAP)
    is_ignored = label == _IGNORED
    loss = tl.log(total) + (largest - of_label)
    factor = 1.0
    if HAS_Z_LOSS:
        log_of_sum = tl.log(total) + largest
        penalty = z_coefficient * log_of_sum * log_of_sum
        tl.store(penalties + number, tl.where(is_ignored, 0.0, penalty))
        loss += penalty
        factor += 2.0 * z_coefficient * log_of_sum
    tl.store(losses + number, tl.where(is_ignored, 0.0, loss))
    if WITH_ERRORS:
        inverse_total = tl.where(is_ignored, 0.0, factor / total)
        place = errors
        if WIDTH == 0:
            place += number * errors_stride
        _write_errors(
            row,
            place,
            label,
            largest,
            inverse_total,
            num_columns,
            scale,
            cap,
            first_row + number,
            num_rows,
            HAS_CAP,
            BLOCK,
            WIDTH,
            IS_ALIGNED,
        )


def narrowed_view(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of *dtype* and of the shape [n, V] of *logits*, in the memory of *logits*, each row at the start of its.

    Matrix products accept the gap between rows without a copy.
    """
    ratio = logits.element_size() // dtype.itemsize
    return logits.view(dtype).as_strided(logits.shape, (ratio * logits.stride(0), 1))


def losses_and_errors(
    logits: Tensor,
    labels: Tensor,
    scale: float,
    cap: float | None,
    dtype: torch.dtype,
    with_errors: bool,
    z_coefficient: float = 0.0,
    place: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the losses [n] in float32 and the gradient [n, V] in *dtype* of float32 *logits* [n, V].

    The third result is the part of the losses [n] that is z-loss, with its coefficient *z_coefficient*; without one, it
    has no meaning. The gradient overwrites the logits, or is stored in *place*. Rows with label -100 have loss 0 and
    gradient 0. With *place*, or without *with_errors*, the second result has no meaning.
    """
    errors = narrowed_view(logits, dtype)
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    penalties = torch.empty_like(losses) if z_coefficient else losses
    if len(logits) == 0:
        return losses, errors, penalties
    target, first_row, num_rows, width = errors, 0, 0, 0
    if place is not None:
        target, first_row, num_rows = place.blocks.memory, place.start, place.blocks.rows
        width = place.blocks.width
    _losses_and_errors[(len(logits),)](
        logits,
        target,
        labels,
        losses,
        penalties,
        logits.shape[1],
        logits.stride(0),
        errors.stride(0),
        scale,
        1.0 if cap is None else cap,
        z_coefficient,
        first_row,
        num_rows,
        HAS_CAP=cap is not None,
        HAS_Z_LOSS=z_coefficient != 0,
        WITH_ERRORS=with_errors,
        BLOCK=_block(min(logits.shape[1], width or logits.shape[1])),
        WIDTH=width,
        IS_ALIGNED=logits.shape[1] % 8 == 0,
        num_warps=_WARPS,
    )
    return losses, errors, penalties


@triton.jit
def _scale(values, factor, scaled, num_elements, BLOCK: tl.constexpr):
    """Write values times the factor for a block of elements."""
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_element = elements < num_elements
    result = tl.load(values + elements, mask=is_element, other=0.0) * tl.load(factor)
    tl.store(scaled + elements, result.to(scaled.dtype.element_ty), mask=is_element)


def scale(values: Tensor, factor: Tensor, scaled: Tensor) -> None:
    """Write float32 *values* times *factor*, 0-dim, to *scaled*, of any dtype. All are contiguous.

    torch's product with a result of another dtype reads and writes single elements, at a third of the memory's rate.
    """
    num_elements = values.numel()
    if num_elements:
        grid = (triton.cdiv(num_elements, _SCALE_BLOCK),)
        _scale[grid](
            values, factor, scaled, num_elements, BLOCK=_SCALE_BLOCK, num_warps=_SCALE_WARPS
        )


def _block(num_columns: int) -> int:
    return int(min(_BLOCK, triton.next_power_of_2(num_columns)))
