"""A Triton kernel for AdamW on large float32 tensors, which reads and writes each element once.

Import this module only where Triton is installed. The kernel also runs on a CPU, in Triton's interpreter
(TRITON_INTERPRET=1).
"""

# Triton evaluates annotations when it compiles a kernel, and accepts no types of Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Elements that a program updates: 8 in each thread of 4 warps."""
_WARPS = 4
_EVICTION = "evict_first"
"""The policy of the cache for all elements: none is read again before the next step."""


# The index differs between tensors, and would be compiled for multiples of 16 separately.
@triton.jit(do_not_specialize=["index"])
def _update(
    parameters, gradients, averages, squares, corrections, divisor, skips,
    index, num_tensors, num_elements, lr, beta1, beta2, eps, weight_decay,
    HAS_DIVISOR: tl.constexpr, HAS_FLAG: tl.constexpr, DECAYS: tl.constexpr,
    EVICTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a block of elements, with the operations of torch's CUDA kernel in its order.

    *corrections* is contiguous [2, num_tensors]: the bias correction of the averages, and the root of the squares'.
    """
    # Embeddings of large models have more elements than a number of 32 bits can count.
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_element = elements < num_elements
    # Loaded before the scalars, so that the program waits once.
    gradient = tl.load(gradients + elements, mask=is_element, eviction_policy=EVICTION)
    parameter = tl.load(parameters + elements, mask=is_element, eviction_policy=EVICTION)
    average = tl.load(averages + elements, mask=is_element, eviction_policy=EVICTION)
    square = tl.load(squares + elements, mask=is_element, eviction_policy=EVICTION)
    correction = tl.load(corrections + index)
    root = tl.load(corrections + num_tensors + index)
    is_stored = is_element
    if HAS_FLAG:
        is_stored = elements < tl.where(tl.load(skips) == 1.0, 0, num_elements)
    if HAS_DIVISOR:
        gradient = tl.div_rn(gradient, tl.load(divisor))
    if DECAYS:
        parameter = tl.fma(parameter, -(lr * weight_decay), parameter)
    average = tl.fma(average, beta1, tl.fma(gradient, -beta1, gradient))
    product = gradient * gradient
    square = tl.fma(square, beta2, tl.fma(product, -beta2, product))
    denominator = tl.div_rn(tl.sqrt_rn(square), root) + eps
    change = tl.div_rn(average * tl.div_rn(lr, correction), denominator)
    tl.store(parameters + elements, parameter - change, mask=is_stored, eviction_policy=EVICTION)
    tl.store(averages + elements, average, mask=is_stored, eviction_policy=EVICTION)
    tl.store(squares + elements, square, mask=is_stored, eviction_policy=EVICTION)


def update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Do what ``torch._fused_adamw_`` does with contiguous float32 tensors, one kernel for each; see :func:`fits`.

    *steps* are 0-dim float32 tensors on the device, as are *grad_scale* and *found_inf*. The host does not wait for
    their values. Unlike torch's kernel, this one does not store the divided gradients.
    """
    # On the device of the tensors, which need not be the current one.
    with torch.cuda.device_of(parameters[0]):
        counts = torch.stack(steps)
        # torch.pow is what torch's kernel calls, with the same float32 results.
        of_averages = 1 - torch.pow(beta1, counts)
        of_squares = 1 - torch.pow(beta2, counts)
        corrections = torch.stack([of_averages, of_squares.sqrt_()])
        rows = zip(parameters, gradients, averages, squares, strict=True)
        for index, row in enumerate(rows):
            num_elements = row[0].numel()
            _update[(triton.cdiv(num_elements, _BLOCK),)](
                *row, corrections,
                corrections if grad_scale is None else grad_scale,
                corrections if found_inf is None else found_inf,
                index, len(parameters), num_elements,
                float(lr), float(beta1), float(beta2), float(eps), float(weight_decay),
                HAS_DIVISOR=grad_scale is not None, HAS_FLAG=found_inf is not None,
                DECAYS=weight_decay != 0, EVICTION=_EVICTION, BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
    # As torch's operations do: autograd must not take the old values for the new ones.
    torch.autograd.graph.increment_version([*parameters, *averages, *squares])


def try_once(device: torch.device) -> None:
    """Run the kernel on a few elements of *device*. Raises what Triton raises where it cannot compile."""
    one, other, third, fourth = ([torch.zeros(16, device=device)] for _ in range(4))
    steps = [torch.ones((), device=device)]
    update(one, other, third, fourth, steps, lr=0, beta1=0, beta2=0, weight_decay=0, eps=1)
