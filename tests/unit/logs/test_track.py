"""``ckpt track``: what TensorBoard finds of a run that was sent afterwards, and mistakes."""

import json
from pathlib import Path

import pytest

from automodel_ckpt.cli.ckpt import main
from tests.support.history import write_run


def scalars(run: Path) -> dict[tuple[int, str], float]:
    """What TensorBoard's own reader finds."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = loader.EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {(event.step, tag): event.value for tag in tags for event in accumulator.Scalars(tag)}


def test_a_run_is_sent_afterwards_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    run = write_run(tmp_path / "run", num_steps=3)
    with (run / "training.jsonl").open("a") as log:
        log.write('{"step": 9223372036854775808, "loss": 1.0}\n{"step": -1, "loss": 1.0}\n')
    assert main(["track", str(run), "--to", "tensorboard", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert (1, "train/loss") in scalars(run)
    assert main(["track", str(run), "--to", "tensorboard", "--option", "logdir=x"]) == 2
    message = capsys.readouterr().err
    assert "logdir" in message and "only the options log_dir" in message
    assert main(["track", str(run), "--to", "tensorboard", "--option", "nonsense"]) == 2
    assert "has the form KEY=VALUE" in capsys.readouterr().err


def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", num_steps=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["track", str(run), "--to", "wandb"]) == 2
    assert "pip install wandb" in capsys.readouterr().err
