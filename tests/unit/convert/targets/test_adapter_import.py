"""Importing adapters that peft saved: every kind is either equal to what peft computes, or an error."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from automodel_ckpt.cli.ckpt import main
from tests.support.models.sizes import model_sizes

Capture = pytest.CaptureFixture[str]
Error = Callable[..., str]
TOKENS = torch.arange(3, 15).reshape(1, 12)
FILE = "adapter_model.safetensors"


def base_in(directory: Path, *, tied: bool = False) -> Path:
    config = LlamaConfig(
        **model_sizes(vocab=24, hidden=8, inner=16, layers=2, heads=2, kv_heads=1),
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def adapter_on(base: Path, directory: Path, dtype: str = "float32", **options: Any) -> Path:
    """Save an adapter whose values are not those of a new one."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    config = LoraConfig(r=2, lora_alpha=3, task_type="CAUSAL_LM", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        adapted.save_pretrained(str(directory))
    return directory


def logits_of(base: Path, adapter: Path, dtype: str = "float32") -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        logits: torch.Tensor = adapted(input_ids=TOKENS).logits
    return logits


@pytest.fixture
def imported(tmp_path: Path, capsys: Capture) -> Callable[..., dict[str, Any]]:
    """Return a function that imports an adapter, and returns the report."""

    def call(adapter: Path, *more: str) -> dict[str, Any]:
        run = tmp_path / f"run-{adapter.name}"
        assert main(["import", str(adapter), str(run), "--json", *more]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    return call


@pytest.fixture
def error(tmp_path: Path, capsys: Capture) -> Error:
    """Return a function that imports an adapter that cannot be imported, and returns the message."""

    def call(adapter: Path, *more: str) -> str:
        assert main(["import", str(adapter), str(tmp_path / "run"), *more]) == 3
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    return call


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], ["embed_tokens", "lm_head"]])
def test_copies_of_the_base_that_peft_saves_with_an_adapter_are_left_out(
    tmp_path: Path, imported: Callable[..., dict[str, Any]], tied: bool, targets: list[str]
) -> None:
    base = base_in(tmp_path / "base", tied=tied)
    adapter = adapter_on(base, tmp_path / "adapter", target_modules=targets)
    num_copies = sum("base_layer" in name for name in load_file(adapter / FILE))
    assert num_copies
    report = imported(adapter)
    assert any("of weights of the base or the adapter" in text for text in report["left_out"])
    assert report["peft"].get("ensure_weight_tying", True) != tied
    model = Path(report["checkpoint"]) / "model"
    assert not any("base_layer" in name for name in load_file(model / FILE))
    assert torch.equal(logits_of(base, adapter), logits_of(base, model))


def test_a_copy_of_the_base_that_was_trained_is_an_error(tmp_path: Path, error: Error) -> None:
    base = base_in(tmp_path / "base")
    adapter = adapter_on(base, tmp_path / "adapter", target_modules=["lm_head"])
    weights = load_file(adapter / FILE)
    weights["base_model.model.lm_head.base_layer.weight"][3, 3] += 0.5
    save_file(weights, adapter / FILE)
    text = error(adapter)
    assert "weights of the base that differ from the base" in text
    assert "lm_head.base_layer.weight" in text and "merge_and_unload" in text


def test_second_copies_of_a_module_that_was_trained_in_full_must_be_equal(
    tmp_path: Path, imported: Callable[..., dict[str, Any]], error: Error
) -> None:
    """What peft writes with save_embedding_layers, which it does itself for adapted embeddings."""
    base = base_in(tmp_path / "base")
    options: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    adapter = adapter_on(base, tmp_path / "adapter", **options)
    weights = load_file(adapter / FILE)
    name = "base_model.model.lm_head"
    head = weights[f"{name}.weight"]
    weights[f"{name}.modules_to_save.weight"] = head.clone()
    weights[f"{name}.original_module.weight"] = head + 1
    save_file(weights, adapter / FILE)
    report = imported(adapter)
    stored = load_file(Path(report["checkpoint"]) / "model" / FILE)
    assert torch.equal(stored[f"{name}.weight"], head)
    for changed in (head + 1, None):
        weights.pop(f"{name}.weight")
        if changed is not None:
            weights[f"{name}.weight"] = changed
        save_file(weights, adapter / FILE)
        text = error(adapter)
        assert "differs from its second copy" in text and f"{name}.modules_to_save" in text


