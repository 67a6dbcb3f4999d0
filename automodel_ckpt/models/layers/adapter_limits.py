"""Layers that can have no adapter, because of their code or of peft's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from automodel_ckpt.models.inspect.module_patterns import leaf_names
from automodel_ckpt.models.layers.lora import ADAPTER_NAME


def mistaken_for_experts(model: Any, adaptable: Iterable[str]) -> set[str]:
    """The names of layers that peft would replace by the fused experts of the model.

    peft interprets such names as those of experts in older versions of the model.
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a version of peft without support for fused experts
        return set()

    def is_unchanged(leaf: str) -> bool:
        config: Any = LoraConfig(target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # peft rejects a part of a fused tensor
            return False
        return leaf in config.target_modules

    experts = {leaf for leaf in leaf_names(adaptable) if not is_unchanged(leaf)}
    return {name for name in adaptable if name.rpartition(".")[2] in experts}


def rejected_by_peft(model: Any, names: Iterable[str]) -> set[str]:
    """The *names* of layers that peft rejects in models of this type, such as those whose kernels read the weight."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    def is_rejected(leaf: str) -> bool:
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, leaf)
        except ValueError:
            return True
        return False

    candidates = set(names)
    rejected = {leaf for leaf in leaf_names(candidates) if is_rejected(leaf)}
    return {name for name in candidates if name.rpartition(".")[2] in rejected}


def lost_by_peft(model: nn.Module, names: Iterable[str]) -> set[str]:
    """The *names* of layers whose adapters peft saves, and ignores when it loads them, with a warning.

    peft applies the renamings that transformers has for old weights to adapters, too, and some rename the present name
    of a layer (peft 0.21: shared_experts of Laguna).
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import (
            convert_peft_adapter_state_dict_for_transformers as loaded_state,
        )
    except ImportError:  # a version of peft that renames nothing
        return set()
    keys = {f"base_model.model.{name}.lora_A.weight": name for name in names}
    # Only the names matter. Adapters on the meta device take no memory.
    state = {key: torch.empty(1, 1, device="meta") for key in keys}
    config: Any = LoraConfig(target_modules=list(keys.values()))
    loaded = loaded_state(model, config, state, ADAPTER_NAME)
    found = {key.replace(f".{ADAPTER_NAME}.", ".") for key in loaded}
    return {name for key, name in keys.items() if key not in found}


def not_linear_layers(model: nn.Module, adaptable: Mapping[str, nn.Module]) -> set[str]:
    """The names of layers that the model's code derives from ``nn.Linear``, but that compute something else.

    Examples are routers that return scores and indices, and block-diagonal projections. peft adds the output of an
    adapter to what such a layer returns, and the forward pass fails.
    """
    found = set()
    for name, layer in adaptable.items():
        # Classes of other packages, such as quantized layers, have adapters of their own in peft.
        is_own_class = type(layer).__module__ == type(model).__module__
        if isinstance(layer, nn.Linear) and is_own_class and not _maps_rows(layer):
            found.add(name)
    return found


def _maps_rows(layer: nn.Linear) -> bool:
    """Whether *layer* maps rows of ``in_features`` values to a tensor with rows of ``out_features`` values."""
    if type(layer).forward is nn.Linear.forward:
        return True
    # On the meta device, nothing is computed and no random numbers are drawn.
    state = [*layer.named_parameters(), *layer.named_buffers()]
    tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in state}
    rows = torch.empty(2, 3, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        with torch.no_grad():
            output = torch.func.functional_call(layer, tensors, (rows,))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return isinstance(output, torch.Tensor) and output.shape == (2, 3, layer.out_features)
