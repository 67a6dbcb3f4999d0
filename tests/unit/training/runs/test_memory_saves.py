"""When the state is copied to memory, and what a failure of that changes."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.files.layout import DataParallelRanks
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.failures import REPAIR, RESUME
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig, MemoryConfig
from automodel_ckpt.errors import LeaseLost, SaveFailed
from automodel_ckpt.training.resume import COMMIT, REVISION, recorded_commits
from automodel_ckpt.training.saves.memory_saves import MemorySaves
from tests.support.models import tiny


class Run:
    """Saves a module to memory after steps that do nothing."""

    def __init__(self, base: Path, every_steps: Any) -> None:
        (base / "tmpfs").mkdir(exist_ok=True)
        section = MemoryConfig(every_steps=every_steps, directory=str(base / "tmpfs"))
        self.disk = tiny.checkpointer(base / "run")
        self.disk.open()
        self.saves = MemorySaves(
            section, CheckpointConfig(memory=section), self.disk, DataParallelRanks(), None, 60.0
        )
        self.saves.start(None, 0)
        self.saved: list[int] = []

    def step(self, step: int) -> None:
        def save(checkpointer: Checkpointer) -> None:
            checkpointer.save({"model": nn.Linear(2, 2)}, step=step, epoch=0)
            self.saved.append(step)

        scheduler: Any = SimpleNamespace(step=step)
        if self.saves.is_due(scheduler):
            self.saves.save(step, save)

    @property
    def in_memory(self) -> list[int]:
        self.saves.wait()
        return [name.step for name in checkpoint_names(self.saves.directory)]

    def close(self) -> None:
        self.saves.close()
        self.disk.close()


@pytest.fixture
def every_third(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, every_steps=3)
    yield run
    run.close()


def test_the_first_save_after_going_back_renames_the_abandoned_checkpoints(
    every_third: Run,
) -> None:
    model = {"model": nn.Linear(2, 2)}
    for step in (1, 5):
        every_third.disk.save(model, step=step, epoch=0)
    resumed = every_third.disk.roll_back(model, 2)
    assert resumed is not None
    every_third.saves.start(resumed, 1)
    root = every_third.disk.directory
    assert (root / "epoch_0_step_5").is_dir()
    every_third.step(4)
    assert (root / "epoch_0_step_5.superseded-1").is_dir()
    assert [name.step for name in checkpoint_names(root)] == [1]
    assert commit.pointed(root, "LATEST") == "epoch_0_step_1"


def test_a_start_keeps_the_memory_checkpoint_that_it_resumed_and_no_other(
    every_third: Run,
) -> None:
    every_third.step(3)
    assert every_third.in_memory == [3]
    resumed = every_third.disk.load({"model": nn.Linear(2, 2)})
    assert resumed is not None and resumed.in_memory
    every_third.saves.start(resumed, 3)
    assert every_third.in_memory == [3]
    every_third.saves.start(None, 0)
    assert every_third.in_memory == []


@pytest.mark.parametrize("kind", [SaveFailed, LeaseLost])
def test_a_run_goes_back_after_saves_to_memory_have_ended(
    every_third: Run, kind: type[SaveFailed] | type[LeaseLost]
) -> None:
    saves, disk = every_third.saves, every_third.disk
    model = {"model": nn.Linear(2, 2)}
    disk.save(model, step=1, epoch=0)
    every_third.step(3)
    assert every_third.in_memory == [3]

    def fail(checkpointer: Checkpointer) -> None:
        raise kind("it failed", where="memory", value="", hint="")

    for step in (6, 9, 12):
        if saves.checkpointer is not None:
            saves.save(step, fail)
    assert saves.checkpointer is None
    # After a lost lease, the directory is that of another run.
    assert saves.directory.is_dir() == (kind is LeaseLost)
    saves.finish_save()
    saves.find()
    resumed = disk.roll_back(model, 5)
    assert resumed is not None and not resumed.in_memory
    saves.start(resumed, 1)
    saves.remove()
    assert saves.directory.is_dir() == (kind is LeaseLost)


def test_the_commit_of_the_base_is_that_of_the_newest_checkpoint(every_third: Run) -> None:
    model = {"model": nn.Linear(2, 2)}
    disk, memory = every_third.disk, every_third.saves.checkpointer
    assert memory is not None
    for checkpointer, step, commit_of_base in ((disk, 1, "a" * 40), (memory, 2, "b" * 40)):
        checkpointer.notes[COMMIT], checkpointer.notes[REVISION] = (
            f"org/base@{commit_of_base}",
            "main",
        )
        checkpointer.save(model, step=step, epoch=0)
        checkpointer.wait_for_save()
        assert recorded_commits(disk.transfers.expected()) == {"org/base@main": commit_of_base}


def test_after_a_failure_a_later_step_is_saved_and_after_three_in_a_row_none(
    every_third: Run, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = iter([False, True, True, False, False, True, True, False, False, False])

    def save(checkpointer: Checkpointer) -> None:
        if not next(outcomes):
            raise SaveFailed(
                "a writer was killed", where="memory", value="", hint=REPAIR, restart=RESUME
            )

    for step in range(3, 30, 3):
        every_third.saves.save(step, save)
        assert every_third.saves.checkpointer is not None
    every_third.saves.save(30, save)
    assert every_third.saves.checkpointer is None
    assert caplog.text.count("a checkpoint in memory failed: a writer was killed") == 5
    assert caplog.text.count("hint:   free disk space or repair the directory\n") == 6
    # The run continues without a new start.
    assert "run the same command" not in caplog.text
