"""Models from a configuration or from files, and what is refused before any weight is made."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    MarianConfig,
    MarianMTModel,
)

from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.build import build_model, restore_attention_caps
from automodel_ckpt.models.config_reading import load_model_config
from automodel_ckpt.models.inspect.interface import check_vocabulary
from automodel_ckpt.models.inspect.repository import require_local
from automodel_ckpt.models.model_checks import freeze
from automodel_ckpt.models.quantize import check_not_quantized
from automodel_ckpt.parallel.model_layers import decoder_layers, untied_layers
from automodel_ckpt.training.model.deferred_model import build_deferred
from tests.support.models.sizes import model_sizes

TINY: dict[str, Any] = {
    "model_type": "llama",
    **model_sizes(hidden=16, inner=24, layers=3, heads=2, vocab=40),
}


class Tokenizer:
    """What the recipe asks of a tokenizer."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0

    def __len__(self) -> int:
        return 50


def test_a_configuration_takes_the_vocabulary_and_special_ids_from_the_tokenizer() -> None:
    settings = {key: value for key, value in TINY.items() if key != "vocab_size"}
    config = load_model_config(from_config=settings, tokenizer=Tokenizer())
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id) == (50, 0, 2)
    assert "vocab_size" not in settings


def test_a_path_to_a_configuration_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    for path in (tmp_path, tmp_path / "config.json"):
        assert load_model_config(from_config=str(path)).num_hidden_layers == 3


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"hidden_sise": 3}, "did you mean hidden_size"),
        ({"model_type": "lama"}, "did you mean llama"),
        ({"hidden_size": "wide"}, "expected int, got str"),
        ({"hidden_size": 15}, "not a multiple of the number of attention heads"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_model_config(from_config=TINY | change)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "../nowhere"]
)
def test_a_path_without_a_directory_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(RecipeError, match="no such directory"):
        require_local(name, "model.from_pretrained")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("misspelt", r"no models of this type[\s\S]*model_type lama[\s\S]*did you mean llama"),
        ("misspelt/config.json", r"is a directory, not a file[\s\S]*such as .*/misspelt\n?"),
    ],
)
def test_a_config_that_transformers_cannot_use_is_refused_with_the_reason(
    tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "misspelt").mkdir()
    (tmp_path / "misspelt" / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(RecipeError, match=said):
        load_model_config(from_pretrained=str(tmp_path / name))


def test_a_tokenizer_larger_than_the_vocabulary_is_refused() -> None:
    check_vocabulary(LlamaConfig(vocab_size=50), Tokenizer())
    check_vocabulary(LlamaConfig(vocab_size=10), None)
    with pytest.raises(RecipeError, match="more tokens than the model's vocabulary"):
        check_vocabulary(LlamaConfig(vocab_size=49), Tokenizer())


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", torch.bfloat16), ("auto", torch.float32)]
)
def test_fresh_weights_follow_the_seed_and_the_dtype(dtype: str, expected: torch.dtype) -> None:
    config = load_model_config(from_config=TINY)
    before = config.to_dict()
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(build_model(config, dtype=dtype))
    assert config.to_dict() == before
    assert models[0].training
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert first.dtype == expected
        assert torch.equal(first, second)


