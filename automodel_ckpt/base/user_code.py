"""User code that a recipe names: its exceptions are reported as errors of user code, not as internal errors."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from automodel_ckpt.errors import AutomodelError

_WRONG_CALL = re.compile(r"([\w.]+)\(\) (?:takes |missing |got )")
"""The message of Python about arguments that a function does not accept."""
_MAX_PLACES = 3
_user_modules: set[str] = set()
"""Modules that the recipe names and that belong neither to this package nor to a library."""


def register_user_code(module: str) -> None:
    """Register *module*, and its submodules, as user code."""
    _user_modules.add(module)


def register_object(value: object) -> None:
    """Register the module of the class of *value* as user code, unless it is part of this package or of a library."""
    module = type(value).__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    # Neither a notebook nor an interactive session has a file.
    is_library = module != "__main__" and (file is None or _is_in_library(file))
    if not is_library and _owner(module) != "package":
        register_user_code(module)


@functools.cache
def _is_in_library(file: str) -> bool:
    paths = sysconfig.get_paths()
    return any(file.startswith(paths[kind] + os.sep) for kind in ("stdlib", "purelib", "platlib"))


def location_in_user_code(error: BaseException) -> str | None:
    """File and line of the user code that raised *error*, directly or through a library; None when it did not."""
    locations: list[str] = []
    innermost_owner = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner = _owner(frame.f_globals.get("__name__"))
        if owner == "user":
            code = frame.f_code
            locations.append(f"{code.co_filename}:{line} in {code.co_name}")
        # Frames of libraries do not count: user code may fail inside a library that it calls.
        innermost_owner = owner or innermost_owner
    if innermost_owner != "user":
        return _called_wrongly(error)
    return ", called at ".join(reversed(locations[-3:]))


def _called_wrongly(error: BaseException) -> str | None:
    """File and line of the user's function that does not accept the arguments of a call; None for other errors.

    Python raises this error where the function is called, before it enters it. The message has the name of the function
    without its module, so that functions of several modules can be meant.
    """
    match = _WRONG_CALL.match(str(error)) if isinstance(error, TypeError) else None
    if match is None:
        return None
    places: dict[str, None] = {}
    for name, module in list(sys.modules.items()):
        if _owner(name) != "user":
            continue
        found: object = module
        # A module's own __getattr__ can raise anything.
        with suppress(Exception):
            for part in match[1].split("."):
                found = getattr(found, part, None)
        if isinstance(found, types.FunctionType) and _owner(found.__module__) == "user":
            code = found.__code__
            places[f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"] = None
    return " or ".join(list(places)[:_MAX_PLACES]) or None


def _owner(module: object) -> str:
    """Return the owner of a module: ``user``, ``package`` (this one), or an empty text for a library."""
    parts = str(module).split(".")
    for length in range(1, len(parts) + 1):
        if ".".join(parts[:length]) in _user_modules:
            return "user"
    return "package" if parts[0] == "automodel_ckpt" else ""


@contextmanager
def reporting_user_failures(kind: type[AutomodelError]) -> Iterator[None]:
    """Convert exceptions of user code inside this context to an error of type *kind*, with the location in that code.

    Other exceptions are raised unchanged.
    """
    try:
        yield
    except (AutomodelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        location = location_in_user_code(error)
        if location is None:
            raise
        raise kind(
            "user code failed",
            location,
            f"{type(error).__name__}: {error}",
            "fix this code, or the arguments that the recipe passes to it",
        ) from error
