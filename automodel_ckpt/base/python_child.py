"""Start another process of this package (the only place that starts a Python interpreter), and protect forked ones.

``python -m`` and ``python -c`` search the current directory first: a ``json.py`` next to a recipe would be executed. A
process that is started here has the search path of this one, which contains what the user's PYTHONPATH, an editable
installation or a script added, and imports nothing before the path is set.

Objects in reference cycles wait for Python's garbage collector. A forked process inherits them, and must not destroy
them: destructors of process groups and stores wait for threads that only the parent has, tensors can use a GPU
that the child cannot, and some destructors abort the process. A collection can begin as soon as the child allocates
objects, which includes the hooks that libraries register with :func:`os.register_at_fork`.

The path of a Unix socket has 107 bytes at most. Data workers pass tensors through Python's multiprocessing, which
creates sockets in the temporary directory. Where their paths are too long, the receiver waits forever.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from automodel_ckpt.errors import RecipeError

_START = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); "
    "import importlib; sys.exit(importlib.import_module(sys.argv.pop(1)).main(sys.argv[1:]))"
)


def start_python(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that calls ``main(arguments)`` of a module and exits with the code that it returns.

    Args:
        module: The full name of the module.
        arguments: The list of strings that ``main`` gets.
        options: Options of :class:`subprocess.Popen`.

    Returns:
        The process.

    Raises:
        OSError: The process could not be started.
    """
    path = "\n".join(os.path.abspath(entry) for entry in sys.path)
    # -P also protects the helper processes of multiprocessing, which inherit the flags of the interpreter.
    command = [sys.executable, "-P", "-c", _START, path, module, *arguments]
    return subprocess.Popen(command, **options)


_is_registered = False
_before_fork = threading.local()


def freeze_in_forked_processes() -> None:
    """Let no process that is forked from now on collect what it inherits (:func:`gc.freeze`).

    It concerns all forks of this process and of its children, also forks by other libraries, for example the workers of
    a DataLoader. Processes that :mod:`subprocess` starts inherit no objects. Further calls do nothing.
    """
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    os.register_at_fork(
        before=_pause,
        after_in_parent=_resume,
        after_in_child=_freeze_and_resume,
    )


def _pause() -> None:
    """Disable the collector: hooks of other libraries may run in the child before the hook of this module."""
    _before_fork.was_enabled = gc.isenabled()
    gc.disable()


def _resume() -> None:
    if _before_fork.was_enabled:
        gc.enable()


def _freeze_and_resume() -> None:
    gc.freeze()
    _resume()


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
