"""The tensors of an import have the names of the model in config.json, or the import is an error."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from automodel_ckpt.cli.ckpt import main
from tests.support.models.sizes import model_sizes

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        **model_sizes(vocab=16, hidden=8, inner=8, layers=2, heads=2), tie_word_embeddings=True
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def state_of(directory: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = LlamaForCausalLM.from_pretrained(directory).state_dict()
    return state


def imported(source: Path, config: Path, run: Path, *more: str) -> int:
    return main(["import", str(source), str(run), "--config", str(config), *more])


def test_names_that_the_model_does_not_have_are_an_error(
    llama: Path, tmp_path: Path, capsys: Capture
) -> None:
    state = {name.replace(".mlp.", ".ffn."): value for name, value in state_of(llama).items()}
    torch.save(state, tmp_path / "model.pt")
    assert imported(tmp_path / "model.pt", llama, tmp_path / "run") == 3
    assert not (tmp_path / "run").exists()
    text = capsys.readouterr().err
    assert "6 tensors that a LlamaForCausalLM does not have: model.layers.0.ffn." in text
    assert "6 tensors of a LlamaForCausalLM not found: model.layers.0.mlp.down_proj.weight" in text
    assert "`model.layers.0.ffn.gate_proj.weight: model.layers.0.mlp.gate_proj.weight`" in text
    names = tmp_path / "names.yaml"
    lines = [
        f"model.layers.{{i}}.ffn.{name}_proj.weight: model.layers.{{i}}.mlp.{name}_proj.weight"
        for name in ("up", "down", "gate")
    ]
    names.write_text("\n".join(lines))
    assert imported(tmp_path / "model.pt", llama, tmp_path / "run", "--names", str(names)) == 0


@pytest.mark.parametrize("prefix", ["net.", "model.", "base_model.model."])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_prefix_is_an_error_that_names_a_line_for_the_file_of_names(
    llama: Path, tmp_path: Path, capsys: Capture, prefix: str, is_tied: bool
) -> None:
    """accelerate's ``save_model`` writes the names of the module that a script trained."""
    shutil.copy(llama / "config.json", tmp_path)
    state = state_of(llama)
    if is_tied:
        # All names then begin with the prefix and the name of the backbone.
        del state["lm_head.weight"]
    prefixed = {f"{prefix}{name}": value.clone() for name, value in state.items()}
    save_file(prefixed, tmp_path / "model.safetensors")
    assert main(["import", str(tmp_path), str(tmp_path / "run")]) == 3
    text = capsys.readouterr().err
    assert f"`{prefix}" in text and "--names" in text


def with_config(source: Path, directory: Path, **changes: Any) -> Path:
    """A *directory* with the config.json of *source* and *changes*."""
    directory.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": 16}, "model.embed_tokens.weight: [16, 8], by config.json [16, 16]"),
        ({"intermediate_size": 32}, "mlp.up_proj.weight: [8, 8], by config.json [32, 8]"),
        ({"num_key_value_heads": 1}, "self_attn.k_proj.weight: [8, 8], by config.json [4, 8]"),
        ({"vocab_size": 17}, "model.embed_tokens.weight: [16, 8], by config.json [17, 8]"),
    ],
    ids=str,
)
def test_tensors_of_another_size_are_an_error(
    llama: Path, tmp_path: Path, capsys: Capture, changes: dict[str, Any], expected: str
) -> None:
    directory = tmp_path / "source"
    directory.mkdir()
    source = directory / "model.pt"
    torch.save(state_of(llama), source)
    with_config(llama, directory, **changes)
    assert main(["import", str(source), str(tmp_path / "run")]) == 3
    text = capsys.readouterr().err
    assert "do not have the shapes of the LlamaForCausalLM" in text and expected in text
    assert "--config" in text and not (tmp_path / "run").exists()
    assert imported(source, llama, tmp_path / "run") == 0


@pytest.mark.parametrize(
    ("name", "changed", "config"),
    [
        ("model.embed_tokens.weight", torch.zeros(64, 8), {}),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(4, 8, dtype=torch.uint8), {}),
        # bitsandbytes with bnb_4bit_quant_storage.
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(16, 1), {"quantization_config": {}}),
    ],
    ids=["padded vocabulary", "packed integers", "quantized"],
)
def test_shapes_that_a_model_can_be_stored_in_are_no_error(
    llama: Path,
    tmp_path: Path,
    capsys: Capture,
    name: str,
    changed: torch.Tensor,
    config: dict[str, Any],
) -> None:
    torch.save({**state_of(llama), name: changed}, tmp_path / "model.pt")
    with_config(llama, tmp_path, **config)
    assert main(["import", str(tmp_path / "model.pt"), str(tmp_path / "run")]) == 0


def test_names_without_a_config_are_reported_as_unchecked(tmp_path: Path, capsys: Capture) -> None:
    torch.save({"a.b": torch.ones(1), "c": torch.ones(1)}, tmp_path / "model.pt")
    assert main(["import", str(tmp_path / "model.pt"), str(tmp_path / "run"), "--dry-run"]) == 0
    assert "unchecked, because there is no config.json; the first is a.b" in capsys.readouterr().out


def test_names_of_the_first_versions_of_bert_are_known(tmp_path: Path, capsys: Capture) -> None:
    config = BertConfig(**model_sizes(vocab=16, hidden=8, inner=8, layers=1, heads=2))
    model = BertForMaskedLM(config)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma"): each for name, each in state.items()
    }
    assert old.keys() != state.keys()
    for number, stored in enumerate((state, old)):
        torch.save(stored, tmp_path / f"{number}.pt")
        assert imported(tmp_path / f"{number}.pt", tmp_path, tmp_path / f"run{number}") == 0
        output = capsys.readouterr().out
        assert not any(
            each in output for each in ("does not have", "not found", "unchecked, because")
        )
