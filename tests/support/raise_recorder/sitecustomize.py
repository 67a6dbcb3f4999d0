"""On PYTHONPATH, notes where each of the package's errors is made, in this process and all that it starts.

With RAISE_SITES=DIRECTORY in the environment; ``tools/raise_sites.py`` sets both and reads the notes. Noted is each
place that had a part in the error: the calls that led to it, and where the exceptions came from that it words anew.
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

NAME = "automodel_ckpt.errors"
ROOT = str(Path(__file__).resolve().parents[3])
LEAST_DESCRIPTOR = 200
"""Whoever forks closes the descriptors above the standard streams: the command server those below 64."""
noted: set[tuple[str, int]] = set()


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                for cls in (module.AutomodelError, module.Problem):
                    watch(cls)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch(cls: type) -> None:
    made = cls.__init__  # type: ignore[misc]

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        note(sys._getframe(1))
        made(self, *args, **kwargs)

    cls.__init__ = noting  # type: ignore[misc]


def note(frame: FrameType) -> None:
    places = {(at.f_code.co_filename, line) for at, line in traceback.walk_stack(frame)}
    for error in causes(sys.exc_info()[1]):
        places |= {(at.f_code.co_filename, line) for at, line in traceback.walk_tb(error.__traceback__)}
    for file, line in places - noted:
        where = os.path.realpath(file)
        if where.startswith(ROOT):
            os.write(NOTES, f"{where}:{line}\n".encode())
    noted.update(places)


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
