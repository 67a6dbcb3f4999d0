"""The directory that a launcher and its ranks share, and what launchers that were killed have left of theirs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "ckpt-train-"
FRESH_SECONDS = 60.0
"""A directory may be without its lock for a moment after it was made."""


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A temporary directory, removed at the end; those of this user's launchers that were killed go too. Locked by this
    process and those that it forks, which tells a live one, also of a container that has the same /tmp."""
    with contextlib.suppress(OSError):
        clear_left_over(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory, _locked(directory):
        yield Path(directory)


def clear_left_over(parent: Path) -> None:
    """Remove the directories in *parent* that nobody has locked. Raises OSError where *parent* cannot be listed."""
    for entry in os.scandir(parent):
        if not entry.name.startswith(PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):
            about = entry.stat(follow_symlinks=False)
            if about.st_uid == os.geteuid() and time.time() - about.st_mtime > FRESH_SECONDS:
                with _locked(entry.path, wait=False):
                    shutil.rmtree(entry.path, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: str, *, wait: bool = True) -> Iterator[None]:
    """Raises OSError where it is locked and *wait* is false. A file system without locks keeps what is left over."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if not wait:
                raise
        yield
    finally:
        os.close(descriptor)
