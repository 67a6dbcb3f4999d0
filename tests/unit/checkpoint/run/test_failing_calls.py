"""System calls that fail: nothing is left behind, nothing is lost, and the error or warning names the file."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint.export import publish
from automodel_ckpt.checkpoint.files import layout, ownership
from automodel_ckpt.checkpoint.files.digests import FileRecord, digest_of
from automodel_ckpt.checkpoint.jobs import reuse
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.run import lease, lock_file
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.run.policy import KeepPolicy
from automodel_ckpt.checkpoint.sources.shard_header import files_covered_by_slices
from automodel_ckpt.errors import RecipeError, SaveFailed
from tests.support.models.shards import cut, write_checkpoint

Patch = pytest.MonkeyPatch


def failing(code: int, after: int = 0) -> Callable[..., Any]:
    """A system call that fails with *code*, after it did nothing *after* times."""
    calls = 0

    def call(*_: Any, **__: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(code, os.strerror(code))

    return call


# ---------------------------------------------------------------- staging, pointers and leftovers


def test_a_staging_directory_that_cannot_be_completed_is_removed(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    mkdir = os.mkdir

    def full(path: Any, *rest: Any) -> None:
        if Path(path).name == layout.PARTS:
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(path, *rest)

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(OSError, match="No space left"):
        commit.reserve(tmp_path, "epoch_0_step_20")
    assert list(tmp_path.iterdir()) == []


def test_a_pointer_that_cannot_be_replaced_leaves_no_temporary_link(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "epoch_0_step_1").mkdir()
    commit.point(tmp_path, layout.LATEST, "epoch_0_step_1")
    monkeypatch.setattr(os, "rename", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        commit.point(tmp_path, layout.LATEST, "epoch_0_step_2")
    assert sorted(os.listdir(tmp_path)) == [layout.LATEST, "epoch_0_step_1"]
    assert commit.pointed(tmp_path, layout.LATEST) == "epoch_0_step_1"


def test_a_leftover_that_cannot_be_removed_is_named_in_a_warning(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    trash = tmp_path / layout.trash_name("1")
    trash.mkdir()
    (trash / "file").write_text("x")
    monkeypatch.setattr(os, "unlink", failing(errno.EIO))
    with caplog.at_level(logging.WARNING):
        commit.discard(trash)
    assert "could not remove the leftover" in caplog.text and "file" in caplog.text
    assert "Input/output" in caplog.text


# ---------------------------------------------------------------- exports


def test_an_export_does_not_replace_a_directory_with_links_of_the_user(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (tmp_path / "data").mkdir()
    (target / "mine").symlink_to(tmp_path / "data")
    with pytest.raises(SaveFailed, match="holds files that no export made") as caught:
        publish.check_target(target)
    assert "'mine'" in str(caught.value)
    (target / "mine").unlink()
    publish.check_target(target)


# ---------------------------------------------------------------- locks and owners


def test_a_conflict_that_nfs_reports_as_eacces_is_a_lock_of_another_process(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    with open(tmp_path / "lock", "w") as file:
        assert ownership.lock(file.fileno())
        for code, error in ((errno.EACCES, BlockingIOError), (errno.EIO, OSError)):
            monkeypatch.setattr(fcntl, "flock", failing(code))
            with pytest.raises(error):
                ownership.lock(file.fileno())
        monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
        assert not ownership.lock(file.fileno())


@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
def test_a_lock_file_that_is_no_regular_file_is_rejected_and_kept(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / layout.LOCK_FILE
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises(RecipeError, match="lock file of this directory is not a regular file"):
        lease.Lease(tmp_path)
    assert os.listdir(tmp_path) == [layout.LOCK_FILE]


def test_a_lock_file_that_is_removed_during_the_watch_ends_the_watch(tmp_path: Path) -> None:
    path = tmp_path / layout.LOCK_FILE
    path.write_text("{}")
    removal = threading.Timer(0.2, path.unlink)
    removal.start()
    begin = time.monotonic()
    assert not lock_file.is_beating(path, 600)
    assert time.monotonic() - begin < 300
    removal.join()


@pytest.mark.parametrize("links_exist", [True, False])
def test_a_lock_file_never_replaces_one_that_another_run_has_created(
    tmp_path: Path, monkeypatch: Patch, links_exist: bool
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("mine")
    target.write_text("another")
    if not links_exist:
        monkeypatch.setattr(os, "link", failing(errno.EPERM))
    assert not lock_file.link_or_rename(source, target)
    assert target.read_text() == "another"
    target.unlink()
    assert lock_file.link_or_rename(source, target)
    assert target.read_text() == "mine"


# ---------------------------------------------------------------- files and memory


def checkpoint_of_three(directory: Path) -> Path:
    """A checkpoint whose three ranks have written a shard each."""
    import torch

    tensors = {"w": torch.arange(60, dtype=torch.float32).reshape(6, 10)}
    write_checkpoint(directory, tensors, cut("w", tensors["w"], 3), step=20)
    return directory


def test_only_files_with_the_exact_header_of_a_save_are_covered_by_slices(tmp_path: Path) -> None:
    path = checkpoint_of_three(tmp_path / "epoch_0_step_20")
    manifest = Manifest.read(path)
    shards = sorted(file for file in manifest.files if file.endswith(".safetensors"))
    covered = files_covered_by_slices(path, manifest)
    assert len(shards) == 3 and covered >= {*shards}
    (path / shards[0]).unlink()
    with open(path / shards[1], "r+b") as file:
        file.seek(8)
        file.write(b"\t")
    assert files_covered_by_slices(path, manifest) & {*shards} == {shards[2]}


def test_a_file_that_changes_while_it_is_linked_is_not_shared(tmp_path: Path) -> None:
    path = checkpoint_of_three(tmp_path / "epoch_0_step_20")
    staging = tmp_path / "staging"
    (staging / "model").mkdir(parents=True)
    reusable = reuse.ReusableFiles.open(reuse.Previous(str(path)))
    assert reusable is not None
    file = next(name for name in Manifest.read(path).files if name.endswith(".safetensors"))
    other = FileRecord((path / file).stat().st_size + 1, digest_of(b""))
    assert not reusable.link(file, other, staging)
    assert not (staging / file).exists()
    record = Manifest.read(path).files[file]
    assert reusable.link(file, record, staging) and (staging / file).samefile(path / file)
    # The name is taken now.
    assert not reusable.link(file, record, staging)


# ---------------------------------------------------------------- pointers to the best checkpoint


def run_with_losses(root: Path, **losses: float) -> RunDirectory:
    """A run whose checkpoints of these steps (``s1``) have these losses."""
    import torch

    tensors = {"w": torch.ones(2)}
    for step, loss in losses.items():
        number = int(step.removeprefix("s"))
        path = root / f"epoch_0_step_{number}"
        values = {"step": number, "val_loss": loss}
        write_checkpoint(path, tensors, cut("w", tensors["w"], 1), step=number, losses=values)
    return RunDirectory(root, KeepPolicy(last=1), "val_loss")


def note(run: RunDirectory, step: int, loss: float) -> None:
    name = f"epoch_0_step_{step}"
    run.note_validation(name, Manifest.read(run.root / name).digest, {"val_loss": loss})


def test_a_validation_that_is_noted_later_ranks_its_checkpoint(tmp_path: Path) -> None:
    run = run_with_losses(tmp_path, s1=5.0, s2=6.0, s3=7.0)
    for step, loss, best in ((1, 5.0, 1), (2, 6.0, 1), (3, 4.0, 3), (3, 9.0, 1), (1, 8.0, 2)):
        note(run, step, loss)
        assert run.best() == f"epoch_0_step_{best}", (step, loss)
    removed = run.prune("epoch_0_step_3")
    run.wait()
    assert removed == ("epoch_0_step_1",)
    assert not (tmp_path / "epoch_0_step_1").exists() and (tmp_path / "epoch_0_step_2").exists()
