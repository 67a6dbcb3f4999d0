"""The commit protocol of checkpoints: creating, publishing and removing them.

A checkpoint is complete or absent: files in a staged directory, the manifest last, one rename. The steps, in order:

1. :func:`reserve` a staging directory next to the final one, on the same file system, under a unique name.
2. Every rank writes its files through :class:`~automodel_ckpt.checkpoint.files.durable_file.DurableFile`: created
   exclusively, digested while written, flushed and fsynced, the close checked. A failed fsync is never retried:
   the kernel may have dropped the data.
3. When all ranks have written: :func:`finalize` fsyncs the files' directories, then writes the manifest (temporary
   name, fsync, rename) and fsyncs its directory. From here the directory is a complete checkpoint.
4. :func:`publish` renames the staging directory to its final name and fsyncs the parent. Only now is it reported.
5. :func:`point` swaps the links ``LOWEST_VAL`` and, last, ``LATEST`` by rename.

After a kill before step 4, :func:`recover` removes the staging directory at the next start. After a kill between steps
4 and 5, the next start points ``LATEST`` at the newest complete checkpoint. A removal runs in the reverse order:
:func:`withdraw` renames a checkpoint to a trash name and fsyncs the parent, :func:`discard` deletes its files. An
abandoned checkpoint is renamed (:func:`supersede`). The content of a published checkpoint never changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import shutil
import uuid
from pathlib import Path

from automodel_ckpt.base.durable_io import (
    fsync_directories,
    fsync_directory,
    is_abandoned,
    naming,
    replace_file,
)
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import DurableFile, FileRecord
from automodel_ckpt.checkpoint.files.safe_open import read_safely

log = logging.getLogger("automodel_ckpt")

_POINTER_BYTES = 256
_LINK_ATTEMPTS = 3
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}


def write_file(path: Path, data: bytes | memoryview) -> FileRecord:
    """Write a new file and fsync it; the caller fsyncs its directory. Returns its size and digest."""
    with DurableFile(path, nbytes=len(data)) as file:
        file.write(data)
    return file.close()


def write_by_rename(path: Path, data: bytes) -> None:
    """Create a file that appears complete under its name: write a temporary file, then rename it.

    The reader may remove the file and its directory immediately, so nothing is done after the rename (no fsync).
    """
    temporary = path.with_name(f".{path.name}")
    with naming(temporary):
        temporary.write_bytes(data)
    os.rename(temporary, path)


def make_run_directory(root: Path) -> None:
    """Create the run directory with its parents. The parent of each new directory is fsynced."""
    if not root.is_dir():
        make_run_directory(root.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(root)
        fsync_directory(root.parent)


def reserve(root: Path, name: str) -> Path:
    """Create an empty staging directory for the checkpoint *name*. Raises OSError."""
    staging = root / layout.staging_name(name, uuid.uuid4().hex)
    os.mkdir(staging)
    try:
        os.mkdir(staging / layout.PARTS)
    except OSError:
        discard(staging)
        raise
    return staging


def finalize(staging: Path, manifest: bytes) -> None:
    """Make the staging directory a complete checkpoint: fsync all directories, and write the manifest last."""
    for part in os.listdir(staging / layout.PARTS):
        os.unlink(staging / layout.PARTS / part)
    os.rmdir(staging / layout.PARTS)
    fsync_directories(staging)
    # Last, because it makes the directory complete: all that it lists must be durable before.
    replace_file(staging / layout.MANIFEST, manifest)


def publish(staging: Path, name: str) -> Path:
    """Rename a finalized staging directory to its final name and fsync the parent. Returns the final path.

    Raises :class:`FileExistsError` if the name exists, OSError if fsync fails; then the checkpoint is removed.
    """
    final = staging.parent / name
    # rename() would silently replace an empty directory. The lease prevents races with other runs.
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    os.rename(staging, final)
    try:
        fsync_directory(staging.parent)
    except OSError:
        # A name that a power failure could remove must not be reported.
        with contextlib.suppress(OSError):
            discard(withdraw(final))
        raise
    return final


def point(root: Path, pointer: str, name: str) -> None:
    """Atomically set the link *pointer* to the checkpoint *name*.

    If symbolic links are not supported, the text file ``POINTER.txt`` is written instead. Raises OSError.
    """
    _move_directory_aside(root, pointer)
    if not _swap_link(root, pointer, name):
        replace_file(root / f"{pointer}.txt", name.encode() + b"\n")
        return
    with contextlib.suppress(FileNotFoundError):
        # After the link exists, so that the pointer is never absent.
        os.unlink(root / f"{pointer}.txt")
    fsync_directory(root)


def _swap_link(root: Path, pointer: str, name: str) -> bool:
    """Create the link under a temporary name and rename it. Returns False if links are not supported."""
    for attempt in range(_LINK_ATTEMPTS):
        temporary = root / f".{pointer}.{uuid.uuid4().hex}"
        try:
            os.symlink(name, temporary)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        try:
            os.rename(temporary, root / pointer)
            break
        except OSError as error:
            # A starting run may have removed the temporary link: `ckpt pin` does not wait for it.
            if not isinstance(error, FileNotFoundError) or attempt == _LINK_ATTEMPTS - 1:
                temporary.unlink(missing_ok=True)
                raise
    return True


def unpoint(root: Path, pointer: str) -> None:
    """Remove a pointer if it exists."""
    _move_directory_aside(root, pointer)
    for path in (root / pointer, root / f"{pointer}.txt"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _move_directory_aside(root: Path, pointer: str) -> None:
    """Rename a directory that has the name of a pointer.

    Copy tools that follow links (``scp -r``, object stores) replace a pointer by a copy of the checkpoint.
    """
    path = root / pointer
    if path.is_symlink() or not path.is_dir():
        return
    number = 1
    while os.path.lexists(aside := root / f"{pointer}.copied-{number}"):
        number += 1
    os.rename(path, aside)
    log.warning(
        "%s is a directory and not a link (some copy tools do this); renamed to %s, which can be deleted",
        path,
        aside.name,
    )


def pointed(root: Path, pointer: str) -> str | None:
    """Return the checkpoint that a pointer points to; None when the pointer is missing or points to anything else."""
    name = pointer_text(root, pointer)
    if name is None or layout.parse_checkpoint_name(name) is None:
        return None
    return name


def pointer_text(root: Path, pointer: str) -> str | None:
    """Return the checkpoint name, possibly of a superseded one, in a pointer or a pin; None when there is none."""
    link = root / pointer
    name = None
    if link.is_symlink():
        name = os.readlink(link).rstrip("/")
    else:
        with contextlib.suppress(OSError):
            content = read_safely(root, f"{pointer}.txt", limit=_POINTER_BYTES)
            name = content.decode(errors="replace").strip()
    # A pointer can contain any text, such as a path out of the run directory.
    if name is None or not layout.is_checkpoint(name):
        return None
    return name


def free_superseded_name(root: Path, name: str) -> str:
    """Return the next unused ``.superseded-N`` name of a checkpoint."""
    number = 1
    while os.path.lexists(root / layout.superseded_name(name, number)):
        number += 1
    return layout.superseded_name(name, number)


def supersede(root: Path, name: str, aside: str | None = None) -> str:
    """Rename an abandoned checkpoint to *aside* (default: the next unused ``.superseded-N`` name). Returns the name."""
    aside = aside or free_superseded_name(root, name)
    os.rename(root / name, root / aside)
    # Durable before a new checkpoint gets the old name.
    fsync_directory(root)
    return aside


def exchange(a: Path, b: Path) -> bool:
    """Atomically swap two existing paths (renameat2, Linux). Returns False if that is not supported."""
    # Python has no function for this system call; the C library has it since glibc 2.28.
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code not in _NO_EXCHANGE:
        raise OSError(code, os.strerror(code), str(b))
    return False


def stamp(checkpoint: Path) -> tuple[int, int, int]:
    """Return (inode, mtime in ns, bytes) of a checkpoint's manifest, to detect a replaced one. Raises OSError."""
    # The inode counts because a copy can keep time and size.
    found = os.lstat(checkpoint / layout.MANIFEST)
    return found.st_ino, found.st_mtime_ns, found.st_size


