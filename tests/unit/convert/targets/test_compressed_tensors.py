"""``ckpt export --to compressed-tensors``: stored values by the definition of each scheme, and a model that loads."""

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.models.build import build_model
from automodel_ckpt.models.config_reading import load_model_config
from automodel_ckpt.models.quantize import check_not_quantized
from tests.support.models.sizes import model_sizes

GROUP = 128


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama") / "hf"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        # The columns of down_proj are two groups.
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.05,
        attention_bias=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def exported(source: Path, scheme: str, target: Path) -> dict[str, torch.Tensor]:
    pytest.importorskip("compressed_tensors")
    arguments = ["--to", "compressed-tensors", "--scheme", scheme, "-o", str(target)]
    assert main(["export", str(source), *arguments]) == 0
    return load_file(target / "model-00001-of-00001.safetensors")


def integers(packed: torch.Tensor, num_bits: int) -> np.ndarray[Any, Any]:
    """Unpack little-endian words of unsigned integers, which are stored with an offset of half their range."""
    raw = packed.numpy().view("u1")
    if num_bits == 4:
        raw = np.stack([raw & 15, raw >> 4], -1).reshape(raw.shape[0], -1)
    return raw.astype(int) - (1 << (num_bits - 1))


def dequantized(stored: dict[str, torch.Tensor], layer: str, scheme: str) -> torch.Tensor:
    """Return a layer's weight by the definition of its scheme: stored value times the scale of its columns."""
    scale = stored[f"{layer}.weight_scale"].double()
    if scheme in ("W8A16", "W4A16"):
        packed = stored[f"{layer}.weight_packed"]
        values = torch.from_numpy(integers(packed, 8 if scheme == "W8A16" else 4)).double()
        assert stored[f"{layer}.weight_shape"].tolist() == list(values.shape)
    else:
        values = stored[f"{layer}.weight"].double()
    return values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)


STEPS = {"W8A8": 2 / 255, "W8A16": 2 / 255, "W4A16": 2 / 15, "FP8_DYNAMIC": 2 * 32 / 448}
"""The largest distance of two neighboring values, in units of the largest value of the group."""
SCHEMES = ["W4A16", *(pytest.param(s, marks=pytest.mark.further) for s in STEPS if s != "W4A16")]


@pytest.mark.parametrize("scheme", STEPS)
def test_each_weight_is_within_half_a_step_of_its_scheme_and_everything_else_is_unchanged(
    llama: Path, tmp_path: Path, scheme: str
) -> None:
    original = load_file(llama / "model.safetensors")
    stored = exported(llama, scheme, tmp_path / "out")
    layers = {name.removesuffix(".weight_scale") for name in stored if "weight_scale" in name}
    assert layers == {n.removesuffix(".weight") for n in original if n.endswith("proj.weight")}
    for layer in layers:
        weight = original[f"{layer}.weight"].double()
        size = GROUP if scheme in ("W8A16", "W4A16") else weight.shape[1]
        largest = weight.reshape(weight.shape[0], -1, size).abs().amax(-1)
        largest = largest.repeat_interleave(size, 1)
        error = (dequantized(stored, layer, scheme) - weight).abs()
        # The scale is rounded to bfloat16: 2**-9 of the value.
        assert (error <= largest * (STEPS[scheme] / 2 + 2**-8)).all()
    for name, tensor in original.items():
        if name.removesuffix(".weight") not in layers:
            assert torch.equal(stored.pop(name), tensor)
    assert all(".weight" in name for name in stored)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_loads_the_stored_values(llama: Path, tmp_path: Path, scheme: str) -> None:
    stored = exported(llama, scheme, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    ids = torch.arange(24)[None]
    # Loading replaces the stored values by floats at the first forward pass, if not before.
    logits = model(ids).logits.float()
    plain = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    exact = plain(ids).logits.float()
    for name, _ in plain.named_modules():
        if f"{name}.weight_scale" in stored:
            weight = dequantized(stored, name, scheme)
            assert torch.equal(model.get_submodule(name).weight, weight.to(torch.bfloat16))
    assert (logits - exact).norm() < 0.3 * exact.norm()


@pytest.mark.skipif(
    "dequantize" not in inspect.signature(transformers.CompressedTensorsConfig).parameters,
    reason="this version of transformers dequantizes only in the first forward pass",
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_base_is_trained_as_ordinary_floats(
    llama: Path, tmp_path: Path, scheme: str
) -> None:
    stored = exported(llama, scheme, tmp_path / "out")
    base = str(tmp_path / "out")
    config = load_model_config(from_pretrained=base)
    model: Any = build_model(config, from_pretrained=base, dtype="float32")
    check_not_quantized(model)
    values = dict(model.named_parameters())
    assert values.keys() == load_file(llama / "model.safetensors").keys()
    assert {value.dtype for value in values.values()} == {torch.float32}
    for name, value in values.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.weight_scale" in stored:
            weight = dequantized(stored, layer, scheme).float()
            torch.testing.assert_close(value, weight, rtol=2**-8, atol=0)


def test_the_config_names_what_is_not_quantized(llama: Path, tmp_path: Path) -> None:
    exported(llama, "W4A16", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "pack-quantized"
    assert quantization["quantization_status"] == "compressed"
    assert quantization["ignore"] == ["lm_head", "model.embed_tokens"]
    assert quantization["config_groups"]["group_0"]["weights"]["group_size"] == GROUP
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert set(index["weight_map"]) == set(
        load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    )


def test_experts_are_quantized_and_routers_are_not(tmp_path: Path) -> None:
    config = MixtralConfig(
        **model_sizes(vocab=64, hidden=128, inner=96, layers=1, heads=2, kv_heads=1),
        num_local_experts=2,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    stored = exported(tmp_path / "hf", "W4A16", tmp_path / "out")
    experts = "model.layers.0.block_sparse_moe.experts.1"
    assert stored[f"{experts}.w1.weight_packed"].shape == (96, 16)
    # 96 columns are no group of 128.
    assert stored[f"{experts}.w2.weight"].dtype == torch.bfloat16
    assert stored["model.layers.0.block_sparse_moe.gate.weight"].dtype == torch.bfloat16
    ignored = json.loads((tmp_path / "out" / "config.json").read_bytes())["quantization_config"]
    assert "model.layers.0.block_sparse_moe.gate" in ignored["ignore"]
    assert f"{experts}.w2" in ignored["ignore"] and f"{experts}.w1" not in ignored["ignore"]
