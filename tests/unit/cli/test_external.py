"""`ckpt ls` and `show` understand what other programs wrote, and mark it as unchecked."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from automodel_ckpt.cli.ckpt import main
from tests.support.models.shards import checkpoint_in

Capture = pytest.CaptureFixture[str]
AUTOMODEL = Path(__file__).parents[2] / "fixtures" / "automodel"


def shown(capsys: Capture, *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_ls_lists_a_run_of_automodel(tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(AUTOMODEL / "safetensors", tmp_path / "run")
    checkpoint_in(tmp_path / "run", 20)
    rows = {row["name"]: row for row in shown(capsys, "ls", str(tmp_path / "run"))}
    foreign, ours = rows["epoch_0_step_1"], rows["epoch_0_step_20"]
    assert (
        foreign["foreign"] and not foreign["complete"] and ours["complete"] and not ours["foreign"]
    )
    assert foreign["step"] == 1 and foreign["train_loss"] == 1.25 and foreign["nbytes"] > 40_000
    assert "model: safetensors shards, optim: PyTorch DCP" in foreign["reason"]
    assert main(["ls", str(tmp_path / "run")]) == 0
    assert "external, unverified" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("form", "kind"), [("safetensors", "safetensors shards"), ("torch_save", "PyTorch DCP")]
)
def test_show_gives_automodels_tensors(capsys: Capture, form: str, kind: str) -> None:
    path = AUTOMODEL / form / "epoch_0_step_1"
    document = shown(capsys, "show", str(path))
    model = document["trees"]["model"]
    assert document["foreign"] and model["format"] == kind and len(model["tensors"]) == 12
    assert model["tensors"]["lm_head.weight"] == {"dtype": "F32", "shape": [23, 8], "slices": 2}
    assert main(["show", str(path)]) == 0
    text = capsys.readouterr().out
    assert "MANIFEST.json" in text and "[23, 8]" in text and "\x1b" not in text


def test_an_optimizer_of_automodel_is_understood(capsys: Capture) -> None:
    document = shown(capsys, "show", str(AUTOMODEL / "safetensors" / "epoch_0_step_1"))
    optimizer = document["trees"]["optim"]
    momentum = "optim.state.model.embed_tokens.weight.momentum_buffer"
    assert optimizer["tensors"][momentum]["shape"] == [23, 8] and optimizer["values"] > 10


def hf_directory(path: Path) -> Path:
    path.mkdir()
    for name, tensors in {
        "a": {"w": torch.ones(2, 3)},
        "b": {"v": torch.zeros(4, dtype=torch.bfloat16)},
    }.items():
        save_file(tensors, path / f"{name}.safetensors", {"format": "pt"})
    weight_map = {"w": "a.safetensors", "v": "b.safetensors"}
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return path


def test_whole_files_adapters_and_our_exports_are_told_apart(
    tmp_path: Path, capsys: Capture
) -> None:
    hf_directory(tmp_path / "hf")
    (tmp_path / "adapter").mkdir()
    save_file({"lora_A": torch.ones(2, 2)}, tmp_path / "adapter" / "adapter_model.safetensors")
    exported = tmp_path / "export"
    checkpoint = checkpoint_in(tmp_path / "run", 20)
    assert main(["consolidate", str(checkpoint), "-o", str(exported)]) == 0
    capsys.readouterr()
    for path, kind, count in (
        (tmp_path / "hf", "Hugging Face files", 2),
        (tmp_path / "adapter", "PEFT adapter", 1),
        (exported, "Hugging Face files", 2),
    ):
        tree = shown(capsys, "show", str(path))["trees"]["."]
        assert tree["format"] == kind and len(tree["tensors"]) == count and not tree["problem"]
    rows = {row["name"]: row["reason"] for row in shown(capsys, "ls", str(tmp_path / "hf"))}
    assert rows == {"hf": "external, unverified: Hugging Face files"}


def test_what_is_damaged_is_shown_with_what_is_wrong(tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(AUTOMODEL / "safetensors" / "epoch_0_step_1", tmp_path / "c")
    (tmp_path / "c" / "optim" / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    next((tmp_path / "c" / "model").glob("shard-00001*")).write_bytes(b"x")
    assert main(["show", str(tmp_path / "c"), "--json"]) == 3
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert ".metadata cannot be read" in document["trees"]["optim"]["problem"]
    assert "safetensors file" in document["trees"]["model"]["problem"]
    assert captured.err.count("where:") == 2
    # The parts that can be read are shown, too.
    assert main(["show", str(tmp_path / "c")]) == 3
    assert "losses.json" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "export_manifest.json"])
def test_show_opens_nothing_that_a_link_has_outside(
    tmp_path: Path, capsys: Capture, name: str
) -> None:
    outside, directory = tmp_path / "outside", tmp_path / "model"
    outside.mkdir()
    directory.mkdir()
    save_file({"a": torch.zeros(2)}, directory / "model.safetensors")
    (directory / name).unlink(missing_ok=True)
    # Opening it would wait for a writer.
    os.mkfifo(outside / "pipe")
    (directory / name).symlink_to(outside / "pipe")
    assert main(["show", "--stats", str(directory)]) == 3
    printed = capsys.readouterr()
    assert "a symbolic link points outside of the directory" in printed.out + printed.err
