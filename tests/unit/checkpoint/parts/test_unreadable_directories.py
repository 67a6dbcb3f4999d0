"""A directory that cannot be read is an error, not a directory without files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from automodel_ckpt.base.durable_io import fsync_directories, walk
from automodel_ckpt.checkpoint.export.files import _files_below
from automodel_ckpt.checkpoint.export.publish import check_target, staged
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.memory.save_files import files_below, mark_save
from automodel_ckpt.checkpoint.memory.survey import _holdings
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.verify import unlisted_files, verify_deep
from automodel_ckpt.checkpoint.sources.source import _check_no_unlisted_files
from automodel_ckpt.convert.publishing import published_directory
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed
from tests.support.runs.stored_runs import FIRST, SECOND, write_run


class NoFiles:
    files: dict[str, Any] = {}  # noqa: RUF012


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let directories of the name "closed" be unreadable, also for the superuser."""
    scandir = os.scandir

    def denied(path: Any = ".") -> Any:
        # The numbers are descriptors of fsync_directory().
        if not isinstance(path, int) and os.path.basename(path) == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)


@pytest.mark.parametrize(
    "read",
    [
        lambda path: list(walk(path)),
        fsync_directories,
        lambda path: list(_files_below(path)),
        check_target,
        lambda path: _check_no_unlisted_files(path, set()),
        lambda path: unlisted_files(path, cast(Manifest, NoFiles())),
        lambda path: list(files_below(path)),
    ],
    ids=[
        "walk",
        "fsync",
        "side files",
        "target of an export",
        "source of an export",
        "verification",
        "files in memory",
    ],
)
def test_a_directory_that_cannot_be_read_is_not_skipped(
    tmp_path: Path, closed: None, read: Callable[[Path], object]
) -> None:
    directory = tmp_path / ".hf_metadata" / "closed"
    directory.mkdir(parents=True)
    with pytest.raises((OSError, CheckpointUnusable), match=str(directory)):
        read(tmp_path)


def test_nothing_is_published_with_a_directory_that_is_not_durable(
    tmp_path: Path, closed: None
) -> None:
    staging = commit.reserve(tmp_path, SECOND)
    (staging / "closed").mkdir()
    with pytest.raises(PermissionError, match="closed"):
        commit.finalize(staging, b"{}")
    assert not (staging / layout.MANIFEST).exists()
    target = tmp_path / "export"
    for publishing in (staged(target, print), published_directory(target, print)):
        with pytest.raises(SaveFailed, match="EACCES"), publishing as made:
            (made / "closed").mkdir()
        assert not target.exists()


def test_deep_verification_reports_a_directory_that_cannot_be_read(
    tmp_path: Path, closed: None
) -> None:
    write_run(tmp_path)
    checkpoint = tmp_path / SECOND
    (checkpoint / "closed").mkdir()
    (problem,) = verify_deep(checkpoint, Manifest.read(checkpoint))
    assert problem.what == "a directory cannot be read"
    assert problem.where == str(checkpoint / "closed")
    assert "EACCES" in str(problem.value) and problem.hint


def test_a_checkpoint_in_memory_that_cannot_be_read_is_not_used(
    tmp_path: Path, closed: None, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (FIRST, SECOND):
        (tmp_path / name).mkdir()
        mark_save(tmp_path / name, "0" * 32)
    (tmp_path / SECOND / "closed").mkdir()
    assert [name for (name, _), _ in _holdings(tmp_path)] == [FIRST]
    assert f"{tmp_path / SECOND} in memory is not used" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_walk_a_directory_of_root(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    tmp_path.chmod(0o755)
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # The directories above belong to root, too.
            os.chdir(tmp_path)
            os.setuid(65534)
            list(walk("."))
        except PermissionError as error:
            os.write(writable, str(error.filename).encode())
        os._exit(0)
    os.close(writable)
    os.waitpid(child, 0)
    assert os.read(readable, 100) == b"./closed"
    os.close(readable)
