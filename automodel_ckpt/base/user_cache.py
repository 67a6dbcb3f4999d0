"""The user's cache: data that can be made again, and the local copies of runs with checkpoints in a store."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """The cache of the user: ``$AUTOMODEL_CKPT_CACHE`` if set, otherwise ``~/.cache/automodel_ckpt``.

    For a user without a writable home, as in containers, it is a directory in the temporary directory.
    Raises PermissionError if that directory belongs to another user.
    """
    named = os.environ.get("AUTOMODEL_CKPT_CACHE")
    if named:
        return Path(named).expanduser()
    home = Path(os.path.expanduser("~/.cache/automodel_ckpt"))
    # expanduser() returns the text unchanged for a user without a home.
    if home.is_absolute() and _can_be_written(home):
        return home
    return _temporary()


def _can_be_written(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


def _temporary() -> Path:
    directory = Path(tempfile.gettempdir()) / f"automodel_ckpt-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    # Another user may have created the directory, or a link with its name, to control the data that is trained on.
    if directory.lstat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(directory))
    return directory
