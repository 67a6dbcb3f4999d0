"""Values that have to be computed before they can be read as slices: quantized tensors, for example.

They are written to a directory for temporary files (``TMPDIR``), once for all processes of this machine that read the
same file, and removed when the last of these processes ends. What a killed process leaves is removed by the next one.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from automodel_ckpt.errors import CheckpointUnusable, os_problem

_PREFIX = "automodel_ckpt-decoded"
_COMPLETE = "complete"
_LOCK_SUFFIX = ".lock"
_RETRY_SECONDS = 0.05


def decoded_directory(source: Path, variant: str, decode: Callable[[Path], None]) -> Path:
    """Return a directory with what *decode* wrote into the empty directory that it was given.

    *source* is the file that is decoded, and *variant* names the way. If another process of this user has decoded the
    same file in the same way, and still runs, its directory is returned. The directory exists until this process ends.

    Raises :class:`CheckpointUnusable` if it cannot be written, for example because the disk is full.
    """
    try:
        base = _base()
        _remove_leftovers(base)
        name = _name_of(source, variant)
        while True:
            directory = _held(base, name, decode)
            if directory is not None:
                return directory
            time.sleep(_RETRY_SECONDS)
    except OSError as error:
        error.filename = error.filename or tempfile.gettempdir()
        hint = "free space, or set TMPDIR to a directory on another disk"
        problem = os_problem(error, f"{source.name} could not be decoded", hint=hint)
        raise CheckpointUnusable.all_of([problem]) from error


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


def _held(base: Path, name: str, decode: Callable[[Path], None]) -> Path | None:
    """Return the complete directory with a shared lock on it.

    Returns None if another process removed it meanwhile, or is about to decode the file too.
    """
    directory = base / name
    lock = base / (name + _LOCK_SUFFIX)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    is_held = False
    try:
        # Waits for a process that decodes now.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not (directory / _COMPLETE).exists():
            try:
                # Without waiting: another process that got here first keeps its shared lock until it ends.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            if _is_current(descriptor, lock) and not (directory / _COMPLETE).exists():
                _decode_into(directory, decode)
            # Not atomic: another process can remove the directory in between.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        is_held = _is_current(descriptor, lock) and (directory / _COMPLETE).exists()
    finally:
        if not is_held:
            os.close(descriptor)
    if not is_held:
        return None
    # Imported only here: listing files has to be fast.
    import multiprocessing.util

    # Runs at the end of this process, also of a process that multiprocessing started, which has no atexit.
    multiprocessing.util.Finalize(
        None, _release, args=(directory, lock, descriptor, os.getpid()), exitpriority=0
    )
    return directory


def _decode_into(directory: Path, decode: Callable[[Path], None]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    try:
        decode(directory)
        (directory / _COMPLETE).touch()
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _is_current(descriptor: int, lock: Path) -> bool:
    """Return whether the open lock file is still the one with its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(lock))
    except FileNotFoundError:
        return False


def _release(directory: Path, lock: Path, descriptor: int, owner: int) -> None:
    # A forked child has the descriptor too, and the parent's lock with it.
    if os.getpid() == owner:
        _remove_if_unused(directory, lock, descriptor)


def _remove_if_unused(directory: Path, lock: Path, descriptor: int) -> None:
    """Remove a directory unless another process has a lock on it; close the *descriptor* of the lock."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_current(descriptor, lock):
            shutil.rmtree(directory, ignore_errors=True)
            lock.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _remove_leftovers(base: Path) -> None:
    """Remove the directories of processes that were killed."""
    for lock in base.glob(f"*{_LOCK_SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            _remove_if_unused(base / lock.name.removesuffix(_LOCK_SUFFIX), lock, descriptor)
