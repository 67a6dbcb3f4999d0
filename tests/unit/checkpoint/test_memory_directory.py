"""The directory of a run's checkpoints in memory: whose it is, what is copied from it to disk, what is removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from torch import nn

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.run.lease import Lease
from automodel_ckpt.checkpoint.run.memory_directory import (
    copy_to_disk,
    forget_memory,
    memory_of,
    open_memory,
    remove_orphans,
)
from automodel_ckpt.checkpoint.verify import verify
from automodel_ckpt.errors import RecipeError
from tests.support import tiny


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    root.mkdir()
    return root


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    directory = tmp_path / "tmpfs"
    directory.mkdir()
    return directory


def save(directory: Path, *steps: int) -> None:
    checkpointer = tiny.checkpointer(directory)
    for step in steps:
        checkpointer.save({"model": nn.Linear(2, 2)}, step=step, epoch=0)
    checkpointer.close()


def test_a_run_finds_its_directory_again_and_another_run_of_the_same_path_does_not(
    run: Path, parent: Path
) -> None:
    assert memory_of(run, parent) is None
    directory = open_memory(run, parent)
    assert open_memory(run, parent) == directory == memory_of(run, parent)
    assert directory.stat().st_mode & 0o777 == 0o700
    save(directory, 3)
    (run / ".memory.json").unlink()
    # The next run of this path removes what nothing refers to any more.
    assert open_memory(run, parent) != directory and not directory.exists()


def test_directories_of_runs_that_exist_are_no_orphans(run: Path, parent: Path) -> None:
    directory = open_memory(run, parent)
    (parent / "something else").mkdir()
    remove_orphans(parent)
    assert directory.is_dir() and (parent / "something else").is_dir()


def test_memory_of_a_live_run_stays_where_its_directory_is_not_visible(
    run: Path, parent: Path
) -> None:
    directory = open_memory(run, parent)
    lease = Lease(directory)
    (run / ".memory.json").unlink()
    remove_orphans(parent)
    assert directory.is_dir()
    lease.release()
    remove_orphans(parent)
    assert not directory.exists()


def test_a_copied_run_and_a_start_elsewhere_or_without_memory_find_no_outdated_checkpoints(
    run: Path, parent: Path, tmp_path: Path
) -> None:
    directory = open_memory(run, parent)
    copied, moved = tmp_path / "copied", tmp_path / "moved"
    shutil.copytree(run, copied)
    assert memory_of(copied, parent) is None and open_memory(copied, parent) != directory
    run.rename(moved)
    assert open_memory(moved, parent) == directory
    # Another machine has a tmpfs without the directory.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    open_memory(moved, elsewhere)
    assert memory_of(moved, parent) is None
    forget_memory(moved)
    assert memory_of(moved, elsewhere) is None


def test_a_directory_that_someone_else_created_is_an_error(run: Path, parent: Path) -> None:
    directory = open_memory(run, parent)
    for name in os.listdir(directory):
        os.unlink(directory / name)
    directory.rmdir()
    directory.symlink_to(run)
    with pytest.raises(RecipeError, match="belongs to another user"):
        open_memory(run, parent)


def test_the_newest_of_both_is_tried_first_and_of_one_step_the_one_on_disk(
    run: Path, parent: Path
) -> None:
    directory = open_memory(run, parent)
    save(run, 2, 4)
    save(directory, 4, 5)
    found = resume.candidates(run, None, directory).candidates
    steps = [(path.parent == directory, path.name[-1]) for path in found]
    assert steps == [(True, "5"), (False, "4"), (True, "4"), (False, "2")]
    assert resume.candidates(run, "LATEST", directory).candidates == [run / "epoch_0_step_4"]


def test_a_copy_on_disk_is_a_checkpoint_and_is_made_only_of_a_newer_one(
    run: Path, parent: Path
) -> None:
    directory = open_memory(run, parent)
    save(run, 2)
    save(directory, 3)
    copy = copy_to_disk(directory, run)
    assert copy == run / "epoch_0_step_3" and verify(copy, Manifest.read(copy)) == []
    assert os.readlink(run / "LATEST") == copy.name
    assert copy_to_disk(directory, run) is None


def test_an_interrupted_copy_leaves_nothing(
    run: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = open_memory(run, parent)
    save(directory, 3)
    before = sorted(os.listdir(run))

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("automodel_ckpt.checkpoint.run.memory_directory.fsync_file", full)
    with pytest.raises(OSError, match="No space left"):
        copy_to_disk(directory, run)
    assert sorted(os.listdir(run)) == before
