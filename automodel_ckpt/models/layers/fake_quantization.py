"""Quantization-aware training: linear layers compute with weights (and inputs) rounded as in a quantized export.

The parameters keep their precision. In each forward pass, a layer computes with values on the grid of the scheme, and
the gradient passes the rounding unchanged (source: Jacob et al., arXiv:1712.05877, section 3). The grids are
compressed-tensors' own, so the loss in training is the loss of ``ckpt export --to compressed-tensors`` with the same
scheme.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.loss.fused_cross_entropy import in_autocast_dtype

log = logging.getLogger("automodel_ckpt")

_WHERE = "qat"
_FLOAT8 = torch.float8_e4m3fn
_SMALLEST_SCALE = torch.finfo(torch.float32).eps
_EXPERTS = 3
"""Dimensions of a parameter that has the weights of all experts of a layer."""


@dataclass(frozen=True)
class Grid:
    """The values that a tensor is rounded to."""

    bits: int
    """4 or 8; 8 with *is_float* is torch.float8_e4m3fn."""
    is_float: bool = False
    group_size: int | None = None
    """Number of neighboring elements of the last dimension that share a scale; None: all of them."""

    def rounded(self, tensor: Tensor) -> Tensor:
        """Round *tensor* [..., N] to the nearest values of the grid; the result has its dtype and shape."""
        groups = tensor
        if self.group_size is not None:
            groups = tensor.reshape(*tensor.shape[:-1], -1, self.group_size)
        low, high = self._range()
        largest = groups.abs().amax(-1, keepdim=True)
        # All in the tensor's dtype, as compressed-tensors computes.
        scale = (largest / ((high - low) / 2)).clamp(min=_SMALLEST_SCALE)
        scaled = (groups / scale).clamp(low, high)
        codes = scaled.to(_FLOAT8).to(tensor.dtype) if self.is_float else scaled.round()
        return (codes * scale).view_as(tensor)

    def _range(self) -> tuple[float, float]:
        if self.is_float:
            limits = torch.finfo(_FLOAT8)
            return limits.min, limits.max
        half = 2 ** (self.bits - 1)
        return -half, half - 1


@dataclass(frozen=True)
class Scheme:
    """How a linear layer is quantized."""

    weights: Grid
    inputs: Grid | None = None
    """Inputs share a scale per token, which is computed anew for each; None: they are not rounded."""


SCHEMES = {
    "FP8_DYNAMIC": Scheme(Grid(8, is_float=True), Grid(8, is_float=True)),
    "W8A8": Scheme(Grid(8), Grid(8)),
    "W8A16": Scheme(Grid(8, group_size=128)),
    "W4A16": Scheme(Grid(4, group_size=128)),
    "W4A8": Scheme(Grid(4, group_size=128), Grid(8)),
}
"""Presets of compressed-tensors. W and A are the bits of weights and of inputs (activations)."""


class FakeQuantization:
    """The quantized layers of a model, which compute with their own precision until a given step."""

    def __init__(
        self, model: nn.Module, name: str, group_size: int | None, start_step: int
    ) -> None:
        """Change the linear layers of the decoder of *model* in place; the output layer is not one of them.

        *name* is one of SCHEMES, *group_size* replaces the scheme's. Raises :class:`RecipeError` for a model with fused
        experts, and if no layer can be quantized.
        """
        scheme = SCHEMES[name]
        if group_size is not None:
            scheme = replace(scheme, weights=replace(scheme.weights, group_size=group_size))
        self.scheme = scheme
        self.start_step = start_step
        self.enabled = start_step == 0
        base: Any = model
        decoder = base.get_decoder()
        _check_no_experts(decoder, name)
        self.num_layers, skipped = 0, 0
        for module in decoder.modules():
            if not isinstance(module, nn.Linear):
                continue
            if module.in_features % (scheme.weights.group_size or 1):
                skipped += 1
                continue
            # An instance attribute: names, classes and state stay as they are.
            changed: Any = module
            changed.forward = partial(self._forward, module)
            self.num_layers += 1
        if not self.num_layers:
            raise RecipeError(
                "no linear layer of this model can be quantized by this scheme",
                where=f"{_WHERE}.scheme",
                value=f"{name}; the inputs of {skipped} layers are not divisible by {scheme.weights.group_size}",
                hint="set qat.group_size to a divisor of the model's widths, or use W8A8",
            )
        log.info(
            "quantization-aware training: %d linear layers compute as %s%s%s",
            self.num_layers,
            name,
            f" from step {start_step + 1} on" if start_step else "",
            f"; {skipped} with other widths do not" if skipped else "",
        )

    def start(self, step: int) -> None:
        """Set whether the layers are quantized in *step*, which counts from 1."""
        self.enabled = step > self.start_step

    def _forward(self, layer: nn.Linear, inputs: Tensor) -> Tensor:
        if not self.enabled:
            return F.linear(inputs, layer.weight, layer.bias)
        weight: Tensor = layer.weight
        bias: Tensor | None = layer.bias
        # Autocast does not cast the inputs of a function of autograd.
        inputs, weight, bias = in_autocast_dtype(inputs, weight, bias)
        return _QuantizedLinear.apply(inputs, weight, bias, self.scheme)  # type: ignore[no-any-return, no-untyped-call]


def _check_no_experts(decoder: nn.Module, name: str) -> None:
    for module_name, module in decoder.named_modules():
        if isinstance(module, nn.Conv1d):
            # Its kernel [out, in, width] has three dimensions, too. The linear attention of Qwen3-Next has one.
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == _EXPERTS:
                raise RecipeError(
                    "quantization-aware training does not support fused experts",
                    where=f"{_WHERE}.scheme",
                    value=f"{name}; {module_name}.{parameter_name}",
                    hint="remove the section qat, and quantize the export: ckpt export --to compressed-tensors",
                )


class _QuantizedLinear(torch.autograd.Function):
    """A linear layer with rounded weights and inputs. Its gradients are taken at the rounded values.

    The rounded values are computed again in the backward pass: to save them would keep a second copy of all weights,
    which fsdp2 frees after the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scheme: Scheme,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.scheme = scheme
        return F.linear(_rounded(inputs, scheme.inputs), scheme.weights.rounded(weight), bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias, _ = ctx.needs_input_grad
        of_inputs = of_weight = of_bias = None
        if needs_inputs:
            of_inputs = gradient @ ctx.scheme.weights.rounded(weight)
        rows = gradient.flatten(0, -2)
        if needs_weight:
            of_weight = rows.mT @ _rounded(inputs, ctx.scheme.inputs).flatten(0, -2)
        if needs_bias:
            of_bias = rows.sum(0)
        return of_inputs, of_weight, of_bias, None


def _rounded(tensor: Tensor, grid: Grid | None) -> Tensor:
    return tensor if grid is None else grid.rounded(tensor)
