"""Error messages that no other test meets: each is met here, with where, the value and what to do."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from automodel_ckpt.checkpoint.export_source import open_source
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.cli.ckpt import main as ckpt
from automodel_ckpt.cli.train import main as train
from automodel_ckpt.data import digits, images, python_docs
from automodel_ckpt.data.sampler import accumulation_steps
from automodel_ckpt.distributed.tensor_parallel import _tie
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable, SaveFailed
from automodel_ckpt.models.build import checkpoint_activations
from automodel_ckpt.training.metrics import JsonlLog
from automodel_ckpt.training.tracking import require_trackers
from tests.support import tiny
from tests.support.shards import checkpoint_in

Patch = pytest.MonkeyPatch


class Cut(torch.nn.Parameter):
    placements = ("another",)


def tied_apart() -> object:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].weight = Cut(torch.ones(2, 2))
    return _tie(model, "1.weight", "0.weight")


@pytest.mark.parametrize(
    ("provoke", "said"),
    [
        (lambda: accumulation_steps(6, 4, 1), "equal micro-batches"),
        (lambda: accumulation_steps(0, 1, 1), "at least 1"),
        (lambda: require_trackers(["tensorboard"], has_logs=False), "writes none"),
        (lambda: checkpoint_activations(torch.nn.Linear(1, 1)), "recompute its activations"),
        (tied_apart, "differently that are tied"),
    ],
)  # fmt: skip
def test_an_argument_that_cannot_be_followed(provoke: Callable[[], object], said: str) -> None:
    refused(provoke, said)


def refused(provoke: Callable[[], object], said: str) -> None:
    with pytest.raises(AutomodelError, match=said) as caught:
        provoke()
    (problem,) = caught.value.problems
    assert problem.where and problem.value and problem.remedy


@pytest.mark.parametrize(
    ("missing", "provoke", "said"),
    [("PIL", images.pillow, "Pillow"), ("sklearn.datasets", lambda: digits._load("train"), "scikit-learn")],
)
def test_a_library_that_is_not_installed(
    monkeypatch: Patch, missing: str, provoke: Callable[[], object], said: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    refused(provoke, said)


def test_a_python_without_its_documentation(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(python_docs, "_library_directory", lambda: tmp_path)
    refused(python_docs._topics_digest, "without its documentation")


def test_a_recipe_is_not_copied_over_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "llm_finetune/tiny_llama_lora"
    assert train(["--copy", name, str(tmp_path)]) == 0
    assert train(["--copy", name, str(tmp_path)]) == 2
    assert "the recipe cannot be copied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [(["pin"], "not a checkpoint of a run"), (["prune", "--keep-last", "1"], "no checkpoints here")],
)
def test_a_directory_without_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert ckpt([*words, str(tmp_path)]) == 3
    assert said in capsys.readouterr().err


def test_an_adapter_has_nothing_to_consolidate(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path, 20)
    (checkpoint / "model" / "adapter_config.json").write_text("{}")
    manifest = Manifest.read(checkpoint)
    manifest.files["model/adapter_config.json"] = next(iter(manifest.files.values()))  # type: ignore[index]
    (checkpoint / "MANIFEST.json").write_bytes(manifest.to_bytes())
    with pytest.raises(CheckpointUnusable, match="needs no consolidation"):
        open_source(checkpoint)


def test_ranks_that_did_not_write_a_whole_checkpoint(tmp_path: Path, monkeypatch: Patch) -> None:
    recipe = tiny.recipe()
    tiny.train(recipe)
    monkeypatch.setattr(Manifest, "fault", lambda _: "made up")
    with pytest.raises(SaveFailed, match="did not write a whole checkpoint"):
        tiny.save(tmp_path, recipe)


def test_a_log_line_that_cannot_be_written_now_is_a_warning(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    log = JsonlLog(tmp_path / "training.jsonl")

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(log.path))

    monkeypatch.setattr(log, "_write", full)
    monkeypatch.setattr(logging.getLogger("automodel_ckpt"), "propagate", True)
    log.append({"step": 1})
    assert "cannot be written now" in caplog.text and "ENOSPC" in caplog.text
