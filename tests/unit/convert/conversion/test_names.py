"""Converters between the names of Megatron-Core and of Hugging Face: equal logits, and bit-equal round trips."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, whole_tensor
from automodel_ckpt.checkpoint.parts.tiling import tiling_fault
from automodel_ckpt.checkpoint.tensors.stored import whole
from automodel_ckpt.convert.names.dimensions import (
    Dimensions,
    dimensions_of_config,
)
from automodel_ckpt.convert.names.megatron_names import (
    is_model_tensor,
    plain_names,
    stacked_names,
)
from automodel_ckpt.convert.names.registry import converter_of, model_types
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


def test_each_model_of_the_documentation_has_a_converter() -> None:
    assert model_types() == sorted(MODELS)


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


def test_tensors_that_ranks_store_in_parts_are_converted_from_the_parts(tmp_path: Path) -> None:
    generator = random.Random(1)
    rows, columns = 80, 8  # 6 + 2 + 2 heads of 8
    content = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    slices: list[Slice] = []
    data = b""
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    first = 0
    while first < rows:
        count = min(generator.randrange(1, 20), rows - first)
        part = content[first : first + count].tobytes()
        slices.append(
            Slice(name, "F32", (first, 0), (count, columns), "data", len(data), len(part))
        )
        data += part
        first += count
    (tmp_path / "data").write_bytes(data)
    fused = Tensor(name, "F32", (rows, columns), tuple(slices))
    converter = converter_of("llama", "here")
    rule = next(rule for rule in converter.rules if "linear_qkv.weight" in rule.external)
    small = replace(converter, rules=(rule,))
    dimensions = Dimensions(1, 6, 2, 8)
    found = values(tmp_path, small.to_hugging_face({name: fused}, dimensions, "here"))
    grouped = content.reshape(2, 5, 8, columns)
    assert np.array_equal(
        found["model.layers.0.self_attn.q_proj.weight"], grouped[:, :3].reshape(48, columns)
    )
    assert np.array_equal(
        found["model.layers.0.self_attn.v_proj.weight"], grouped[:, 4].reshape(16, columns)
    )


def test_missing_unknown_and_misshapen_tensors_are_errors(tmp_path: Path) -> None:
    _, config = save_model("llama", tmp_path)
    source = open_source(tmp_path)
    dimensions = dimensions_of_config(config, "config.json")
    converter = converter_of("llama", "here")
    missing = {name: t for name, t in source.tensors.items() if "layers.1.mlp.up" not in name}
    with pytest.raises(CheckpointUnusable, match=r"(?s)missing.*layers\.1\.mlp\.up_proj"):
        converter.from_hugging_face(missing, dimensions, "here")
    extra = {**source.tensors, "model.other": whole_tensor("model.other", "F32", (1,), "f", 0)}
    with pytest.raises(CheckpointUnusable, match=r"(?s)no rule.*model\.other"):
        converter.from_hugging_face(extra, dimensions, "here")
    other_heads = replace(dimensions, num_query_groups=3)
    with pytest.raises(CheckpointUnusable, match="does not have the rows"):
        converter.from_hugging_face(source.tensors, other_heads, "here")
    megatron = converter.from_hugging_face(source.tensors, dimensions, "here").tensors
    with pytest.raises(CheckpointUnusable, match="does not have the rows"):
        converter.to_hugging_face(megatron, other_heads, "here")
    with pytest.raises(CheckpointUnusable, match="does not have the rows"):
        converter.to_hugging_face(megatron, replace(dimensions, vocab_size=62), "here")
    with pytest.raises(CheckpointUnusable, match="missing"):
        converter.to_hugging_face(megatron, replace(dimensions, num_layers=10**9), "here")


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
