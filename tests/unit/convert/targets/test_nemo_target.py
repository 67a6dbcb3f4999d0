"""``ckpt export --to nemo`` writes archives that tarfile and torch read, as NeMo does; ``make interop`` runs NeMo."""

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from automodel_ckpt.cli import ckpt
from tests.support.external_tensors import values
from tests.support.models.llamas import llama_checkpoint

Capture = pytest.CaptureFixture[str]


def exported(directory: Path, *options: str) -> tuple[Any, Path]:
    model = llama_checkpoint(directory / "epoch_0_step_1")
    target = directory / "model.nemo"
    arguments = ["export", str(directory / "epoch_0_step_1"), "--to", "nemo", "-o", str(target)]
    assert ckpt.main([*arguments, *options]) == 0
    return model, target


def restored(path: Path, directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read an archive as NeMo does: extract all, read the config, load the weights."""
    with tarfile.open(path, "r:") as archive:
        archive.extractall(directory, filter="data")
    config = yaml.safe_load((directory / "model_config.yaml").read_text())
    state = torch.load(directory / "model_weights.ckpt", weights_only=True)
    return config, state


def test_the_state_dict_loads_strictly_and_the_artifacts_are_in_the_archive(tmp_path: Path) -> None:
    model, target = exported(tmp_path)
    config, state = restored(target, tmp_path / "out")
    for name, value in model.state_dict().items():
        assert torch.equal(state.pop(name), value), name
    assert not state
    assert "target" not in config
    name = config["hf_config"].removeprefix("nemo:")
    content = (tmp_path / "out" / name).read_bytes()
    assert json.loads(content)["model_type"] == "llama"
    assert name == f"{hashlib.sha256(content).hexdigest()[:32]}_config.json"
    tokenizer = config["tokenizer"]["tokenizer_json"].removeprefix("nemo:")
    assert json.loads((tmp_path / "out" / tokenizer).read_text())["model"]


def test_options_change_the_config_names_and_dtype(tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    given.write_text("width: 4\nrate: 1.0e-3\ntokenizer:\n  library: huggingface\n")
    options = ["--prefix", "llm.", "--cast-dtype", "bf16", "--target", "nemo.collections.X"]
    model, target = exported(tmp_path, *options, "--model-config", str(given))
    config, state = restored(target, tmp_path / "out")
    assert config["width"] == 4 and config["rate"] == 0.001
    assert config["target"] == "nemo.collections.X"
    assert config["tokenizer"]["library"] == "huggingface"
    assert config["tokenizer"]["tokenizer_json"].startswith("nemo:")
    expected = model.state_dict()["model.norm.weight"].bfloat16()
    assert torch.equal(state["llm.model.norm.weight"], expected)


def test_what_is_exported_is_read_here_and_packed_to_the_same_bytes(tmp_path: Path) -> None:
    model, target = exported(tmp_path)
    found = values(target)
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name
    again = tmp_path / "again.nemo"
    assert ckpt.main(["unpack", str(target), str(tmp_path / "files")]) == 0
    assert ckpt.main(["pack", str(tmp_path / "files"), str(again)]) == 0
    assert values(again).keys() == found.keys()


@pytest.mark.parametrize(
    ("text", "message"), [("- 1\n", "not a mapping"), ("a: &x 1\nb: *x\n", "reference")]
)
def test_a_config_that_cannot_be_used_is_an_error(
    text: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
    llama_checkpoint(tmp_path / "epoch_0_step_1")
    (tmp_path / "given.yaml").write_text(text)
    command = ["export", str(tmp_path / "epoch_0_step_1"), "--to", "nemo"]
    assert ckpt.main([*command, "--model-config", str(tmp_path / "given.yaml")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("tied", [True, False])
def test_megatrons_names_are_written_and_converted_back(tied: bool, tmp_path: Path) -> None:
    model = llama_checkpoint(tmp_path / "epoch_0_step_1", tied=tied)
    target = tmp_path / "model.nemo"
    command = ["export", str(tmp_path / "epoch_0_step_1"), "--to", "nemo", "--megatron-names"]
    assert ckpt.main([*command, "-o", str(target)]) == 0
    config, state = restored(target, tmp_path / "out")
    assert config["num_layers"] == 2 and config["activation"] == "fast-swiglu"
    assert config["share_embeddings_and_output_weights"] is tied
    assert ("model.output_layer.weight" in state) is not tied
    # Fused by query group: the queries of the first group, its key, its value.
    fused = state["model.decoder.layers.0.self_attention.linear_qkv.weight"]
    original = model.state_dict()
    query = original["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(fused[: config["kv_channels"]], query[: config["kv_channels"]])
    model.config.save_pretrained(tmp_path / "config")
    found = values(target, tmp_path / "config")
    for name, value in original.items():
        if name in found:
            assert torch.equal(found[name], value), name
    missing = original.keys() - found.keys()
    assert missing == ({"lm_head.weight"} if tied else set())
