"""Durable files and directories: fsync, complete writes and atomic replacement, and walks that miss no directory.

Imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn


def walk(
    directory: str | os.PathLike[str], *, topdown: bool = True
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Like :func:`os.walk`, but raise OSError for a directory that cannot be read or is missing.

    ``os.walk`` and ``Path.rglob`` leave out such directories, and what is copied, verified or made durable by them is
    then incomplete.
    """

    def fail(error: OSError) -> NoReturn:
        raise error

    return os.walk(directory, topdown=topdown, onerror=fail)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add *path* to an OSError raised inside the context: errors of a descriptor's system calls do not contain it."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def fsync_file(path: Path) -> None:
    """Fsync the content of an existing file, not its directory entry. Raises OSError naming it."""
    with _opened(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


def fsync_directory(path: Path) -> None:
    """Make the directory's entries durable. Raises OSError naming it."""
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
        # When XFS shuts down after an error of its disk, it discards changes that are not on disk yet, and then fsync
        # of their directory succeeds. Reading an entry raises EIO.
        with os.scandir(descriptor) as entries:
            next(entries, None)


def fsync_directories(directory: str | os.PathLike[str]) -> None:
    """Make the entries of *directory* and of all directories below it durable, the deepest first.

    Raises OSError naming the directory.
    """
    for parent, _, _ in walk(directory, topdown=False):
        fsync_directory(Path(parent))


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """The descriptor of an existing file or directory. Adds *path* to an OSError raised inside the context."""
    with naming(path):
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def write_all(descriptor: int, data: memoryview, start: int) -> None:
    """Write all of *data* at byte *start*. Raises OSError."""
    while data:  # a system call may write only a part
        # Not write(): the threads of a process share a descriptor's position.
        count = os.pwrite(descriptor, data, start)
        data, start = data[count:], start + count


def replace_file(path: Path, data: bytes) -> None:
    """Atomically replace a file by *data*: temporary name, fsync, rename, fsync of the directory.

    A killed process leaves a file named ``.NAME.`` and 32 hexadecimal digits. Raises OSError naming the file.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with naming(temporary):
            descriptor = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
            )
            try:
                write_all(descriptor, memoryview(data), 0)
                # Before the rename: after a power failure, the name must not refer to an empty file.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_directory(path.parent)  # makes the rename durable
