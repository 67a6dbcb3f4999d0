"""A directory of prepared data, built once even when several processes ask for it at the same time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from automodel_ckpt.errors import RecipeError, os_problem
from automodel_ckpt.on_disk import fsync_file


def cache_directory() -> Path:
    """``$AUTOMODEL_CKPT_CACHE``, else ``~/.cache/automodel_ckpt``, else this user's directory in the temporary one.

    The last is for accounts without a home, as in containers. Raises PermissionError where it is somebody else's.
    """
    named = os.environ.get("AUTOMODEL_CKPT_CACHE")
    if named:
        return Path(named).expanduser()
    home = Path(os.path.expanduser("~/.cache/automodel_ckpt"))
    return home if home.is_absolute() and _can_be_written(home) else _temporary()


def _can_be_written(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


def _temporary() -> Path:
    directory = Path(tempfile.gettempdir()) / f"automodel_ckpt-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.lstat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(directory))
    return directory


def cached(name: str, key: tuple[object, ...], build: Callable[[Path], None]) -> Path:
    """The directory that *build* filled for *key*; built now unless it is there.

    *key* holds all that the content depends on (its repr is hashed). The directory gets its name only when complete and
    on disk; whoever asks meanwhile waits. Raises :class:`RecipeError` when the cache cannot be written.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()
    try:
        final = cache_directory() / f"{name}-{digest}"
        if final.is_dir():
            return final
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_name(f".{final.name}.lock")):
            if not final.is_dir():
                _build(final, build)
    except OSError as error:
        remedy = "set the environment variable AUTOMODEL_CKPT_CACHE to a writable directory with enough free space"
        raise RecipeError.all_of([os_problem(error, "prepared data cannot be stored", remedy=remedy)]) from error
    return final


def _build(final: Path, build: Callable[[Path], None]) -> None:
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        for path in partial.iterdir():
            fsync_file(path)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock ends with the process that holds it, so a killed one blocks nobody."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
