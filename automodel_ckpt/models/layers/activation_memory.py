"""Memory of activations: which of them a layer keeps for the backward pass, and which it recomputes.

* ``full``: a layer keeps its input and recomputes everything else.
* ``selective``: a layer also keeps what is expensive to compute: the results of attention, of collectives, and of every
  second matrix product. The policy is torchtitan's (torchtitan/distributed/activation_checkpoint.py).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from automodel_ckpt.errors import RecipeError

_WHERE = "model.activation_checkpointing"
MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_scaled_mm"})
"""Operators of which every second result is kept. Batched products are not: eager attention's are all pairs. Neither
are grouped ones: GPT-OSS adds a bias to their results in place, which would be added again to a kept one."""
KEPT_OPERATORS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_attention_math",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flex_attention",
        "_c10d_functional::all_to_all_single",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_reduce",
    }
)
"""Operators with results that are kept: attention, and reductions over ranks."""


def checkpoint_activations(
    model: Any, mode: str = "full", layers: Sequence[nn.Module] | None = None
) -> None:
    """Make the layers of *model* recompute activations in the backward pass: which of them, *mode* selects.

    *layers* are the decoder layers, which ``selective`` needs. Raises :class:`RecipeError` if the model does not
    support it.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise RecipeError(
            "this model cannot recompute its activations",
            where=_WHERE,
            value=type(model).__name__,
            hint="",
        )
    if mode == "selective":
        _select_activations(model, layers or ())
        return
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        enable = model.gradient_checkpointing_enable
    # The reentrant variant computes no gradients if no input of a layer requires any, as with a
    # frozen embedding.
    enable({"use_reentrant": False})


def _select_activations(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    if not layers:
        raise RecipeError(
            "this model has no repeated layers, which the mode selective needs",
            where=_WHERE,
            value=f"selective, {type(model).__name__}",
            hint="",
        )
    for layer in layers:
        forward = _selective_forward(type(layer))  # type: ignore[arg-type]
        # Not a wrapper module, which would change the names of parameters. torch.compile must see the checkpoint
        # inside of what it compiles, and the hooks of FSDP2 must stay outside, so the method itself is replaced. A
        # bound method is copied together with its layer.
        layer.forward = types.MethodType(forward, layer)


@functools.cache
def _selective_forward(layer_class: type[nn.Module]) -> Callable[..., Any]:
    """The method ``forward`` of *layer_class*, which keeps only selected activations in training."""
    forward = layer_class.forward

    @functools.wraps(forward)
    def selective(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = functools.partial(forward, layer, **kwargs)
        if not (layer.training and torch.is_grad_enabled()):
            return function(*args)
        return checkpoint(function, *args, use_reentrant=False, context_fn=selective_contexts)

    return selective


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a selective layer's forward pass and of its recomputation."""
    return create_selective_checkpoint_contexts(_Policy())  # type: ignore[no-any-return, no-untyped-call]


class _Policy:
    """Decides which results are kept, in the order of the operators of one layer."""

    def __init__(self) -> None:
        # The recomputation makes the same choices, so it counts separately.
        self._num_products = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # Without the name of its overload; flex attention has no overloads.
        name: str = operator.name().partition(".")[0]
        is_kept = name in KEPT_OPERATORS
        if name in MATRIX_PRODUCTS:
            self._num_products[context.is_recompute] += 1
            is_kept = self._num_products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
