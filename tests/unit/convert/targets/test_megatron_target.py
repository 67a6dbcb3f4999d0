"""``ckpt export --to megatron``: the layout that megatron-core loads, and a bit-equal way back.

The real megatron-core loads such exports in `make interop` (tools/interop/megatron.py).
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.cli import ckpt
from tests.support.models.llamas import llama_checkpoint
from tests.support.models.sizes import model_sizes

SIZES: dict[str, Any] = {
    **model_sizes(vocab=61, hidden=48, inner=48, layers=2, heads=6, kv_heads=2),
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


Capture = pytest.CaptureFixture[str]


def stored_in(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a DCP directory, as torch reads them."""
    described = FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # Torch warns that there is one process.
        warnings.simplefilter("ignore")
        load(state, checkpoint_id=directory, no_dist=True)
    return state


def export(source: Path, output: Path, *options: str) -> dict[str, torch.Tensor]:
    assert ckpt.main(["export", str(source), "--to", "megatron", "-o", str(output), *options]) == 0
    assert (output / "latest_checkpointed_iteration.txt").read_text() == "release"
    return stored_in(output / "release")


def check_attention(fused: Any, model: Any) -> None:
    """Compare fused rows with the definition in Megatron: [groups, queries of a group + 2, head size, hidden size]."""
    attention = model.model.layers[1].self_attn
    config = model.config
    by_group = [
        projection.weight.detach().reshape(
            config.num_key_value_heads, -1, attention.head_dim, config.hidden_size
        )
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    expected = torch.cat(by_group, dim=1)
    assert torch.equal(fused, expected.reshape(-1, config.hidden_size))


@pytest.mark.parametrize("model_type", MODELS)
def test_an_export_is_stacked_as_megatron_core_does_and_imported_bit_equal(
    model_type: str, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    model, _ = save_model(model_type, source)
    original = load_file(source / "model.safetensors")
    stored = export(source, tmp_path / "out", "--vocabulary-multiple", "32")
    # Queries, keys and values are fused by query group since this version.
    common = torch.load(tmp_path / "out" / "release" / "common.pt", weights_only=True)
    assert common["checkpoint_version"] == 3.0
    embedding = stored["embedding.word_embeddings.weight"]
    assert embedding.shape[0] == 64 and not embedding[61:].any()
    assert torch.equal(embedding[:61], original["model.embed_tokens.weight"])
    check_attention(stored["decoder.layers.self_attention.linear_qkv.weight"][1], model)
    norm = stored["decoder.layers.mlp.linear_fc1.layer_norm_weight"]
    assert torch.equal(norm[1], original["model.layers.1.post_attention_layernorm.weight"])
    if model_type == "mixtral":
        experts = stored["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
        assert experts.shape == (2, 3, 96, 48)
        prefix = "model.layers.1.block_sparse_moe.experts.2."
        assert torch.equal(experts[1, 2, :48], original[prefix + "w1.weight"])
        assert torch.equal(experts[1, 2, 48:], original[prefix + "w3.weight"])
        assert torch.equal(stored["decoder.layers.pre_mlp_layernorm.weight"], norm)
    run = tmp_path / "run"
    # The export has the model's config.json, so that its names are converted back without --config.
    assert ckpt.main(["import", str(tmp_path / "out"), str(run)]) == 0
    (file,) = (run / "epoch_0_step_0" / "model").glob("*.safetensors")
    imported = load_file(file)
    assert imported.keys() == original.keys()
    assert all(torch.equal(imported[name], tensor) for name, tensor in original.items())


def test_a_checkpoint_of_this_program_is_exported_and_damage_is_found_first(
    tmp_path: Path, capsys: Capture
) -> None:
    checkpoint = tmp_path / "epoch_0_step_0"
    model: Any = llama_checkpoint(checkpoint)
    stored = export(checkpoint, tmp_path / "out", "--cast-dtype", "bf16")
    state = model.state_dict()
    names = ("q_proj", "k_proj", "v_proj")
    parts = [state[f"model.layers.0.self_attn.{name}.weight"] for name in names]
    fused = torch.cat([part.reshape(2, -1, 8, 32) for part in parts], dim=1).reshape(-1, 32)
    found = stored["decoder.layers.self_attention.linear_qkv.weight"][0]
    assert torch.equal(found, fused.to(torch.bfloat16))
    assert "output_layer.weight" not in stored  # tied
    capsys.readouterr()
    (data, *_) = sorted((checkpoint / "model").glob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    again = ["export", str(checkpoint), "--to", "megatron", "-o", str(tmp_path / "again")]
    assert ckpt.main(again) == 3
    assert not (tmp_path / "again").exists()


def test_a_model_without_a_converter_and_a_wrong_multiple_are_errors(
    tmp_path: Path, capsys: Capture
) -> None:
    source = tmp_path / "model"
    save_model("llama", source)
    command = ["export", str(source), "--to", "megatron", "-o", str(tmp_path / "out")]
    assert ckpt.main([*command, "--vocabulary-multiple", "0"]) == 2
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "gpt_neox"}))
    assert ckpt.main(command) == 3
    assert "llama, mistral, mixtral, qwen2, qwen3, qwen3_moe" in capsys.readouterr().err
    (source / "config.json").unlink()
    assert ckpt.main(command) == 3
    assert not (tmp_path / "out").exists()
