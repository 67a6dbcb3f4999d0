"""Converters between the names of Megatron-Core and of Hugging Face: equal logits, and bit-equal round trips."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.checkpoint.parts.slices import Tensor, whole_tensor
from automodel_ckpt.convert.names.megatron_names import (
    is_model_tensor,
    plain_names,
)
from automodel_ckpt.errors import CheckpointUnusable

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {
        "norm_topk_prob": True,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
}


def save_model(model_type: str, directory: Path) -> tuple[Any, Mapping[str, Any]]:
    """Write a random model as Hugging Face files. Returns it and its config."""
    torch.manual_seed(7)
    sizes = SIZES | MODELS[model_type]
    if model_type == "qwen2":
        # Qwen 2 has no head_dim in its config: its heads are hidden_size / num_attention_heads.
        del sizes["head_dim"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    for name, parameter in model.named_parameters():
        # Biases are zeros and norms are ones, which any order of them would equal.
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    return model, model.config.to_dict()


def test_names_of_wrappers_the_local_implementation_and_grouped_experts_are_the_same_tensors() -> (
    None
):
    def named(*names: str) -> dict[str, Tensor]:
        return {name: whole_tensor(name, "F32", (4, 2), "f", 0) for name in names}

    found = plain_names(
        named(
            "module.module.decoder.layers.0.input_layernorm.weight",
            "model.decoder.layers.0.pre_mlp_layernorm.weight",
            "decoder.layers.0.mlp.experts.linear_fc1.weight12",
            "decoder.layers.0.mlp.experts.experts.3.linear_fc1.weight_w",
            "decoder.layers.0.mlp.experts.experts.3.linear_fc1.weight_v",
        ),
        "here",
    )
    assert {name: tensor.shape for name, tensor in found.items()} == {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (4, 2),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (4, 2),
        "decoder.layers.0.mlp.experts.local_experts.12.linear_fc1.weight": (4, 2),
        "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight": (8, 2),
    }
    with pytest.raises(CheckpointUnusable, match="two halves"):
        plain_names(named("decoder.layers.0.mlp.linear_fc1.weight_w"), "here")
    with pytest.raises(CheckpointUnusable, match="stored twice"):
        plain_names(named("module.output_layer.weight", "output_layer.weight"), "here")
    huge = {"decoder.layers.mlp.x": whole_tensor("decoder.layers.mlp.x", "F32", (2**58, 0), "f", 0)}
    with pytest.raises(CheckpointUnusable, match="does not stack layers"):
        plain_names(huge, "here")
    assert not is_model_tensor("optimizer.state.exp_avg.decoder.final_layernorm.weight")
    assert not is_model_tensor("decoder.layers.mlp.linear_fc1._extra_state/shard_0_2")
    assert is_model_tensor("module.output_layer.weight")
