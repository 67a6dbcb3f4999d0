"""A directory that cannot be read is an error, not a directory without files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from automodel_ckpt.checkpoint.export.files import _regular_files
from automodel_ckpt.checkpoint.export.publish import check_target
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.sources.opening import _check_no_unlisted_files
from automodel_ckpt.checkpoint.verify import unlisted_files
from automodel_ckpt.errors import CheckpointUnusable


class NoFiles:
    files: dict[str, Any] = {}  # noqa: RUF012


@pytest.mark.parametrize(
    "walk",
    [
        lambda path: list(_regular_files(path)),
        check_target,
        lambda path: _check_no_unlisted_files(path, set()),
        lambda path: unlisted_files(path, cast(Manifest, NoFiles())),
    ],
    ids=["side files", "target of an export", "source of an export", "verification"],
)
def test_a_directory_that_cannot_be_read_is_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, walk: Callable[[Path], object]
) -> None:
    closed = tmp_path / ".hf_metadata" / "closed"
    closed.mkdir(parents=True)
    scandir = os.scandir

    def denied(path: Any = ".") -> Any:
        # The superuser can read directories without permissions.
        if os.fspath(path) == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(closed))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises((OSError, CheckpointUnusable), match=str(closed)):
        walk(tmp_path)
