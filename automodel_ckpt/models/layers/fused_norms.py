"""RMS normalization in one kernel on a GPU, in place of the eight operators of transformers' modules.

A module of transformers reads and writes hidden states in float32 eight times in the forward pass, and more often in
the backward pass, and keeps a float32 copy of its input. The function here reads and writes them once, computes in
float32, and keeps the input as it is. torch has the kernel for CUDA only; elsewhere, the function computes the same by
torch's operators.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.models.layers.fused_class import agrees, fused_class

_EPSILONS = ("variance_epsilon", "eps")
"""Names of the attribute for the smallest mean square, in transformers' modules and in torch's."""
_ROWS = 8
_TOLERANCE = 1e-5
"""Of float32 outputs with a root mean square near 1."""
_LARGE = 1e3
"""A scale of inputs at which a module may limit them."""


def fuse_norms(model: nn.Module) -> int:
    """Let the RMS normalizations of *model* compute in one kernel; returns their number.

    The modules stay in place, with their names and parameters. A module is recognized by what it computes from random
    numbers in float32, not by its name: ``x / sqrt(mean(x^2) + eps) * weight``, over the last dimension. It computes as
    before if its input has another dtype than its weight, or is a DTensor.

    Where a module rounds the normalized values to bfloat16 before it multiplies them by the weight, the kernel rounds
    the product only.
    """
    known: dict[tuple[type, int, float], bool] = {}
    num_fused = 0
    for module in model.modules():
        epsilon = _epsilon_of(module)
        if epsilon is None:
            continue
        key = (type(module), module.weight.numel(), epsilon)  # type: ignore[operator]
        if key not in known:
            known[key] = _is_rms_norm(module, epsilon)
        if known[key]:
            module.__class__ = _fused_class(type(module))  # type: ignore[arg-type]
            num_fused += 1
    return num_fused


def _epsilon_of(module: nn.Module) -> float | None:
    """The epsilon of a module that may be a normalization; None for any other module."""
    # First without the children: most modules have many parameters.
    own = dict(module.named_parameters(recurse=False))
    if set(own) != {"weight"} or own["weight"].dim() != 1:
        return None
    if len(list(module.parameters())) != 1:
        return None
    if "forward" in vars(module) or any(True for _ in module.buffers()):
        return None
    return _stated_epsilon(module)


def _stated_epsilon(module: Any) -> float | None:
    for name in _EPSILONS:
        epsilon = getattr(module, name, None)
        if isinstance(epsilon, float):
            return epsilon
    return None


def _is_rms_norm(module: nn.Module, epsilon: float) -> bool:
    """Whether *module* computes an RMS normalization, also for inputs of which epsilon is a large or a small part."""
    generator = torch.Generator().manual_seed(0)
    size = module.weight.numel()  # type: ignore[operator]
    numbers: ValueDict = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    # The model may be on the meta device.
    tried: Any = copy.deepcopy(module).to_empty(device="cpu").float()
    with torch.no_grad():
        tried.weight.copy_(torch.rand(size, **numbers) + 0.5)
        for scale in (1.0, epsilon**0.5, _LARGE):
            inputs = torch.randn(2, _ROWS, size, **numbers) * scale
            expected, _ = _normalize(inputs, tried.weight, epsilon)
            try:
                found = tried(inputs)
            except Exception:
                return False
            if not agrees(found, expected, rtol=0, atol=_TOLERANCE):
                return False
    return True


@functools.cache
def _fused_class(module_class: type[nn.Module]) -> type[nn.Module]:
    def compute(module: Any, inputs: Tensor) -> Tensor | None:
        weight = module.weight
        # torch.compile makes such kernels itself. torch 2.11 also compiles _RmsNorm with wrong gradients.
        if torch.compiler.is_compiling() or inputs.dtype != weight.dtype:
            return None
        if isinstance(inputs, DTensor) or isinstance(weight, DTensor):
            return None
        return _RmsNorm.apply(inputs, weight, _stated_epsilon(module))  # type: ignore[no-any-return, no-untyped-call]

    return fused_class(module_class, compute)


def _normalize(inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the normalized *inputs* times *weight*, and the inverse of their root mean squares in float32."""
    if inputs.is_cuda:
        normalized, inverse = torch.ops.aten._fused_rms_norm(inputs, weight.shape, weight, epsilon)
        return normalized, inverse
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse * weight).to(inputs.dtype), inverse


class _RmsNorm(torch.autograd.Function):
    """RMS normalization of the last dimension, times a weight; keeps the input and a number per row."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        normalized, inverse = _normalize(inputs, weight, epsilon)
        ctx.save_for_backward(inputs, weight, inverse)
        return normalized

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, inverse = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:2])
        if inputs.is_cuda:
            found = torch.ops.aten._fused_rms_norm_backward(
                gradient.contiguous(), inputs.contiguous(), weight.shape, inverse, weight, wanted
            )
            of_inputs, of_weight = found
            return of_inputs if wanted[0] else None, of_weight if wanted[1] else None, None
        wide = inverse.dtype
        scaled = inputs.to(wide) * inverse
        of_inputs = of_weight = None
        if wanted[0]:
            slope = gradient.to(wide) * weight
            projection = (slope * scaled).mean(-1, keepdim=True)
            of_inputs = (inverse * (slope - scaled * projection)).to(inputs.dtype)
        if wanted[1]:
            products = gradient.to(wide) * scaled
            of_weight = products.flatten(0, -2).sum(0).to(weight.dtype)
        return of_inputs, of_weight, None
