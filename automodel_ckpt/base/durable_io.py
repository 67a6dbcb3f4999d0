"""Durable files and directories, locks, the owners of temporary files, and the file systems that they are on.

Durable: fsync, complete writes, atomic replacement, and walks that miss no directory. A temporary file or directory is
a leftover when its owner has ended. Two proofs count. The lock is shared and free: the owner had the same boot of the
same kernel and the same mounted file system, and this process can lock what the owner had locked. Or the owner's
process is gone from this process namespace. A free lock alone proves nothing: other nodes and other mounts may not
share locks. A temporary name ends in 32 hexadecimal digits, from :func:`owner_digits`, that say who made it. Imports
nothing of the package.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import xxhash


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
    """The descriptor of a file or directory. Adds *path* to an OSError raised inside the context."""
    with naming(path):
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
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
        # The mode 0o666 is reduced by the umask.
        with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            write_all(descriptor, memoryview(data), 0)
            # Before the rename: after a power failure, the name must not refer to an empty file.
            os.fsync(descriptor)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_directory(path.parent)  # makes the rename durable


# ---------------------------------------------------------------- owners of temporary files


ABANDONED_SECONDS = 86400.0
"""If the owner of a leftover cannot be determined (another node, before a restart), the leftover is removed when
untouched for a day."""
UNLOCKED_SECONDS = 5.0
"""What a live process has just made is without its lock for a moment."""
_NO_LOCKS_HERE = (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
_MARK = "f"
"""The digit that tells these names from random ones (uuid4), which have a 4 in its place."""


def kernel_boot_id() -> str | None:
    """The kernel's name for its current boot, equal in all containers of a node; None where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


def pid_namespace() -> str:
    """The kernel's name for the process numbers that this process sees; empty where there is none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def file_system_identity(descriptor: int) -> tuple[int, int]:
    """Two numbers that differ between any two mounted file systems of a kernel: device and file system id."""
    return os.fstat(descriptor).st_dev, os.fstatvfs(descriptor).f_fsid


def is_gone(pid: int) -> bool:
    """Whether no process of this process namespace has the number *pid*."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # EPERM: the process exists and belongs to another user.
    except (OSError, OverflowError):
        return False
    return False


def open_lock_file(path: Path, flags: int) -> int:
    """Open a lock file with *flags* of ``os.open``; returns the descriptor. Raises OSError."""
    # A link or a pipe that replaced the file after its type was checked is neither followed nor
    # waited for.
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def flock(descriptor: int, *, shared: bool = False, waits: bool = False) -> None:
    """Lock an open file or directory until it is closed, or its process ends.

    Raises BlockingIOError if another process has the lock, unless it *waits*, and another OSError if the file system
    has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if waits else kind | fcntl.LOCK_NB)
    except OSError as error:
        # NFS emulates flock by fcntl, where EACCES can be a conflict (flock(2), fcntl(2)).
        if waits or error.errno != errno.EACCES:
            raise
        raise BlockingIOError(error.errno, error.strerror) from None


def unlock(descriptor: int) -> None:
    """Release a lock. Closing the file is not enough if a process that was forked meanwhile still has it open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def lock(descriptor: int) -> bool:
    """Apply :func:`flock`. Returns False, instead of raising OSError, if the file system has no locks."""
    try:
        flock(descriptor)
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
        return False
    return True


def owner_digits(directory: Path) -> str:
    """32 hexadecimal digits for the name of something temporary in *directory*: where its locks are, and its process.

    8 digits of boot and file system, 10 of boot and process namespace (with a mark among them), 6 of the process
    number, 8 random ones. Raises OSError where there is no such directory.
    """
    # Linux process numbers are at most 2**22, which takes 6 hexadecimal digits.
    return _lock_digits(directory) + _process_digits() + f"{os.getpid():06x}" + uuid.uuid4().hex[:8]


@contextlib.contextmanager
def owned(path: Path) -> Iterator[None]:
    """Lock a file or directory that this process has made under :func:`owner_digits`, while it is in use."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def is_abandoned(path: Path, *, after_seconds: float = ABANDONED_SECONDS) -> bool:
    """Whether the process that made something temporary has ended.

    For certain, or as far as can be determined: what a process on another node, or before a restart, has made counts
    when it was not touched for *after_seconds*. Raises OSError.
    """
    with _opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as descriptor:
        try:
            is_locked = lock(descriptor)
        except BlockingIOError:
            return False
        made_by = path.name[-32:]
        if made_by[12] != _MARK:
            return True
        if made_by[8:18] == _process_digits() and is_gone(int(made_by[18:24], 16)):
            return True
        if is_locked and made_by[:8] == _lock_digits(path.parent):
            return untouched_seconds(path) > UNLOCKED_SECONDS
        return untouched_seconds(path) > after_seconds


def _lock_digits(directory: Path) -> str:
    """Equal for two processes only where they share the locks on what is in *directory*."""
    with _opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        identity = file_system_identity(descriptor)
    # Without a boot id, a random value: then no two processes count as sharing locks.
    return _hashed(f"{kernel_boot_id() or uuid.uuid4()} {identity}")[:8]


def _process_digits() -> str:
    """Equal for two processes only where they see each other's numbers; the fifth digit is the mark."""
    digits = _hashed(f"{kernel_boot_id() or uuid.uuid4()} {pid_namespace() or uuid.uuid4()}")
    return digits[:4] + _MARK + digits[4:9]


def _hashed(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def untouched_seconds(path: Path) -> float:
    """How long ago something was written in a directory, or to a file, by the clock of this node."""
    newest = os.lstat(path).st_mtime
    for parent, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, os.lstat(os.path.join(parent, name)).st_mtime)
    return time.time() - newest


# ---------------------------------------------------------------- file systems


_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")
OVERLAY_WARNING = (
    "{} is on an overlay file system: in a container what is saved there is gone with the container. Mount a directory "
    "of the host in its place (docker run -v /data/checkpoints:{} ...)"
)


def overlay_warning(directory: Path) -> str | None:
    """The warning for a *directory* (which may not exist yet) on an overlay file system; else None."""
    real = Path(os.path.realpath(directory))
    return OVERLAY_WARNING.format(directory, real) if file_system_of(real) == "overlay" else None


def file_system_of(path: Path) -> str | None:
    """The type of the file system of a resolved path, which may not exist yet; None where it is unknown.

    Source: proc(5), mountinfo: the fifth field is the mount point; the type follows the separate dash.
    """
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    found: tuple[int, str | None] = (0, None)
    for line in lines:
        before, _, after = line.partition(" - ")
        # proc(5): spaces, tabs, newlines and backslashes are written as octal numbers.
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), before.split()[4])
        # The last mount on a path hides the others on the same path.
        if after and path.is_relative_to(point) and len(point) >= found[0]:
            found = len(point), after.split()[0]
    return found[1]


def free_bytes(directory: Path) -> int:
    """Bytes that this user may write to the file system of *directory*, which need not exist yet."""
    path = directory.absolute()
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    # Not f_bfree, which includes the blocks that only root may use.
    return status.f_bavail * status.f_frsize
