"""Weights of ``init_from`` with other scales of adapters, or other values of tied tensors, are errors."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from automodel_ckpt.config.keys.model import InitFromConfig
from automodel_ckpt.convert.targets.flow import export_to
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.build import build_model
from automodel_ckpt.training.parts.init_from import inspect_start, start_from
from tests.support.models.gguf_models import MODELS
from tests.support.models.sizes import model_sizes

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft reads it
ONE_RANK: Any = SimpleNamespace(rank=0, world_size=1)
SIZES = model_sizes(vocab=24, hidden=8, inner=8, layers=1, heads=2)
BY_NAME = {model.name: model for model in MODELS}
ANOTHER = "describes a model that computes something else"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


def adapted(**options: Any) -> Any:
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | options
    return get_peft_model(llama(), LoraConfig(**config, task_type="CAUSAL_LM"))


def start(path: Path, model: Any) -> None:
    start_from(InitFromConfig(str(path)), {"model": model}, ranks=ONE_RANK, group=None)


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    """Files with the embedding and another output layer, whose config.json ties them."""
    llama().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[HEAD] = weights[EMBEDDING] + 1
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_tied_tensors_with_different_values_are_an_error(twice: Path) -> None:
    with pytest.raises(RecipeError, match=f"{HEAD} and {EMBEDDING}[\\s\\S]*tie_word_embeddings"):
        start(twice, llama())
    untied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    start(twice, untied)
    weights = load_file(twice / "model.safetensors")
    assert torch.equal(untied.lm_head.weight, weights[HEAD])
    # Copies with equal values are one tensor.
    weights[HEAD] = weights[EMBEDDING].clone()
    save_file(weights, twice / "model.safetensors", {"format": "pt"})
    start(twice, llama())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lora_alpha": 32}, "q_proj: 8 there, 2 here"),
        ({"use_rslora": True}, "q_proj: 4 there, 2 here"),
        (
            {"alpha_pattern": {"v_proj": 4}},
            "v_proj: 1 there, 2 here[\\s\\S]*alpha_pattern and use_rslora",
        ),
    ],
)
def test_another_scale_of_adapters_is_an_error(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    adapted(**options).save_pretrained(tmp_path)
    for check in (
        start,
        lambda path, model: inspect_start(InitFromConfig(str(path)), {"model": model}),
    ):
        with pytest.raises(RecipeError, match=expected):
            check(tmp_path, adapted())
    start(tmp_path, adapted(**options))


def test_another_function_by_the_config_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    more = {"vocab_size": 32, "unknown_to_us": 1, "attention_dropout": 0.5}
    for changes, expected in (
        (more, []),
        (
            more | {"rms_norm_eps": 0.5, "num_key_value_heads": 1},
            ["num_key_value_heads: 1 there, 2 here", "rms_norm_eps: 0.5 there, 1e-06 here"],
        ),
        ({"hidden_act": ["invalid"]}, ['hidden_act: ["invalid"] there, "silu" here']),
        (None, []),
    ):
        text = "{damaged" if changes is None else json.dumps(config | changes)
        path.write_text(text)
        caplog.clear()
        start(tmp_path, llama())
        found = [
            record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
        ]
        assert [line.strip() for text in found for line in text.splitlines()[1:]] == expected
        inspected = inspect_start(InitFromConfig(str(tmp_path)), {"model": llama()})
        assert inspected is not None
        assert [line for found in inspected.differences for line in found.lines] == expected


def differences(path: Path, model: Any) -> dict[str, list[str]]:
    inspected = inspect_start(InitFromConfig(str(path)), {"model": model})
    assert inspected is not None
    return {found.text: list(found.lines) for found in inspected.differences}


def test_another_function_by_the_metadata_of_a_gguf_file_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gguf")
    there = BY_NAME["SmolLM 3"]
    source = there.save(tmp_path / "hf")
    path = export_to(
        "gguf", source, tmp_path / "model.gguf", log=lambda _: None, tensor_type="F32"
    ).output
    same: Any = there.build()
    # What is beside the file is of another model.
    (tmp_path / "config.json").write_text('{"rms_norm_eps": 3}')
    assert differences(path, same) == {}
    config = same.config
    config.rms_norm_eps *= 1 + 1e-9
    assert differences(path, same) == {}
    config.rms_norm_eps, config.num_attention_heads = 0.5, config.num_attention_heads + 1
    config.rope_parameters = config.rope_parameters | {"rope_theta": 1.0}
    theta = BY_NAME["SmolLM 3"].build().config.rope_parameters["rope_theta"]
    heads = config.num_attention_heads
    expected = [
        f"num_attention_heads: {heads - 1} there, {heads} here",
        "rms_norm_eps: 1e-06 there, 0.5 here",
        f"rope_parameters.rope_theta: {theta} there, 1.0 here",
    ]
    assert differences(path, same) == {f"their metadata {ANOTHER}": expected}
    start(path, same)
    assert (
        f"the weights in {path} fit, but their metadata describes a model that computes"
        in caplog.text
    )
    assert "rms_norm_eps: 1e-06 there, 0.5 here" in caplog.text


def test_the_config_of_a_pretrained_model_states_that_it_is_not_tied(
    twice: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LlamaConfig.from_pretrained(twice)
    assert config.tie_word_embeddings
    with caplog.at_level(logging.WARNING):
        model: Any = build_model(config, from_pretrained=str(twice))
    assert not model.config.tie_word_embeddings
    assert f"config.json ties {HEAD} and {EMBEDDING}" in caplog.text
    assert "exports has tie_word_embeddings: false" in caplog.text
    caplog.clear()
    weights = load_file(twice / "model.safetensors")
    del weights[HEAD]
    save_file(weights, twice / "model.safetensors", {"format": "pt"})
    model = build_model(config, from_pretrained=str(twice))
    assert model.config.tie_word_embeddings and not caplog.text
