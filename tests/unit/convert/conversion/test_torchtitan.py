"""Checkpoints that torchtitan wrote: converted to a Hugging Face Llama, and back."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from automodel_ckpt.cli import ckpt
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.external_tensors import described, values
from tests.support.models.llamas import llama_checkpoint

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures" / "torchtitan"
CONFIG = FIXTURES / "config"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("torchtitan")
    with tarfile.open(FIXTURES / "checkpoint.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "step-3"


def recorded(name: str) -> Any:
    return json.loads((FIXTURES / name).read_text())


def test_a_converted_model_has_the_logits_of_torchtitans(checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert ckpt.main(["import", str(checkpoint), str(run), "--config", str(CONFIG)]) == 0
    model = AutoModelForCausalLM.from_pretrained(run / "epoch_0_step_3" / "model")
    expected = recorded("logits.json")
    with torch.no_grad():
        found = model.eval()(torch.tensor([expected["ids"]])).logits[0]
    torch.testing.assert_close(found, torch.tensor(expected["logits"]), rtol=0, atol=2e-5)


def test_only_weights_are_imported_and_one_line_says_so(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["import", str(checkpoint), str(tmp_path / "run"), "--config", str(CONFIG)]
    assert ckpt.main([*command, "--dry-run"]) == 0
    assert "not imported: the names in the optimizer are torchtitan's" in capsys.readouterr().out
    assert ckpt.main([*command, "--training-state"]) == 3
    assert "the names in the optimizer are torchtitan's" in capsys.readouterr().err
    assert "layers.1.attention.qkv_linear.wq.weight" in described(checkpoint).tensors


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_names_of_older_versions_are_converted(
    checkpoint: Path, tmp_path: Path, model_type: str
) -> None:
    """Mistral's consolidated.safetensors has the names of Meta's files, too."""
    older = {"freqs_cis": torch.zeros(2, 4)}
    for name, tensor in values(checkpoint).items():
        old = "output.weight" if name == "lm_head.weight" else name.replace("qkv_linear.", "")
        older[old] = tensor
    save_file(older, tmp_path / "model.safetensors")
    expected = values(checkpoint, CONFIG)
    config = json.loads((CONFIG / "config.json").read_text()) | {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = values(tmp_path / "model.safetensors", tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_in_torchtitans_names_is_converted_back(tied: bool, tmp_path: Path) -> None:
    model = llama_checkpoint(tmp_path / "c", tied=tied)
    exported = tmp_path / "c-dcp"
    assert ckpt.main(["export", str(tmp_path / "c"), "--to", "dcp", "--names", "torchtitan"]) == 0
    names = described(exported).tensors.keys()
    assert {"lm_head.weight", "layers.0.attention.qkv_linear.wk.weight"} <= names
    config = tmp_path / "config"
    model.config.save_pretrained(config)
    back = values(exported, config)
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_attention_heads", 3, "does not have the rows|is missing or invalid"),
        ("head_dim", 7, "does not have the rows"),
        ("num_hidden_layers", 3, "a tensor of the model is missing"),
        ("num_hidden_layers", 1, "no rule for"),
        ("model_type", "qwen3", "another model_type"),
    ],
)
def test_a_config_of_another_model_is_an_error(
    key: str, value: Any, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    content = json.loads((CONFIG / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointUnusable, match=message):
        values(checkpoint, tmp_path)
