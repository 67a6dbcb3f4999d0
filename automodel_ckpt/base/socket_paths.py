"""Unix sockets below a temporary directory with a long path.

The path of a socket has 107 bytes at most. Data workers pass tensors through Python's multiprocessing, which creates
sockets in the temporary directory. Where their paths are too long, the receiver waits forever.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from automodel_ckpt.errors import RecipeError

_MAX_BYTES = 70
"""The longest temporary directory: multiprocessing appends 32 bytes."""
_SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 (mkdtemp creates a private one in it)


@contextlib.contextmanager
def short_temporary_directory() -> Iterator[None]:
    """Inside the context, use the temporary directory by a link with a short path if its own path is too long.

    Raises:
        RecipeError: No such link can be created.
    """
    import tempfile

    directory, given = tempfile.gettempdir(), tempfile.tempdir
    if len(os.fsencode(directory)) <= _MAX_BYTES:
        yield
        return
    parent = _private_directory(directory)
    try:
        tempfile.tempdir = os.path.join(parent, "tmp")
        os.symlink(directory, tempfile.tempdir)
        yield
    finally:
        tempfile.tempdir = given
        shutil.rmtree(parent, ignore_errors=True)


def _private_directory(long: str) -> str:
    import tempfile

    for directory in _SHORT_DIRECTORIES:
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix="ckpt-", dir=directory)
    raise RecipeError(
        "the path of the temporary directory is too long for the sockets of data workers",
        where="TMPDIR",
        value=long,
        hint=f"set TMPDIR to a directory with a path of at most {_MAX_BYTES} bytes",
    )