def test_embeddings_of_the_base_in_the_file_are_an_error(tmp_path: Path, error: Error) -> None:
    base = base_in(tmp_path / "base")
    adapter = adapter_on(base, tmp_path / "adapter", target_modules=["q_proj"])
    weights = load_file(adapter / FILE)
    # What save_pretrained(save_embedding_layers=True) adds.
    weights["base_model.model.lm_head.weight"] = load_file(base / "model.safetensors")[
        "lm_head.weight"
    ]
    save_file(weights, adapter / FILE)
    text = error(adapter)
    assert "lm_head.weight: in the file [24, 8], in the model no such tensor" in text
    assert "save_embedding_layers=False" in text


def test_a_resized_layer_without_the_embedding_is_an_error(tmp_path: Path, error: Error) -> None:
    base = base_in(tmp_path / "base")
    adapter = adapter_on(base, tmp_path / "adapter", target_modules=["lm_head"])
    weights = load_file(adapter / FILE)
    name = "base_model.model.lm_head.base_layer.weight"
    resized = torch.cat([weights[name], weights[name][:1]])
    save_file({**weights, name: resized}, adapter / FILE)
    text = error(adapter)
    assert "the vocabulary was resized" in text and "merge_and_unload" in text
    assert "model.embed_tokens: not there, lm_head: 25" in text


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
    ],
)
def test_adapters_on_a_resized_vocabulary_are_imported(
    tmp_path: Path,
    imported: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tied: bool,
    options: dict[str, Any],
) -> None:
    base = base_in(tmp_path / "base", tied=tied)
    load = AutoModelForCausalLM.from_pretrained

    def resized(*arguments: Any, **others: Any) -> Any:
        model = load(*arguments, **others)
        model.resize_token_embeddings(27, mean_resizing=False)
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", resized)
    adapter = adapter_on(base, tmp_path / "adapter", **options)
    report = imported(adapter)
    assert report["vocab_size"] == 27
    model = Path(report["checkpoint"]) / "model"
    assert not any("original_module" in name for name in load_file(model / FILE))
    assert torch.equal(logits_of(base, adapter), logits_of(base, model))


@pytest.mark.parametrize("patterns", [{"q_proj": 4, "layers.1.self_attn.v_proj": 1}])
def test_ranks_and_alphas_of_single_layers_are_imported(
    tmp_path: Path, imported: Callable[..., dict[str, Any]], patterns: dict[str, int]
) -> None:
    base = base_in(tmp_path / "base")
    alphas = {pattern: 7 * number for pattern, number in patterns.items()}
    adapter = adapter_on(
        base,
        tmp_path / "adapter",
        target_modules=["q_proj", "v_proj"],
        rank_pattern=patterns,
        alpha_pattern=alphas,
        use_rslora=True,
    )
    report = imported(adapter)
    model = Path(report["checkpoint"]) / "model"
    assert torch.equal(logits_of(base, adapter), logits_of(base, model))
    config = json.loads((model / "adapter_config.json").read_text())
    assert config["rank_pattern"] == patterns
    assert report["peft"]["rank_pattern"] == patterns