def test_weights_are_read_from_files_in_their_own_or_another_dtype(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # As a run does whose output is a file.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = load_model_config(from_config=TINY)
    build_model(config, dtype="bfloat16").save_pretrained(tmp_path)  # type: ignore[operator]
    read = load_model_config(from_pretrained=str(tmp_path))
    capfd.readouterr()
    kept = build_model(read, from_pretrained=str(tmp_path), dtype="auto")
    cast = build_model(read, from_pretrained=str(tmp_path), dtype="float32")
    # No warnings about tensor parallelism.
    assert capfd.readouterr() == ("", "")
    assert {p.dtype for p in kept.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in cast.parameters()} == {torch.float32}
    for own, other in zip(kept.parameters(), cast.parameters(), strict=True):
        assert torch.equal(own.float(), other)


def test_files_without_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = load_model_config(from_pretrained=str(tmp_path))
    with pytest.raises(RecipeError, match=r"the model cannot be built[\s\S]*hint: .*safetensors"):
        build_model(config, from_pretrained=str(tmp_path), attn_implementation="eager")


GEMMA2: dict[str, Any] = {
    **model_sizes(hidden=32, inner=48, layers=2, heads=4, kv_heads=2, vocab=97),
    "head_dim": 16,
    "pad_token_id": 0,
    "sliding_window": 4,
}
"""Settings of a small Gemma 2."""


def _attention_of_layers(model: nn.Module) -> set[str]:
    layers = [layer for layer in model.modules() if type(layer).__name__ == "Gemma2Attention"]
    return {layer.config._attn_implementation for layer in layers}


def test_a_model_that_caps_its_attention_scores_does_not_get_sdpa_which_has_no_cap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in transformers 5.17.
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    capped = AutoConfig.for_model("gemma2", **GEMMA2, attn_logit_softcapping=50.0)
    assert _attention_of_layers(build_model(capped)) == {"eager"}
    without = AutoConfig.for_model("gemma2", **GEMMA2, attn_logit_softcapping=None)
    assert _attention_of_layers(build_model(without)) == {"sdpa"}
    assert _attention_of_layers(build_model(capped, attn_implementation="sdpa")) == {"sdpa"}
    # The configuration of the caller is not changed, and what it names is kept if it has a cap.
    assert capped._attn_implementation is None
    for named, expected in (("sdpa", "eager"), ("flex_attention", "flex_attention")):
        of_config = AutoConfig.for_model("gemma2", **GEMMA2, attn_implementation=named)
        assert _attention_of_layers(build_model(of_config)) == {expected}
    # Without memory, as recipes build most models.
    section = ModelConfig(from_config={"model_type": "gemma2"})
    deferred = build_deferred(
        section, capped, base=None, auto_class=AutoModelForCausalLM, seed=0, group=None
    )
    assert next(deferred.model.parameters()).is_meta
    assert _attention_of_layers(deferred.model) == {"eager"}


@pytest.mark.parametrize("can_change", [True, False], ids=["functions", "classes of layers"])
def test_a_finished_model_that_caps_its_attention_scores_gets_an_attention_with_a_cap(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, can_change: bool
) -> None:
    # As in transformers 5.17.
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    base = transformers.Gemma2PreTrainedModel
    monkeypatch.setattr(base, "_can_set_attn_implementation", classmethod(lambda cls: can_change))
    config = transformers.Gemma2Config(**GEMMA2, attn_logit_softcapping=0.01)
    torch.manual_seed(0)
    model = nn.ModuleDict({"inner": AutoModelForCausalLM.from_config(config)}).eval()
    inner: Any = model["inner"]
    assert _attention_of_layers(model) == {"sdpa"}
    restore_attention_caps(model)
    (record,) = caplog.records
    assert "Gemma2ForCausalLM caps its attention scores at 0.01" in record.getMessage()
    if not can_change:
        assert _attention_of_layers(model) == {"sdpa"}
        assert "build it with attn_implementation: eager" in record.getMessage()
        return
    assert _attention_of_layers(model) == {"eager"}
    tokens = torch.arange(8).unsqueeze(0)
    logits = []
    for cap in (0.01, None):
        config = transformers.Gemma2Config(**GEMMA2, attn_logit_softcapping=cap)
        other = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        other.load_state_dict(inner.state_dict())
        logits.append(other(tokens).logits)
    assert torch.equal(inner(tokens).logits, logits[0])
    assert not torch.allclose(logits[0], logits[1], rtol=1e-3)
    caplog.clear()
    restore_attention_caps(model)
    restore_attention_caps(nn.Linear(1, 1))
    assert not caplog.records


def test_patterns_of_parameters_that_a_model_may_lack_are_allowed_on_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build_model(load_model_config(from_config=TINY))
    with caplog.at_level(logging.INFO):
        freeze(model, ["*embed_tokens*"], ["vision_tower", "*audio*", "model.layers.0.*"])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert "model.embed_tokens.weight" in frozen
    assert "model.layers.0.mlp.up_proj.weight" in frozen
    assert "the model has no parameters vision_tower" in caplog.text
    assert "the model has no parameters *audio*" in caplog.text
    assert not any(name.startswith("model.layers.1.") for name in frozen)
    with pytest.raises(RecipeError, match=r"did you mean .*model\.norm\.weight"):
        freeze(model, ["model.nrom.weight"])
    with pytest.raises(RecipeError, match="no parameter's name matches"):
        freeze(model, ["vision_tower"], ["*audio*"])
    with pytest.raises(RecipeError, match="no parameter is left to train"):
        freeze(model, [], ["*"])


def test_the_decoder_layers_are_found_by_class_or_as_the_longest_list() -> None:
    model = build_model(load_model_config(from_config=TINY))
    assert [type(layer).__name__ for layer in decoder_layers(model)] == ["LlamaDecoderLayer"] * 3
    plain = torch.nn.ModuleDict(
        {
            "few": torch.nn.ModuleList([torch.nn.Linear(2, 2)]),
            "many": torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(4)]),
            # Cannot be called, so fsdp2 could not shard them.
            "containers": torch.nn.ModuleList([torch.nn.ModuleDict() for _ in range(5)]),
        }
    )
    assert decoder_layers(plain) == list(plain["many"])  # type: ignore[arg-type]
    assert decoder_layers(torch.nn.Linear(2, 2)) == []
    # A model with two parts that does not name the classes of its layers.
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2}
    with torch.device("meta"):
        marian = MarianMTModel(MarianConfig(**sizes, pad_token_id=0))  # type: ignore[arg-type]
    parts = marian.get_encoder(), marian.get_decoder()
    assert decoder_layers(marian) == [*parts[0].layers, *parts[1].layers]  # type: ignore[misc]


