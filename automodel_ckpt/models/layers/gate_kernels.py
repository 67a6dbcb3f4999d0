"""Triton kernels for ``silu(gate) * up`` and its gradients, which read and write each element once.

Import this module only where Triton is installed. The kernels also run on a CPU, in Triton's interpreter
(TRITON_INTERPRET=1).
"""

# Triton evaluates annotations when it compiles a kernel, and accepts no types of Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Elements that a program computes: 8 in each thread of 16 warps."""
_WARPS = 16


@triton.jit
def _product(gate, up, product, num_elements, BLOCK: tl.constexpr):
    """Store silu(gate) * up for a block of elements."""
    # Long rows of wide layers have more elements than a number of 32 bits can count.
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_element = elements < num_elements
    gates = tl.load(gate + elements, mask=is_element, other=0.0).to(tl.float32)
    ups = tl.load(up + elements, mask=is_element, other=0.0).to(tl.float32)
    result = gates * tl.sigmoid(gates) * ups
    tl.store(product + elements, result.to(product.dtype.element_ty), mask=is_element)


@triton.jit
def _gradients(gradient, gate, up, of_gate, of_up, num_elements, BLOCK: tl.constexpr):
    """Store the gradients of gate and up for a block of elements."""
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_element = elements < num_elements
    slopes = tl.load(gradient + elements, mask=is_element, other=0.0).to(tl.float32)
    gates = tl.load(gate + elements, mask=is_element, other=0.0).to(tl.float32)
    ups = tl.load(up + elements, mask=is_element, other=0.0).to(tl.float32)
    open_part = tl.sigmoid(gates)
    activated = gates * open_part
    from_gate = slopes * ups * (open_part + activated * (1.0 - open_part))
    tl.store(of_gate + elements, from_gate.to(of_gate.dtype.element_ty), mask=is_element)
    from_up = slopes * activated
    tl.store(of_up + elements, from_up.to(of_up.dtype.element_ty), mask=is_element)


def product(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` for contiguous tensors of one shape, computed in float32."""
    result = torch.empty_like(gate)
    num_elements = gate.numel()
    grid = (triton.cdiv(num_elements, _BLOCK),)
    _product[grid](gate, up, result, num_elements, BLOCK=_BLOCK, num_warps=_WARPS)
    return result


def gradients(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of *gate* and *up* for the *gradient* of their product; all are contiguous."""
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    num_elements = gate.numel()
    grid = (triton.cdiv(num_elements, _BLOCK),)
    _gradients[grid](
        gradient, gate, up, of_gate, of_up, num_elements, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return of_gate, of_up
