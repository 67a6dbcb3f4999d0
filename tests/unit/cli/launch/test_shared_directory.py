"""What launchers that were killed leave in the temporary directory."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest

from automodel_ckpt.cli.launch.shared_directory import (
    FRESH_SECONDS,
    PREFIX,
    remove_leftovers,
    scratch_directory,
)
from automodel_ckpt.errors import RecipeError


def test_what_a_killed_launcher_left_goes_and_what_a_live_one_has_stays(tmp_path: Path) -> None:
    for name in ("killed", "lives", "just_made", "other"):
        (tmp_path / (name if name == "other" else PREFIX + name) / "launch_1").mkdir(parents=True)
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "other")
    for entry in tmp_path.iterdir():
        if not entry.name.endswith("just_made"):
            os.utime(entry, (0, entry.stat().st_mtime - 2 * FRESH_SECONDS))
    lives = os.open(tmp_path / f"{PREFIX}lives", os.O_RDONLY)
    fcntl.flock(lives, fcntl.LOCK_EX)
    remove_leftovers(tmp_path)
    os.close(lives)
    left = [f"{PREFIX}just_made", f"{PREFIX}link", f"{PREFIX}lives", "other"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == left
    assert (tmp_path / "other/launch_1").is_dir()


def test_a_temporary_directory_without_space_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Like a full disk: writes beyond the limit fail, here with EFBIG.
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RecipeError, match=r"temporary directory[\s\S]*ulimit -f") as caught:
            scratch_directory().__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.problems[0].where == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_launchers_directory_is_locked_while_it_runs_and_goes_with_it() -> None:
    with scratch_directory() as directory:
        os.utime(directory, (0, 0))
        remove_leftovers(directory.parent)
        assert directory.is_dir()
    assert not directory.exists()
