"""Validate a model before training: its tensors, the types of what is trained, its attention."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.forward import attention_of


def check_complete(model: object) -> None:
    """Raise :class:`RecipeError` if *model* is not a module, or has lazy tensors or tensors on the meta device."""
    if not isinstance(model, nn.Module):
        hint = "return one from the function or class of this section"
        raise RecipeError(
            "the model is not a torch.nn.Module",
            where="model",
            value=type(model).__name__,
            hint=hint,
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lazy = [name for name, tensor in tensors.items() if is_lazy(tensor) or tensor.is_meta]
    if lazy:
        raise RecipeError(
            "tensors of the model are not initialized",
            where="model",
            value=f"{len(lazy)} of {len(tensors)}, the first {lazy[0]}",
            hint="let what makes the model run it once on a few tokens (lazy layers), and leave the meta device out",
        )


def check_trained_types(model: nn.Module) -> None:
    """Raise :class:`RecipeError` for trainable parameters in float16."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    short = [name for name, p in trained if p.dtype == torch.float16]
    if short:
        raise RecipeError(
            "float16 training requires a loss scaler (small gradients underflow), which is not supported",
            where="model.dtype",
            value=f"{len(short)} trainable parameters in float16, the first {short[0]}",
            hint="set it to bfloat16, which has float32's range, or to float32; adapters on a base in float16 are "
            "trained in peft.dtype float32",
        )


def check_attention(model: nn.Module, device: torch.device) -> None:
    """Raise :class:`RecipeError` if *device* does not support training with the model's attention implementation."""
    if device.type == "cpu" and attention_of(model) == "flex_attention":
        raise RecipeError(
            "torch's flex_attention has no backward pass on the CPU",
            where="model.attn_implementation",
            value="flex_attention",
            hint="set it to sdpa or eager, or train on a GPU",
        )
