"""Open the files that a checkpoint names: only regular files below its directory. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

# A file of this size that takes less than a part of it on the disk was made to be slow to read, not by a save.
SPARSE_FROM_BYTES = 128 << 20
_SPARSE_RATIO = 64
OUTSIDE = "a symbolic link points outside of the directory"


def open_safely(root: Path, path: str) -> int:
    """Open the regular file *path* below *root* for reading; return its descriptor.

    Symbolic links below *root* are not followed; pipes and devices are not opened. Raises OSError.
    """
    if link := link_on_the_way(root, path):
        raise OSError(errno.ELOOP, "a checkpoint contains a symbolic link", str(root / link))
    return open_regular(root / path)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, for reading or with other *flags*; return its descriptor.

    Only the last component of *path* is checked: it must not be a link, a pipe, a device or a sparse file. Raises
    OSError.
    """
    # Before opening, because opening a device can already have an effect.
    with contextlib.suppress(FileNotFoundError):  # which open() raises, or makes
        _check_regular(os.lstat(path), path)
    # What is put there meanwhile must not be followed or waited for either.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_safely(root: Path, path: str, *, limit: int | None = None) -> bytes:
    """Read the regular file *path* below *root*. Raises OSError as :func:`open_safely`, or where it exceeds *limit*
    bytes.
    """
    descriptor = open_safely(root, path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if limit is not None and size > limit:
            raise OSError(
                errno.EFBIG, f"{size} bytes exceed the limit of such a file", str(root / path)
            )
        return file.read()


def read_model_file(directory: Path, path: str, *, limit: int | None = None) -> bytes:
    """Read the regular file *path* of the model in *directory*, for all files that are copied or described.

    Raises OSError as :func:`model_file`, or where it exceeds *limit* bytes.
    """
    found = model_file(directory, path)
    return read_safely(found.parent, found.name, limit=limit)


def model_file(directory: Path, path: str) -> Path:
    """Return where the file *path* of the model in *directory* is, after following links.

    Links may lead to files of the same directory, and in a snapshot of the Hub's cache to the blobs of the same model:
    ``models--ORG--NAME/snapshots/COMMIT/FILE`` is a link to ``../../blobs/DIGEST``. *directory* itself may be a link.
    Raises OSError for a link that leads elsewhere, because its target could be a secret of the user. A hidden file,
    such as ``.git/config``, can be one, too.
    """
    root = Path(os.path.realpath(directory))
    found = Path(os.path.realpath(root / path))
    if found == root / path:
        return found
    if found.is_relative_to(root):
        is_allowed = not any(part.startswith(".") for part in found.relative_to(root).parts)
    else:
        is_allowed = root.parent.name == "snapshots" and found.parent == root.parents[1] / "blobs"
    if not is_allowed:
        raise OSError(errno.ELOOP, OUTSIDE, str(directory / path))
    return found


def begins_with(root: Path, path: str, content: bytes) -> bool:
    """Return whether the regular file *path* below *root* begins with *content*; False if it cannot be read."""
    try:
        descriptor = open_safely(root, path)
    except OSError:
        return False
    try:
        return os.pread(descriptor, len(content), 0) == content
    except OSError:
        return False
    finally:
        os.close(descriptor)


def link_on_the_way(root: Path, path: str) -> str | None:
    """The first directory on the way from *root* to *path* that is a symbolic link, relative to *root*."""
    parts = path.split("/")[:-1]
    prefixes = ("/".join(parts[: count + 1]) for count in range(len(parts)))
    return next((prefix for prefix in prefixes if (root / prefix).is_symlink()), None)


def is_sparse(status: os.stat_result) -> bool:
    """Whether a file is large and almost entirely unallocated (less than one byte on disk for 64 of its size)."""
    return (
        status.st_size > SPARSE_FROM_BYTES
        and status.st_blocks * 512 < status.st_size // _SPARSE_RATIO
    )


def _check_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(
            errno.EINVAL, f"not a regular file ({stat.filemode(status.st_mode)})", str(path)
        )
    if is_sparse(status):
        raise OSError(
            errno.EFBIG,
            f"{status.st_size} bytes, nearly all of them unallocated (a sparse file)",
            str(path),
        )
