"""On PYTHONPATH, notes where each of the package's errors is made, in this process and all that it starts.

With RAISE_SITES=DIRECTORY in the environment; ``tools/raise_sites.py`` sets both and reads the notes. Noted is each
place that had a part in the error: the calls that led to it, and where the exceptions came from that it words anew. So
are those of an exception that a test expects by ``pytest.raises``.
"""

from __future__ import annotations

import fcntl
import importlib.abc
import importlib.machinery
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

PACKAGE = "automodel_ckpt."
ERRORS = PACKAGE + "errors"
EXPECTED = "_pytest.raises"
ROOT = str(Path(__file__).resolve().parents[3])
LEAST_DESCRIPTOR = 200
"""Whoever forks closes the descriptors above the standard streams: the command server those below 64."""
noted: set[tuple[str, int]] = set()


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != EXPECTED and not name.startswith(PACKAGE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if name == EXPECTED:
                    watch_expected(module.RaisesExc)
                elif name == ERRORS:
                    watch(module.AutomodelError)
                    watch(module.Problem)
                else:
                    for own in exceptions_of(module):
                        remember(own)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch(cls: type) -> None:
    made = cls.__init__  # type: ignore[misc]

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        note(sys._getframe(1), sys.exc_info()[1])
        made(self, *args, **kwargs)

    cls.__init__ = noting  # type: ignore[misc]


def exceptions_of(module: ModuleType) -> list[type]:
    """Those that it defines beside our errors."""
    kinds = [
        value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return [kind for kind in kinds if issubclass(kind, Exception)]


def remember(cls: type) -> None:
    """Have each of these exceptions know where it was made: where it was raised may be its maker's caller."""
    made = cls.__init__  # type: ignore[misc]

    def remembering(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.made_at = places_of(traceback.walk_stack(sys._getframe(1)))

    cls.__init__ = remembering  # type: ignore[misc]


def watch_expected(cls: type) -> None:
    left = cls.__exit__  # type: ignore[attr-defined]

    def noting(self: Any, kind: Any, error: BaseException | None, at: Any) -> Any:
        note(None, error)
        return left(self, kind, error, at)

    cls.__exit__ = noting  # type: ignore[attr-defined]


def note(frame: FrameType | None, error: BaseException | None) -> None:
    places = places_of(traceback.walk_stack(frame)) if frame else set()
    for one in causes(error):
        places |= places_of(traceback.walk_tb(one.__traceback__)) | getattr(one, "made_at", set())
    for file, line in places - noted:
        where = os.path.realpath(file)
        if where.startswith(ROOT):
            os.write(NOTES, f"{where}:{line}\n".encode())
    noted.update(places)


def places_of(calls: Iterator[tuple[FrameType, int]]) -> set[tuple[str, int]]:
    return {(at.f_code.co_filename, line) for at, line in calls}


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


if "RAISE_SITES" in os.environ:
    # Opened once, and early: tests of hostile checkpoints watch what is opened later.
    file = os.open(os.path.join(os.environ["RAISE_SITES"], str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    NOTES = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, LEAST_DESCRIPTOR)
    os.close(file)
    sys.meta_path.insert(0, Finder())
