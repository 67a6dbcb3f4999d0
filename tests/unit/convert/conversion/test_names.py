"""Converters between the names of Megatron-Core and of Hugging Face: equal logits, and bit-equal round trips."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.checkpoint.parts.slices import Tensor, whole_tensor
from automodel_ckpt.checkpoint.parts.tiling import tiling_fault
from automodel_ckpt.checkpoint.tensors.stored import whole
from automodel_ckpt.convert.names.dimensions import (
    dimensions_of_config,
)
from automodel_ckpt.convert.names.megatron_names import (
    is_model_tensor,
    plain_names,
    stacked_names,
)
from automodel_ckpt.convert.names.registry import converter_of
from automodel_ckpt.convert.open import open_source
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


def values(root: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tensors as arrays, after a check that the slices of each tile it."""
    found = {}
    for name, tensor in tensors.items():
        assert tensor.fqn == name
        assert {stored.fqn for stored in tensor.slices} == {name}
        assert tiling_fault([stored.box for stored in tensor.slices], tensor.shape) is None
        found[name] = np.array(whole(root, tensor))
    return found


@pytest.mark.parametrize("model_type", MODELS)
def test_a_round_trip_is_bit_equal_and_the_fused_rows_are_megatrons(
    model_type: str, tmp_path: Path
) -> None:
    model, config = save_model(model_type, tmp_path)
    source = open_source(tmp_path)
    dimensions = dimensions_of_config(config, "config.json")
    converter = converter_of(model_type, "config.json")
    converted = converter.from_hugging_face(
        source.tensors, dimensions, "here", vocabulary_multiple=16
    )
    assert converted.zero_rows["embedding.word_embeddings.weight"] == 3
    stored = stacked_names(converted.tensors, "here")
    assert stored["decoder.layers.self_attention.linear_qkv.weight"].shape[0] == 2
    plain = plain_names(stored, "here")
    assert plain.keys() == converted.tensors.keys()
    back = converter.to_hugging_face(plain, dimensions, "here")
    expected = values(source.root, source.tensors)
    found = values(source.root, back)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name
    megatron = values(source.root, converted.tensors)
    check_attention(megatron["decoder.layers.1.self_attention.linear_qkv.weight"], model)


def check_attention(fused: Any, model: Any) -> None:
    """Compare fused rows with the definition in Megatron: [groups, queries of a group + 2, head size, hidden size]."""
    attention = model.model.layers[1].self_attn
    config = model.config
    groups, heads = config.num_key_value_heads, config.num_attention_heads
    head_size = attention.head_dim
    by_group = [
        projection.weight.detach().reshape(groups, -1, head_size, config.hidden_size)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    expected = torch.cat(by_group, dim=1)
    assert expected.shape[1] == heads // groups + 2
    assert np.array_equal(fused, expected.reshape(-1, config.hidden_size).numpy())


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
