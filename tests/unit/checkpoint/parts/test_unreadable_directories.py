"""A directory that cannot be read is an error, not a directory without files."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint.export.files import staged
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.verify import verify_deep
from automodel_ckpt.convert.publishing import published_directory
from automodel_ckpt.errors import SaveFailed
from tests.support.runs.stored_runs import SECOND, write_run


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
