"""A run that has nothing left to do is reported before torch is imported; in any doubt, the run is built."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_ckpt.cli.checks.finished_run import finished_text
from automodel_ckpt.cli.train import main
from automodel_ckpt.config.load import LoadedRecipe, load_recipe
from automodel_ckpt.config.overrides import parse
from automodel_ckpt.parallel.ranks.stop import stop_request
from tests.support import ranks
from tests.support.runs.recipes import SMALLEST
from tests.support.runs.training import EXPORT, RECIPE, VALIDATION, train, write_recipe
from tests.support.runs.training_parts import SignalledInValidation

TEXT = "already complete at step 2: max_steps 2 ended the run"
NEWEST = "epoch_0_step_2"
GIVEN = ("--step_scheduler.max_steps=2", "--checkpoint.checkpoint_dir=run", EXPORT)


def load(recipe: Path, *overrides: str) -> LoadedRecipe:
    line = parse([*GIVEN, *overrides])
    return load_recipe(recipe, line.overrides)


def text_of(directory: Path, *overrides: str) -> str | None:
    """What the start of ``ckpt-train`` reports in *directory*; None if it builds the run."""
    flags = parse(["--nproc-per-node", "1"]).flags
    return finished_text(load(directory / "recipe.yaml", *overrides), flags)


def _with_stop(*arguments: Any, **options: Any) -> Any:
    stop_request().install()
    return train(*arguments, **options)


def run_in(directory: Path, *overrides: str) -> Path:
    recipe = write_recipe(directory, RECIPE + VALIDATION)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        ranks.run(partial(train, recipe, *GIVEN, *overrides), 1, init=False)
    return directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished run of two steps, with a validation and an export."""
    return run_in(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def copy(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run, in the working directory."""
    shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def test_a_dry_run_of_a_finished_run_needs_no_directory_that_can_be_written(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_only = SimpleNamespace(f_flag=os.ST_RDONLY, f_bavail=10**6, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    assert main(["recipe.yaml", "--dry-run", *GIVEN]) == 0
    assert f"  start:       {TEXT}\n" in capsys.readouterr().out
    # A start that would train has to write.
    assert main(["recipe.yaml", "--dry-run", *GIVEN, "--step_scheduler.max_steps=3"]) == 2
    assert "EROFS" in capsys.readouterr().err


def test_the_command_reports_a_finished_run_without_torch(copy: Path) -> None:
    code = "import sys; from automodel_ckpt.cli.train import main; "
    code += "code = main(sys.argv[1:]); print('torch' in sys.modules, code)"
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    ended = subprocess.run(
        [sys.executable, "-c", code, "recipe.yaml", *GIVEN],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "False 0\n"
    assert ended.stderr == f"{TEXT}\n"
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def _damage(run: Path) -> None:
    (shard,) = (run / NEWEST / "model").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def _with_newer(run: Path) -> None:
    (run / "epoch_0_step_3").mkdir()


def _with_torn_line(run: Path) -> None:
    with (run / "training.jsonl").open("a") as log:
        log.write('{"step": 3, "lo')


def _of_another_version(run: Path) -> None:
    note = json.loads((run / ".finished.json").read_text())
    (run / ".finished.json").write_text(json.dumps(note | {"version": "0"}))


DOUBTS: dict[str, Callable[[Path], object]] = {
    "the run removed its export": lambda run: shutil.rmtree(run / NEWEST / "model/consolidated"),
    "a byte of the newest checkpoint differs": _damage,
    "a file of the newest checkpoint is missing": lambda run: (run / NEWEST / "rng").rename("rng"),
    "a newer checkpoint is incomplete": _with_newer,
    "the manifest is missing": lambda run: (run / NEWEST / "MANIFEST.json").unlink(),
    "a pointer is missing": lambda run: (run / "LATEST").unlink(),
    "another process has the directory": lambda run: (run / ".run.lock").touch(),
    "a later start was killed": _with_torn_line,
    "another version wrote the note": _of_another_version,
    "the note is no JSON": lambda run: (run / ".finished.json").write_text("[" * 9000),
    "the note is a list": lambda run: (run / ".finished.json").write_text("[]"),
    "there is no note": lambda run: (run / ".finished.json").unlink(),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_it_is_not_reported_if(doubt: str, copy: Path) -> None:
    assert text_of(copy) == TEXT
    DOUBTS[doubt](copy / "run")
    assert text_of(copy) is None


@pytest.mark.parametrize(
    "override",
    [
        "--step_scheduler.max_steps=3",
        "--checkpoint.restore_from=LATEST",
        "--checkpoint.enabled=false",
        "--checkpoint.on_incompatible=sibling",
        "--checkpoint.average_last=2",
        "--checkpoint.export_best=true",
        "--checkpoint.checkpoint_dir=other",
        "--optimizer.lr=1",
    ],
)
def test_it_is_not_reported_with_another_recipe(override: str, copy: Path) -> None:
    assert text_of(copy, override) is None


def test_ranks_that_other_programs_start_build_the_run(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(copy / "recipe.yaml")
    nodes = ["--nnodes", "2", "--rdzv-endpoint", "localhost:1"]
    assert finished_text(loaded, parse(nodes).flags) is None
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert text_of(copy) is None


def test_a_run_without_its_last_validation_is_finished_only_after_it(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, RECIPE + VALIDATION)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        training = partial(_with_stop, recipe, *GIVEN, recipe_class=SignalledInValidation)
        ranks.outcomes(training, 1, init=False)
        assert (tmp_path / "run" / NEWEST).is_dir()
        assert text_of(tmp_path) is None
        run_in(tmp_path)
        assert text_of(tmp_path) == TEXT


def test_max_time_does_not_finish_a_run(tmp_path: Path) -> None:
    run_in(tmp_path, "--step_scheduler.max_time=0.001")
    assert not (tmp_path / "run/.finished.json").exists()


def test_the_code_of_another_recipe_may_do_more_than_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "automodel_ckpt.checkpoint.run.finished.reason_if_finished"
    monkeypatch.setattr(name, lambda *_: (2, "max_steps 2 ended the run"))
    (tmp_path / "recipe.yaml").write_text(SMALLEST)
    assert text_of(tmp_path) == TEXT
    assert text_of(tmp_path, "--recipe=mine.py:Mine") is None