def withdraw(path: Path) -> Path:
    """Rename a checkpoint to a trash name and fsync the parent. Returns the trash directory for :func:`discard`."""
    trash = path.with_name(layout.trash_name())
    os.rename(path, trash)
    # Durable before the files are deleted: a checkpoint that has its name must be whole.
    fsync_directory(path.parent)
    return trash


def discard(path: Path) -> None:
    """Delete a staging or trash directory. Failures are only logged; a later start tries again."""

    def report(name: str, error: BaseException) -> None:
        if not isinstance(error, FileNotFoundError):
            log.warning("could not remove the leftover %s: %s", name, error)

    try:
        if not path.is_symlink() and path.is_dir():
            shutil.rmtree(path, onerror=lambda _, name, info: report(name, info[1]))
    except OSError as error:
        report(str(path), error)


def recover(root: Path) -> list[str]:
    """Remove the leftovers of a killed run: staging and trash directories, temporary files and links.

    Returns their names.
    """
    leftovers = []
    for entry in list(os.scandir(root)):
        if not _is_leftover(entry.name) or _is_upload_in_progress(root, entry.name):
            continue
        leftovers.append(entry.name)
        # A link is removed and not followed: its target is not a leftover.
        if entry.is_dir(follow_symlinks=False):
            discard(root / entry.name)
        else:
            (root / entry.name).unlink(missing_ok=True)
    return leftovers


def remove_abandoned_exports(root: Path) -> None:
    """Remove what killed processes have exported in a run to upload it. The run may be training."""
    for entry in list(os.scandir(root)):
        if _is_hub_export(entry.name) and not _is_upload_in_progress(root, entry.name):
            discard(root / entry.name)


def _is_upload_in_progress(root: Path, name: str) -> bool:
    """Whether a process has exported a model here and uploads it: it may have been started by an earlier run."""
    path = root / name
    return _is_hub_export(name) and not path.is_symlink() and not is_abandoned(path)


def _is_hub_export(name: str) -> bool:
    return name.startswith(f".{layout.HUB_EXPORT}.") and layout.is_staging(name)


def _is_leftover(name: str) -> bool:
    temporary = layout.is_temporary(name) or layout.is_link_name(name)
    return temporary or layout.is_staging(name) or layout.is_trash(name)