def test_an_expression_that_can_take_forever_is_an_error(tmp_path: Path, error: Error) -> None:
    base = base_in(tmp_path / "base")
    adapter = adapter_on(base, tmp_path / "adapter", target_modules=["q_proj"])
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())

    def message(**changed: Any) -> str:
        path.write_text(json.dumps({**config, **changed}))
        return error(adapter)

    text = message(alpha_pattern={"(.*.*.*)+x": 4})
    assert "alpha_pattern: '(.*.*.*)+x is no name of a layer" in text
    assert "rank_pattern: True" in message(rank_pattern={"q_proj": True})
    assert "lora_alpha: 2.5" in message(lora_alpha=2.5)
    assert "rank_pattern: ['q_proj']" in message(rank_pattern=["q_proj"])
    # 4.0 is read as 4.
    text = message(lora_alpha=4.0, alpha_pattern={"q_proj": 8.0}, rank_pattern={"q_proj": 4})
    assert "lora_A.weight: in the file [2, 8], in the model [4, 8]" in text


def test_adapters_on_fused_experts_are_imported(
    tmp_path: Path, imported: Callable[..., dict[str, Any]]
) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        **model_sizes(vocab=24, hidden=8, layers=1, heads=2, kv_heads=1),
        moe_intermediate_size=4,
        head_dim=4,
        num_experts=3,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    parameters = ["mlp.experts.gate_up_proj", "down_proj"]
    adapter = adapter_on(
        base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=parameters
    )
    report = imported(adapter)
    assert report["peft"]["target_modules"] == ["q_proj"]
    # peft writes them in any order.
    assert sorted(report["peft"]["target_parameters"]) == sorted(parameters)
    assert torch.equal(
        logits_of(base, adapter), logits_of(base, Path(report["checkpoint"]) / "model")
    )


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"init_lora_weights": "pissa"}, "merge it into its base with peft"),
        ({"trainable_token_indices": [1]}, "merge it into its base with peft"),
        ({"peft_type": "PREFIX_TUNING"}, "continued with peft"),
        ({"target_parameters": ["gate.weight"]}, "merge it into its base with peft"),
    ],
)
def test_the_hint_for_another_kind_of_adapter_is_possible(
    tmp_path: Path, error: Error, changes: dict[str, Any], hint: str
) -> None:
    base = base_in(tmp_path / "base")
    adapter = adapter_on(base, tmp_path / "adapter", target_modules=["q_proj"])
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    text = error(adapter)
    assert hint in text
    assert str(next(iter(changes))) in text or "gate.weight" in text


def test_an_adapter_of_another_head_is_an_error_that_names_it(tmp_path: Path, error: Error) -> None:
    base = base_in(tmp_path / "base")
    adapter = adapter_on(
        base, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["lm_head"]
    )
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())
    weights = load_file(adapter / FILE)
    weights["base_model.model.score.weight"] = weights.pop("base_model.model.lm_head.weight")
    save_file(weights, adapter / FILE)
    path.write_text(json.dumps({**config, "task_type": "SEQ_CLS", "modules_to_save": ["score"]}))
    text = error(adapter)
    assert "another head" in text and "the base is a LlamaForCausalLM" in text and "SEQ_CLS" in text
    assert "recipe: sequence_classification" in text and "init_from.path" in text


@pytest.mark.parametrize("name", ["pytorch_model_fsdp.bin", "model.safetensors"])
def test_a_base_with_an_adapter_in_its_layers_is_an_error(
    tmp_path: Path, error: Error, name: str
) -> None:
    """As accelerate saves the state of a model of peft."""
    base = base_in(tmp_path / "base")
    saved = tmp_path / "saved"
    saved.mkdir()
    shutil.copy(base / "config.json", saved)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    state = {
        f"{layer}.base_layer.weight": torch.ones(8, 8),
        f"{layer}.lora_A.default.weight": torch.ones(2, 8),
        f"{layer}.lora_B.default.weight": torch.ones(8, 2),
    }
    if name.endswith(".bin"):
        torch.save(state, saved / name)
    else:
        save_file(state, saved / name, {"format": "pt"})
    assert "not merged" in error(saved)
