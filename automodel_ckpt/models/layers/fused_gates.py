"""Gated layers, ``down(silu(gate(x)) * up(x))``, that keep two tensors for the backward pass instead of three.

transformers' modules keep ``gate(x)``, ``silu(gate(x))`` and ``up(x)``, which are the widest tensors of a layer. Here,
the activation is computed again in the backward pass. On a GPU, a Triton kernel computes activation and product, and
another one both gradients; elsewhere torch's operators do.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from automodel_ckpt.models.layers.fused_class import agrees, fused_class
from automodel_ckpt.models.loss.head_gradients import kernel_for

_PARTS = ("gate_proj", "up_proj", "down_proj")
_ACTIVATION = "act_fn"
_TOLERANCE = 1e-6
_SCALES = (3.0, 300.0)
"""Of the numbers with which a module is tried; some activations limit large ones."""


def fuse_gates(model: nn.Module) -> int:
    """Let the gated layers of *model* compute with fewer kernels and less memory; returns their number.

    The modules stay in place, with their names and parameters. A module is recognized by the names of its parts, and by
    what it computes from random numbers with stand-ins for them. It computes as before if both factors do not have the
    same dtype, or are DTensors.
    """
    num_fused = 0
    for module in model.modules():
        if _is_gated(module):
            module.__class__ = _fused_class(type(module))  # type: ignore[arg-type]
            num_fused += 1
    return num_fused


def _is_gated(module: Any) -> bool:
    """Whether *module* computes down(silu(gate(x)) * up(x)), and nothing else."""
    has_parts = all(isinstance(getattr(module, name, None), nn.Module) for name in _PARTS)
    if not has_parts or not hasattr(module, _ACTIVATION) or "forward" in vars(module):
        return False
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 8, 16, generator=generator, dtype=torch.float32, device="cpu")
    inputs = torch.cat([inputs * scale for scale in _SCALES])
    stand_ins: Any = SimpleNamespace(
        gate_proj=lambda x: x + 0.5,
        up_proj=lambda x: 2 * x,
        down_proj=lambda x: 3 * x,
        act_fn=getattr(module, _ACTIVATION),
    )
    try:
        found = type(module).forward(stand_ins, inputs)
    except Exception:
        # It needs more than its three parts, such as a setting or a dropout.
        return False
    expected = 3 * F.silu(inputs + 0.5) * (2 * inputs)
    return agrees(found, expected, rtol=_TOLERANCE)


@functools.cache
def _fused_class(module_class: type[nn.Module]) -> type[nn.Module]:
    def compute(module: Any, inputs: Tensor) -> Tensor | None:
        if torch.compiler.is_compiling():
            # It makes such kernels itself. torch 2.11 also compiles _GatedProduct with wrong gradients.
            return None
        gate, up = module.gate_proj(inputs), module.up_proj(inputs)
        if isinstance(gate, DTensor) or isinstance(up, DTensor) or gate.dtype != up.dtype:
            product = module.act_fn(gate) * up
        else:
            product = _GatedProduct.apply(gate, up)  # type: ignore[no-untyped-call]
        return module.down_proj(product)  # type: ignore[no-any-return]

    return fused_class(module_class, compute)


def _uses_triton(*tensors: Tensor) -> bool:
    # A subclass, such as the result of a collective that still runs, has no memory that a kernel could read.
    if any(type(tensor) is not Tensor for tensor in tensors):
        return False
    tensor = tensors[0]
    is_narrow = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_narrow and tensor.is_cuda and kernel_for("cuda", torch.float32) == "triton"


class _GatedProduct(torch.autograd.Function):
    """``silu(gate) * up`` of two tensors of one shape."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if _uses_triton(gate, up):
            from automodel_ckpt.models.layers import gate_kernels

            return gate_kernels.product(gate.contiguous(), up.contiguous())
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if _uses_triton(gradient, gate, up):
            from automodel_ckpt.models.layers import gate_kernels

            return gate_kernels.gradients(gradient.contiguous(), gate.contiguous(), up.contiguous())
        of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return of_gate, F.silu(gate).mul_(gradient)
