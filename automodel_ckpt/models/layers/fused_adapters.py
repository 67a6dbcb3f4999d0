"""Linear layers with a LoRA adapter that add the base's product where the adapter's product is, on a GPU.

peft computes ``base(x) + B(A(x)) * scaling``. Scaling and addition read and write tensors of the size of the output,
which is much larger than A(x): for the layers of an 8B model, a quarter of the memory traffic without matrix products.
Here, the base's matrix product adds its result to B(A(x)) * scaling in place, and the backward pass adds the gradients
of the input in the same way. In the other order, reading and writing the output would take as long, but the adapter's
small product could not hide it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from automodel_ckpt.models.layers.fused_class import fused_class

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def fuse_adapters(model: nn.Module) -> int:
    """Let the linear layers of *model* with an adapter add its product in place; returns their number.

    The modules stay in place, with their names and parameters. A layer computes as peft does where something else is
    asked of it: dropout, DoRA, a trained or quantized base, several data types, DTensors, hooks.
    """
    # peft is imported only where a recipe has adapters.
    from peft.tuners.lora.layer import Linear

    layers = [module for module in model.modules() if type(module) is Linear]
    for layer in layers:
        layer.__class__ = _fused_class(Linear)  # type: ignore[assignment]
    return len(layers)


@functools.cache
def _fused_class(adapted: type[nn.Module]) -> type[nn.Module]:
    def compute(layer: Any, inputs: Tensor) -> Tensor | None:
        # torch 2.11 compiles some functions of autograd with wrong gradients.
        if torch.compiler.is_compiling() or layer.disable_adapters or layer.merged:
            return None
        active = layer.active_adapters
        if len(active) != 1 or not _fits(layer, active[0], inputs):
            return None
        name = active[0]
        base = layer.base_layer
        down, up = layer.lora_A[name], layer.lora_B[name]
        factors = (base.weight, base.bias, down.weight, up.weight, layer.scaling[name])
        return _Product.apply(inputs, *factors)  # type: ignore[no-any-return, no-untyped-call]

    return fused_class(adapted, compute)


def _fits(layer: Any, name: str, inputs: Tensor) -> bool:
    """Whether the products of *layer* can be computed together: its adapter *name* is a plain product, and the linear
    layers are plain ones in the dtype of *inputs*."""
    if name not in layer.lora_A or name in layer.lora_variant:
        return False
    if layer.training and getattr(layer.lora_dropout[name], "p", 0.0) > 0:
        return False
    if isinstance(inputs, DTensor) or torch.is_autocast_enabled(inputs.device.type):
        return False
    base = layer.base_layer
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return False
    if layer.lora_B[name].bias is not None:
        return False
    for linear in (base, layer.lora_A[name], layer.lora_B[name]):
        if type(linear) is not nn.Linear or "forward" in vars(linear):
            return False
        if any(getattr(linear, hooks) for hooks in _HOOKS):
            return False
        if isinstance(linear.weight, DTensor) or linear.weight.dtype != inputs.dtype:
            return False
    return True


class _Product(torch.autograd.Function):
    """``x W' + b + scaling (x A') B'`` with a frozen W [out, in] and b [out], and A [r, in] and B [out, r]."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scaling: float,
    ) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        narrow = rows @ down.t()
        if bias is None:
            product = (narrow @ up.t()).addmm_(rows, weight.t(), beta=scaling)
        else:
            product = torch.addmm(bias, narrow, up.t(), alpha=scaling).addmm_(rows, weight.t())
        ctx.save_for_backward(rows, weight, down, up, narrow)
        ctx.scaling = scaling
        ctx.shape = inputs.shape
        # The number of columns is given: without rows, it cannot be inferred.
        return product.view(*inputs.shape[:-1], product.shape[-1])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, narrow = ctx.saved_tensors
        gradient = gradient.reshape(-1, gradient.shape[-1])
        # [rows, r], and so smaller than the others.
        of_narrow = (gradient @ up).mul_(ctx.scaling)
        of_inputs = of_down = of_up = None
        if ctx.needs_input_grad[0]:
            of_inputs = (of_narrow @ down).addmm_(gradient, weight).view(ctx.shape)
        if ctx.needs_input_grad[3]:
            of_down = of_narrow.t() @ rows
        if ctx.needs_input_grad[4]:
            of_up = (gradient.t() @ narrow).mul_(ctx.scaling)
        return of_inputs, None, None, of_down, of_up, None
