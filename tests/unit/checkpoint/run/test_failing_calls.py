"""System calls that fail: nothing is left behind, nothing is lost, and the error or warning names the file."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint.export import publish
from automodel_ckpt.checkpoint.files import layout, ownership
from automodel_ckpt.checkpoint.run import lease
from automodel_ckpt.errors import RecipeError, SaveFailed

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


# ---------------------------------------------------------------- files and memory


# ---------------------------------------------------------------- pointers to the best checkpoint
