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

from automodel_ckpt.errors import RecipeError, os_problem

PREFIX = "ckpt-train-"
NEEDED_BYTES = 1 << 18
"""What a launcher and its ranks may write: their process ids, how they ended, and torch's records."""
FRESH_SECONDS = 60.0
"""Younger directories are never removed: one is created before it is locked."""


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Create a temporary directory and remove it at the end. Also removes those of this user's killed launchers.

    This process and the processes that it forks lock the directory. The lock shows that it is in use, also to processes
    in another container with the same /tmp, where process ids do not. Raises :class:`RecipeError` if it cannot be
    created or has no space: ranks could not even report what failed.
    """
    with contextlib.suppress(OSError):
        remove_leftovers(Path(tempfile.gettempdir()))
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX))
            stack.enter_context(_locked(directory))
            _check_space(Path(directory))
        except OSError as error:
            hint = "free space in it, or set TMPDIR to another directory"
            problem = os_problem(error, "the temporary directory cannot be used", hint=hint)
            raise RecipeError.all_of([problem]) from error
        yield Path(directory)


def _check_space(directory: Path) -> None:
    """Write NEEDED_BYTES to *directory* and remove them. Raises OSError with the path if there is no space."""
    probe = directory / "probe"
    try:
        probe.write_bytes(bytes(NEEDED_BYTES))
    except OSError as error:
        # A failed write names no file.
        error.filename = str(directory.parent)
        raise
    finally:
        probe.unlink(missing_ok=True)


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