def test_a_block_that_is_tied_to_what_is_outside_of_it_is_not_sharded_on_its_own() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    with torch.device("meta"):
        model: Any = BertLMHeadModel(BertConfig(**sizes, num_hidden_layers=2, is_decoder=True))  # type: ignore[arg-type]
    assert decoder_layers(model) == [model.bert.embeddings, *model.bert.encoder.layer]
    assert untied_layers(model) == [*model.bert.encoder.layer]


def write_fp8_base(directory: Path) -> dict[str, torch.Tensor]:
    """A tiny Llama in bfloat16 whose projections are FP8 with a scale; returns their values in float32."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY), dtype=torch.bfloat16).save_pretrained(
        directory
    )
    tensors, values = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if "_proj" in name]:
        scale = tensors[name].float().abs().max() / 448
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.reshape(1, 1).clone()
        values[name] = tensors[name].float() * scale
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    return values


def test_a_base_in_fp8_is_read_in_the_type_that_the_recipe_asks_for(tmp_path: Path) -> None:
    values = write_fp8_base(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        model: Any = build_model(
            load_model_config(from_pretrained=str(tmp_path)),
            from_pretrained=str(tmp_path),
            dtype=name,
        )
        parameters = dict(model.named_parameters())
        assert {parameter.dtype for parameter in parameters.values()} == {dtype}
        assert all(torch.equal(parameters[key], value.to(dtype)) for key, value in values.items())
        assert model.config.dtype == dtype and not hasattr(model.config, "quantization_config")


def test_a_base_whose_weights_stay_quantized_is_refused_for_training_as_a_whole() -> None:
    model: Any = torch.nn.Linear(2, 2)
    check_not_quantized(model)
    model.is_quantized, model.config = (
        True,
        LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}),
    )
    with pytest.raises(RecipeError, match=r"stay quantized(.|\n)*gptq(.|\n)*peft"):
        check_not_quantized(model)
