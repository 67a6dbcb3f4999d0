"""Checkpoints of PyTorch Lightning, and training states of plain scripts, are read without running their code.

The files in tests/fixtures/lightning and tests/fixtures/torch_states were written by the real programs (make.py there).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.cli.ckpt import main
from tests.support.external_tensors import moments, training_state_of, values

FIXTURES = Path(__file__).parents[3] / "fixtures"
LIGHTNING = FIXTURES / "lightning"
LIGHTNING_FILE = LIGHTNING / "epoch=0-step=5.ckpt"
DISTRIBUTED = LIGHTNING / "distributed"
STATES = FIXTURES / "torch_states"
(STATE_FILE,) = STATES.glob("checkpoint_*.pt")
Capture = pytest.CaptureFixture[str]


def model_of(directory: Path) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))


def load(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = torch.load(path, weights_only=True)
    return value


def assert_moments(state: Any, expected: dict[str, dict[str, Any]]) -> None:
    """Compare the moments and steps with those that torch reads, bit by bit."""
    optimizer = state.optimizer
    assert optimizer is not None
    assert optimizer.tensors.keys() == expected.keys()
    found = moments(optimizer)
    assert len(found) == 2 * len(expected)
    for name, entry in expected.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"{name}:{key}"], entry[key]), (name, key)
        assert optimizer.values[name] == {"step": entry["step"].item()}


def test_the_model_of_a_lightning_file_has_the_names_of_the_model(capsys: Capture) -> None:
    stored = load(LIGHTNING_FILE)["state_dict"]
    found = values(LIGHTNING_FILE)
    assert set(found) == set(model_of(LIGHTNING).state_dict())
    for name, value in found.items():
        assert torch.equal(value, stored[f"model.{name}"]), name
    assert main(["show", str(LIGHTNING_FILE)]) == 0
    assert "PyTorch Lightning checkpoint" in capsys.readouterr().out


def test_the_training_state_of_a_lightning_file_is_that_of_the_trainer() -> None:
    saved = load(LIGHTNING_FILE)
    state = training_state_of(LIGHTNING_FILE, model_of(LIGHTNING))
    # Saved after the last batch of the first epoch: one epoch is finished, although the file says `epoch: 0`.
    assert (saved["epoch"], saved["global_step"]) == (0, 5)
    assert (state.step, state.epoch, state.consumed_samples) == (5, 1, None)
    assert state.scheduler is not None
    assert state.scheduler["last_epoch"] == 5
    assert set(state.omitted) == {"loops", "callbacks"}
    (optimizer,) = saved["optimizer_states"]
    names = [name for name, _ in model_of(LIGHTNING).named_parameters()]
    assert_moments(state, {name: optimizer["state"][n] for n, name in enumerate(names)})
    assert state.optimizer is not None
    (group,) = state.optimizer.groups
    assert group.parameters == tuple(names)
    assert group.options["lr"] == optimizer["param_groups"][0]["lr"]


def test_the_model_of_a_distributed_directory_has_the_names_of_the_model(
    tmp_path: Path, capsys: Capture
) -> None:
    dcp_to_torch_save(DISTRIBUTED, tmp_path / "all.pt")
    stored = torch.load(tmp_path / "all.pt", weights_only=False)["state_dict"]
    found = values(DISTRIBUTED)
    assert set(found) == set(model_of(LIGHTNING).state_dict())
    for name, value in found.items():
        assert torch.equal(value, stored[f"model.{name}"]), name
    assert main(["ls", str(DISTRIBUTED)]) == 0
    assert "PyTorch Lightning distributed checkpoint" in capsys.readouterr().out


def changed(path: Path, change: Any) -> Path:
    """Save the Lightning file again with torch, after *change* was called with its content."""
    saved = load(LIGHTNING_FILE)
    change(saved)
    torch.save(saved, path)
    return path


def test_several_optimizers_are_named_and_not_transferred(tmp_path: Path) -> None:
    def twice(saved: dict[str, Any]) -> None:
        saved["optimizer_states"] *= 2
        saved["lr_schedulers"] *= 2

    state = training_state_of(changed(tmp_path / "x.ckpt", twice), model_of(LIGHTNING))
    assert state.optimizer is None
    assert state.scheduler is None
    assert any("optimizer_states (2 of them" in text for text in state.omitted)
    assert any("lr_schedulers (2 of them" in text for text in state.omitted)


@pytest.mark.parametrize("path", [LIGHTNING_FILE, DISTRIBUTED, STATE_FILE])
def test_weights_are_imported_and_what_is_not_is_counted(
    tmp_path: Path, capsys: Capture, path: Path
) -> None:
    assert main(["import", str(path), str(tmp_path / "run"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_tensors"] == len(values(path))
    assert report["left_out"]
    assert main(["diff", str(path), str(tmp_path / "run")]) == 0


def test_a_directory_of_named_checkpoints_is_listed_and_ranked(
    tmp_path: Path, capsys: Capture
) -> None:
    stem = "megatron_gpt--val_loss={}-step={}-consumed_samples={}"
    names = {
        stem.format("0.432", 1000, "32000.0") + ".ckpt": LIGHTNING_FILE,
        stem.format("0.40", 2000, "64000.0") + ".ckpt": DISTRIBUTED,
        stem.format("0.45", 3000, "96000.0") + "-last.ckpt": LIGHTNING_FILE,
        "last.ckpt": LIGHTNING_FILE,
    }
    for name, source in names.items():
        (tmp_path / name).symlink_to(source)
    assert main(["ls", str(tmp_path), "--json"]) == 3  # links are not followed
    capsys.readouterr()
    for name, source in names.items():
        (tmp_path / name).unlink()
        if source.is_dir():
            shutil.copytree(source, tmp_path / name)
        else:
            shutil.copy(source, tmp_path / name)
    (tmp_path / "notes step=1.txt").write_text("no checkpoint")
    assert main(["ls", str(tmp_path), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(names)
    # The step in a file counts more than that in its name, as in an import.
    first, second, third, last = (rows[name] for name in names)
    assert (first["step"], first["consumed_samples"], first["val_loss"]) == (5, 32000, 0.432)
    assert second["pointers"] == ["lowest val_loss"]
    assert third["pointers"] == last["pointers"] == ["last"]
    # Its name does not state them.
    assert (last["step"], last["epoch"]) == (5, 0)
    assert "2 of 3" in first["reason"]
    assert main(["ls", str(tmp_path)]) == 0
    assert "lowest val_loss" in capsys.readouterr().out


def test_the_training_state_of_a_distributed_directory_is_that_of_the_trainer(
    tmp_path: Path,
) -> None:
    dcp_to_torch_save(DISTRIBUTED, tmp_path / "all.pt")
    saved = torch.load(tmp_path / "all.pt", weights_only=False)["optimizer_0"]
    state = training_state_of(DISTRIBUTED)
    assert (state.step, state.epoch, state.consumed_samples) == (5, 1, None)
    assert set(state.omitted) == {"loops", "callbacks"}
    assert state.scheduler is not None
    assert state.scheduler["last_epoch"] == 5
    assert state.optimizer is not None
    (group,) = state.optimizer.groups
    (saved_group,) = saved["param_groups"]
    assert group.parameters == tuple(name.removeprefix("model.") for name in saved_group["params"])
    assert group.options["lr"] == saved_group["lr"]
    expected = {name.removeprefix("model."): entry for name, entry in saved["state"].items()}
    assert_moments(state, expected)


def test_the_position_is_that_of_the_files_or_of_their_name(
    tmp_path: Path, capsys: Capture
) -> None:
    def position(path: Path, *options: str) -> list[Any]:
        command = ["import", str(path), str(tmp_path / "run"), "--dry-run", "--json", *options]
        assert main(command) == 0
        report = json.loads(capsys.readouterr().out)
        return [report["step"], report["epoch"], report["position_from"]]

    assert position(LIGHTNING_FILE) == [5, 0, "stated in the files"]
    assert position(STATE_FILE) == [5, 0, "stated in the name"]
    assert position(DISTRIBUTED) == [5, 0, "stated in the files"]
    assert position(DISTRIBUTED, "--step", "9") == [9, 0, "as given"]
    weights = {"state_dict": load(STATE_FILE)["model_state_dict"]}
    torch.save(weights, tmp_path / "net--val_loss=0.4-step=70-consumed_samples=280.0.ckpt")
    assert position(next(tmp_path.glob("net*"))) == [70, 0, "stated in the name"]
    torch.save(weights, tmp_path / "weights.pt")
    assert position(tmp_path / "weights.pt") == [0, 0, ""]


def test_consumed_samples_in_the_name_belong_to_the_training_state(
    tmp_path: Path, capsys: Capture
) -> None:
    name = "net--val_loss=0.4-step=5-consumed_samples=20.0.ckpt"
    shutil.copy(LIGHTNING_FILE, tmp_path / name)
    options = ["--training-state", "--config", str(LIGHTNING)]
    assert main(["import", str(tmp_path / name), str(tmp_path / "run"), *options]) == 0
    assert "20 consumed samples" in capsys.readouterr().out
