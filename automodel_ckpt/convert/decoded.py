"""Values that have to be computed before they can be read as slices: quantized tensors, for example.

They are written to a directory for temporary files (``TMPDIR``), once for all processes of this machine that read the
same file, and removed when the last of these processes ends. What a killed process leaves is removed by the next one.
Imports no torch.

Directories are made and removed under an exclusive lock (flock) on the directory around them. Each process has a shared
lock on those that it uses.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from automodel_ckpt.base.durable_io import flock
from automodel_ckpt.errors import CheckpointUnusable

_PREFIX = "automodel_ckpt-values"


def decoded_directory(source: Path, variant: str, decode: Callable[[Path], None]) -> Path:
    """Return a directory with what *decode* wrote into the empty directory that it was given.

    *source* is the file that is decoded, and *variant* names the way. If another process of this user has decoded the
    same file in the same way, and still runs, its directory is returned. The directory exists until this process ends.

    Raises :class:`CheckpointUnusable` if it cannot be written, for example because the disk is full.
    """
    try:
        base = _base()
        directory = base / _name_of(source, variant)
        # Waits for a process that decodes now.
        with _locked(base, waits=True):
            for leftover in base.iterdir():
                _remove_if_unused(leftover)
            # One that remains is used, and so complete.
            if not directory.exists():
                directory.mkdir(mode=0o700)
                try:
                    decode(directory)
                except BaseException:
                    shutil.rmtree(directory, ignore_errors=True)
                    raise
            held = ExitStack()
            held.enter_context(_locked(directory, shared=True, waits=True))
    except OSError as error:
        error.filename = error.filename or tempfile.gettempdir()
        raise CheckpointUnusable.of_system(
            error,
            f"{source.name} could not be decoded",
            hint="free space, or set TMPDIR to a directory on another disk",
        ) from error
    owner = os.getpid()

    def release() -> None:
        # A forked child has the descriptor too, and the parent's lock with it.
        if os.getpid() != owner:
            return
        held.close()
        # A process that decodes now removes what is not used.
        with suppress(OSError), _locked(base):
            _remove_if_unused(directory)

    # Imported only here: listing files has to be fast.
    import multiprocessing.util

    # Runs at the end of this process, also of a process that multiprocessing started, which has no atexit.
    multiprocessing.util.Finalize(None, release, exitpriority=0)
    return directory


def _base() -> Path:
    """Return this user's directory for decoded files, which no other user can write."""
    base = Path(os.path.realpath(tempfile.gettempdir()), f"{_PREFIX}-{os.getuid()}")
    with suppress(FileExistsError):
        base.mkdir(mode=0o700)
    status = os.lstat(base)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(13, "the directory belongs to another user", str(base))
    return base


def _name_of(source: Path, variant: str) -> str:
    status = os.stat(source)
    place = (os.path.realpath(source), status.st_dev, status.st_ino)
    identity = (*place, status.st_size, status.st_mtime_ns, variant)
    return hashlib.sha256(repr(identity).encode(errors="surrogateescape")).hexdigest()[:32]


@contextmanager
def _locked(directory: Path, **how: bool) -> Iterator[None]:
    """Lock *directory* in the block, by :func:`flock`. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        flock(descriptor, **how)
        yield
    finally:
        os.close(descriptor)


def _remove_if_unused(directory: Path) -> None:
    with suppress(OSError), _locked(directory):
        shutil.rmtree(directory, ignore_errors=True)
