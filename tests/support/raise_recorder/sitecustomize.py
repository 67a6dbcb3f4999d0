"""On PYTHONPATH, notes where each of the package's errors is made, in this process and all that it starts.

With RAISE_SITES=DIRECTORY in the environment; ``tools/raise_sites.py`` sets both and reads the notes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import FrameType, ModuleType
from typing import Any

NAME = "automodel_ckpt.errors"


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
                    watch(cls, module.__file__)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch(cls: type, own_file: str | None) -> None:
    made = cls.__init__  # type: ignore[misc]

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        note(sys._getframe(1), own_file)
        made(self, *args, **kwargs)

    cls.__init__ = noted  # type: ignore[misc]


def note(frame: FrameType | None, own_file: str | None) -> None:
    while frame is not None and frame.f_code.co_filename in (own_file, __file__):
        frame = frame.f_back
    if frame is not None:
        os.write(NOTES, f"{os.path.realpath(frame.f_code.co_filename)}:{frame.f_lineno}\n".encode())


if "RAISE_SITES" in os.environ:
    # Opened once, and early: tests of hostile checkpoints watch what is opened later.
    file = os.path.join(os.environ["RAISE_SITES"], str(os.getpid()))
    NOTES = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    sys.meta_path.insert(0, Finder())
