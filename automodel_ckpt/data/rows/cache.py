"""A directory of prepared data, built once even if several processes need it at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from automodel_ckpt.base.durable_io import fsync_file
from automodel_ckpt.base.store_url import cache_directory
from automodel_ckpt.data.collate import Key
from automodel_ckpt.errors import RecipeError, os_problem

log = logging.getLogger(__name__)


def cached(name: str, key: Key, build: Callable[[Path], None]) -> Path:
    """Return the directory that *build* filled for *key*, and build it first if it does not exist.

    *key* has to contain everything that the content depends on; its repr is hashed. The directory is published under
    its name only after all files are flushed to disk. Other processes that need it wait meanwhile. Raises
    :class:`RecipeError` if the cache cannot be written.
    """
    # A repr with an address, such as a function's repr, would be another key in every process.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()
    try:
        final = cache_directory() / f"{name}-{digest}"
        # Without the lock: the rename publishes a complete directory, so its name is proof.
        if final.is_dir():
            return final
        final.parent.mkdir(parents=True, exist_ok=True)
        # Never remove the lock file: a process could lock a new file while another one holds the
        # old one.
        with _locked(final.with_name(f".{final.name}.lock")):
            # Another process may have built it while this one waited for the lock.
            if not final.is_dir():
                _build(final, build)
    except OSError as error:
        hint = "set the environment variable AUTOMODEL_CKPT_CACHE to a writable directory with enough free space"
        raise RecipeError.all_of(
            [os_problem(error, "prepared data cannot be stored", hint=hint)]
        ) from error
    return final


def _build(final: Path, build: Callable[[Path], None]) -> None:
    partial = final.with_name(f".{final.name}.partial")
    # The name is the same in every process: only the holder of the lock may remove leftovers.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        for path in partial.iterdir():
            fsync_file(path)
        # The parent is not flushed: if a power failure undoes the rename, the data is built again.
        partial.rename(final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # Errors of write(), such as the error for a full disk, do not contain a path.
        if isinstance(error, OSError) and not error.filename:
            error.filename = str(final.parent)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on *path*.

    The lock ends with the process, so a killed process blocks no other one. A process that waits logs it: the owner may
    be suspended, or on another host that shares the cache.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # NFS emulates flock by fcntl, where EACCES can be a conflict (flock(2), fcntl(2)).
        except (BlockingIOError, PermissionError):
            log.info(
                "waiting until another process has prepared the same data; it holds the lock %s",
                path,
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing the file is not enough if a process that was forked meanwhile still has it open.
            fcntl.flock(file, fcntl.LOCK_UN)
