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
from automodel_ckpt.checkpoint.files import direct, layout, ownership
from automodel_ckpt.checkpoint.files.digests import FileRecord, digest_of
from automodel_ckpt.checkpoint.jobs import reuse
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.run import lease, links, lock_file, maintenance
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.run.policy import KeepPolicy
from automodel_ckpt.checkpoint.saving import host_memory
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


def test_a_link_that_cannot_be_redirected_keeps_its_target_and_leaves_no_temporary_link(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine").symlink_to("epoch_0_step_1")
    monkeypatch.setattr(os, "rename", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        links._replace_link(tmp_path / "mine", "epoch_0_step_1.superseded-1")
    assert os.listdir(tmp_path) == ["mine"]
    assert os.readlink(tmp_path / "mine") == "epoch_0_step_1"


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


def test_a_leftover_whose_name_cannot_be_looked_up_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        commit.discard(tmp_path / ("x" * 300))
    assert "could not remove the leftover" in caplog.text
    assert "File name too long" in caplog.text


def test_a_leftover_that_is_gone_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        commit.discard(tmp_path / "gone")
    assert caplog.text == ""


# ---------------------------------------------------------------- exports


def test_without_a_swap_an_export_that_cannot_get_its_name_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    target, staging = tmp_path / "consolidated", tmp_path / "staging"
    for directory, text in ((target, "old"), (staging, "new")):
        directory.mkdir()
        (directory / "file").write_text(text)
    rename = os.rename

    def no_second(source: Any, destination: Any) -> None:
        if Path(source) == staging:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", no_second)
    with pytest.raises(OSError, match="Input/output"):
        publish._replace_with_gap(staging, target, lambda line: None)
    assert (target / "file").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["consolidated", "staging"]


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


def test_a_process_that_may_not_be_signaled_or_named_counts_as_there(monkeypatch: Patch) -> None:
    assert not ownership.is_gone(os.getpid())
    assert not ownership.is_gone(1 << 70)
    monkeypatch.setattr(os, "kill", failing(errno.EPERM))
    assert not ownership.is_gone(12345)


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


def test_a_lock_file_has_a_name_only_while_it_is_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("one")
    with path.open() as file:
        assert lock_file.is_at(path, file.fileno())
        path.unlink()
        assert not lock_file.is_at(path, file.fileno())
        path.write_text("two")
        assert not lock_file.is_at(path, file.fileno())


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


def test_a_file_system_error_is_not_taken_for_missing_hard_links(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "source").write_text("mine")
    monkeypatch.setattr(os, "link", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        lock_file.link_or_rename(tmp_path / "source", tmp_path / "target")
    assert os.listdir(tmp_path) == ["source"]


# ---------------------------------------------------------------- files and memory


def test_where_o_direct_cannot_be_set_the_page_cache_is_used(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    with open(tmp_path / "file", "w") as file:
        assert not direct.bypass_page_cache(file.fileno(), False)
        flags = fcntl.fcntl

        def no_change(descriptor: int, command: int, *rest: Any) -> Any:
            if command == fcntl.F_SETFL:
                raise OSError(errno.EINVAL, "Invalid argument")
            return flags(descriptor, command, *rest)

        monkeypatch.setattr(fcntl, "fcntl", no_change)
        assert not direct.bypass_page_cache(file.fileno(), True)


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("5000", "2000", 3000), ("max", "2000", None), ("x", "0", None)]
)
def test_the_limit_of_a_container_bounds_the_memory_that_is_available(
    tmp_path: Path, monkeypatch: Patch, limit: str, used: str, expected: int | None
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    host = host_memory.available_bytes()
    assert host is not None and host > 1 << 20
    monkeypatch.setattr(host_memory, "Path", lambda place: tmp_path)
    found = host_memory.available_bytes()
    assert found is not None
    if expected is not None:
        assert found == expected
    else:
        assert found > 1 << 20


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


def test_a_checkpoint_without_all_of_its_bytes_is_not_complete(tmp_path: Path) -> None:
    path = checkpoint_of_three(tmp_path / "epoch_0_step_20")
    assert maintenance._has_all_files(path)
    with open(next((path / "model").glob("*.safetensors")), "ab") as file:
        file.write(b"x")
    assert not maintenance._has_all_files(path)
    (path / layout.MANIFEST).unlink()
    assert not maintenance._has_all_files(path)


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


def test_after_a_pointer_that_could_not_be_updated_all_checkpoints_are_compared_again(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with_losses(tmp_path, s1=5.0, s2=6.0, s3=7.0)
    note(run, 1, 5.0)
    assert run.best() == "epoch_0_step_1"
    with monkeypatch.context() as patch:
        patch.setattr(os, "symlink", failing(errno.EIO))
        note(run, 2, 1.0)
    assert "could not record the validation of epoch_0_step_2" in caplog.text
    assert run.best() == "epoch_0_step_1"
    # Until the pointer is correct, the best checkpoint is protected without it.
    assert run.prune("epoch_0_step_3") == ()
    note(run, 3, 4.0)
    assert run.best() == "epoch_0_step_2"


def test_a_validation_that_is_noted_later_ranks_its_checkpoint(tmp_path: Path) -> None:
    run = run_with_losses(tmp_path, s1=5.0, s2=6.0, s3=7.0)
    for step, loss, best in ((1, 5.0, 1), (2, 6.0, 1), (3, 4.0, 3), (3, 9.0, 1), (1, 8.0, 2)):
        note(run, step, loss)
        assert run.best() == f"epoch_0_step_{best}", (step, loss)
    removed = run.prune("epoch_0_step_3")
    run.wait()
    assert removed == ("epoch_0_step_1",)
    assert not (tmp_path / "epoch_0_step_1").exists() and (tmp_path / "epoch_0_step_2").exists()
