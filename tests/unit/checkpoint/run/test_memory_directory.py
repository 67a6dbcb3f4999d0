"""The directory of a run's checkpoints in memory: whose it is, what is copied from it to disk, what is removed."""

import os
import shutil
from pathlib import Path

import pytest
from torch import nn

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.checkpoint.memory.directory import (
    GENERATION,
    MemoryRecord,
    memory_of,
    remove_orphans,
)
from automodel_ckpt.checkpoint.memory.nodes import open_memory
from automodel_ckpt.checkpoint.memory.rescue import copy_to_disk, keep_on_disk
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.run.lease import Lease
from automodel_ckpt.checkpoint.run.notes import forget_memory
from automodel_ckpt.errors import RecipeError
from tests.support.models import tiny


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


def save(directory: Path, *steps: int, generation: str = "") -> None:
    checkpointer = tiny.checkpointer(directory)
    checkpointer.notes[GENERATION] = generation
    for step in steps:
        checkpointer.save({"model": nn.Linear(2, 2)}, step=step, epoch=0)
    checkpointer.close()


def test_a_run_finds_its_directory_again_and_another_run_of_the_same_path_does_not(
    run: Path, parent: Path
) -> None:
    assert memory_of(run, parent) is None
    directory = open_memory(run, parent).directory
    assert open_memory(run, parent).directory == directory == memory_of(run, parent)
    assert directory.stat().st_mode & 0o777 == 0o700
    save(directory, 3)
    (run / ".memory.json").unlink()
    # The next run of this path removes what nothing refers to any more.
    assert open_memory(run, parent).directory != directory and not directory.exists()


def test_directories_of_runs_that_exist_are_no_orphans(run: Path, parent: Path) -> None:
    directory = open_memory(run, parent).directory
    (parent / "something else").mkdir()
    remove_orphans(parent)
    assert directory.is_dir() and (parent / "something else").is_dir()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_memory_of_a_run_that_was_renamed_stays(run: Path, parent: Path, is_replaced: bool) -> None:
    directory = open_memory(run, parent).directory
    moved = run.rename(run.with_name("moved"))
    if is_replaced:
        run.mkdir()
        open_memory(run, parent)
    remove_orphans(parent)
    assert memory_of(moved, parent) == directory
    shutil.rmtree(moved)
    remove_orphans(parent)
    assert not directory.exists()


def test_memory_of_a_live_run_stays_where_its_directory_is_not_visible(
    run: Path, parent: Path
) -> None:
    directory = open_memory(run, parent).directory
    lease = Lease(directory)
    (run / ".memory.json").unlink()
    remove_orphans(parent)
    assert directory.is_dir()
    lease.release()
    remove_orphans(parent)
    assert not directory.exists()


def test_memory_of_a_run_whose_disk_is_not_mounted_stays(tmp_path: Path, parent: Path) -> None:
    run = tmp_path / "disk/runs/run"
    run.mkdir(parents=True)
    directory = open_memory(run, parent).directory
    # Without its disk, the mount point is an empty directory.
    shutil.rmtree(tmp_path / "disk/runs")
    remove_orphans(parent)
    assert directory.is_dir()


def test_a_copied_run_and_a_start_elsewhere_or_without_memory_find_no_outdated_checkpoints(
    run: Path, parent: Path, tmp_path: Path
) -> None:
    directory = open_memory(run, parent).directory
    copied, moved = tmp_path / "copied", tmp_path / "moved"
    shutil.copytree(run, copied)
    assert memory_of(copied, parent) is None and open_memory(copied, parent).directory != directory
    run.rename(moved)
    assert open_memory(moved, parent).directory == directory
    # Another machine has a tmpfs without the directory.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    open_memory(moved, elsewhere)
    assert memory_of(moved, parent) is None
    forget_memory(moved)
    assert memory_of(moved, elsewhere) is None


def test_a_directory_that_someone_else_created_is_an_error(run: Path, parent: Path) -> None:
    directory = open_memory(run, parent).directory
    for name in os.listdir(directory):
        os.unlink(directory / name)
    directory.rmdir()
    directory.symlink_to(run)
    with pytest.raises(RecipeError, match="belongs to another user"):
        open_memory(run, parent)


def test_the_newest_of_both_is_tried_first_and_of_one_step_the_one_on_disk(
    run: Path, parent: Path
) -> None:
    directory = open_memory(run, parent).directory
    save(run, 2, 4)
    save(directory, 4, 5)
    found = resume.candidates(run, None, directory).candidates
    steps = [(path.parent == directory, path.name[-1]) for path in found]
    assert steps == [(True, "5"), (False, "4"), (True, "4"), (False, "2")]
    assert resume.candidates(run, "LATEST", directory).candidates == [run / "epoch_0_step_4"]


def saved_in_memory(run: Path, parent: Path, *steps: int) -> Path:
    """The directory of a run whose memory has checkpoints of these *steps*, of the present start."""
    opened = open_memory(run, parent)
    record = opened.record.next("")
    record.write(run)
    save(opened.directory, *steps, generation=record.generation)
    return opened.directory


def names_in(run: Path) -> list[str]:
    return sorted(name for name in os.listdir(run) if name != ".memory.json")


def test_a_copy_on_disk_is_a_checkpoint_and_is_made_only_of_a_newer_one(
    run: Path, parent: Path
) -> None:
    directory = saved_in_memory(run, parent, 3)
    save(run, 2)
    copy = copy_to_disk(directory, run)
    assert copy == run / "epoch_0_step_3" and verify(copy, Manifest.read(copy)) == []
    assert os.readlink(run / "LATEST") == copy.name
    assert copy_to_disk(directory, run) is None


def test_what_the_run_has_abandoned_is_not_copied(run: Path, parent: Path) -> None:
    directory = saved_in_memory(run, parent, 5)
    record = MemoryRecord.read(run)
    assert record is not None
    # As after a rollback to step 2, while this node was absent.
    record.next("").write(run)
    save(run, 2)
    assert copy_to_disk(directory, run) is None
    assert names_in(run) == ["LATEST", "epoch_0_step_2"]


def test_a_damaged_copy_is_not_published_and_the_memory_is_kept(run: Path, parent: Path) -> None:
    directory = saved_in_memory(run, parent, 3)
    (path,) = (directory / "epoch_0_step_3").glob("model/shard-*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    message = keep_on_disk(run, parent)
    assert "are kept" in message and path.name in message and "tensor bias" in message
    assert names_in(run) == [] and path.exists()
