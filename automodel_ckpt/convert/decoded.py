"""Values that have to be computed before they can be read as slices: quantized tensors, for example.

They are written to a directory for temporary files (``TMPDIR``), once for all processes of this machine that read the
same file, and removed when the last of these processes ends. What a killed process leaves is removed by the next one.
Imports no torch.

Each process has a shared lock (flock) on the directories that it uses, and removes one under an exclusive lock.
Directories are made under an exclusive lock on the directory around them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from automodel_ckpt.errors import CheckpointUnusable, os_problem

_PREFIX = "automodel_ckpt-values"
_COMPLETE = "complete"


def decoded_directory(source: Path, variant: str, decode: Callable[[Path], None]) -> Path:
    """Return a directory with what *decode* wrote into the empty directory that it was given.

    *source* is the file that is decoded, and *variant* names the way. If another process of this user has decoded the
    same file in the same way, and still runs, its directory is returned. The directory exists until this process ends.

    Raises :class:`CheckpointUnusable` if it cannot be written, for example because the disk is full.
    """
    try:
        base = _base()
        directory = base / _name_of(source, variant)
        lock = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Waits for a process that decodes now.
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in base.iterdir():
                with contextlib.suppress(OSError):
                    _remove_if_unused(leftover, _opened(leftover))
            while (held := _shared(directory)) is None:
                _decode_into(directory, decode)
        finally:
            os.close(lock)
    except OSError as error:
        error.filename = error.filename or tempfile.gettempdir()
        hint = "free space, or set TMPDIR to a directory on another disk"
        problem = os_problem(error, f"{source.name} could not be decoded", hint=hint)
        raise CheckpointUnusable.all_of([problem]) from error
    # Imported only here: listing files has to be fast.
    import multiprocessing.util

    # Runs at the end of this process, also of a process that multiprocessing started, which has no atexit.
    multiprocessing.util.Finalize(
        None, _release, args=(directory, held, os.getpid()), exitpriority=0
    )
    return directory


def _base() -> Path:
    """Return this user's directory for decoded files, which no other user can write."""
    base = Path(os.path.realpath(tempfile.gettempdir()), f"{_PREFIX}-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    status = os.lstat(base)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(13, "the directory belongs to another user", str(base))
    return base


def _name_of(source: Path, variant: str) -> str:
    status = os.stat(source)
    identity = (
        os.path.realpath(source),
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        variant,
    )
    return hashlib.sha256(repr(identity).encode(errors="surrogateescape")).hexdigest()[:32]


def _opened(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def _shared(directory: Path) -> int | None:
    """Return a descriptor of the complete directory with a shared lock, or None when it does not exist (any more)."""
    try:
        descriptor = _opened(directory)
    except FileNotFoundError:
        return None
    # Waits for a process that removes it now.
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if (directory / _COMPLETE).exists():
        return descriptor
    os.close(descriptor)
    return None


def _decode_into(directory: Path, decode: Callable[[Path], None]) -> None:
    directory.mkdir(mode=0o700)
    try:
        decode(directory)
        (directory / _COMPLETE).touch()
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _release(directory: Path, held: int, owner: int) -> None:
    # A forked child has the descriptor too, and the parent's lock with it.
    if os.getpid() == owner:
        _remove_if_unused(directory, held)


def _remove_if_unused(directory: Path, descriptor: int) -> None:
    """Remove a directory unless another process has a lock on it. Close its *descriptor*."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(descriptor)
