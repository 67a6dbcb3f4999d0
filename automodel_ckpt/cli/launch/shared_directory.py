"""The temporary directory that a launcher and its ranks share, and the cleanup after launchers that were killed."""

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
"""Younger directories are never removed: one is created before it is locked."""


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Create a temporary directory and remove it at the end. Also removes those of this user's killed launchers.

    This process and the processes that it forks lock the directory. The lock shows that it is in use, also to processes
    in another container with the same /tmp, where process ids do not.
    """
    with contextlib.suppress(OSError):
        remove_leftovers(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory, _locked(directory):
        yield Path(directory)


def remove_leftovers(parent: Path) -> None:
    """Remove this user's directories in *parent* that no process has locked.

    Raises OSError if *parent* cannot be listed.
    """
    for entry in os.scandir(parent):
        if not entry.name.startswith(PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            is_own = status.st_uid == os.geteuid()
            is_old = time.time() - status.st_mtime > FRESH_SECONDS
            if is_own and is_old:
                # The kernel releases the lock when its last process has ended, even by SIGKILL.
                with _locked(entry.path, wait=False):
                    shutil.rmtree(entry.path, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: str, *, wait: bool = True) -> Iterator[None]:
    """Lock a directory inside the context.

    Without *wait*, raises OSError if it is locked, or if its file system has no locks. With *wait*, a file system
    without locks is ignored.
    """
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
