"""User code that a recipe names: its exceptions are reported as errors of user code, not as internal errors."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from automodel_ckpt.errors import AutomodelError, Problem

_user_modules: set[str] = (
    set()
)  # modules named by the recipe, neither of this package nor of a library


def register_user_code(module: str) -> None:
    """Register *module*, and its submodules, as user code."""
    _user_modules.add(module)


def location_in_user_code(error: BaseException) -> str | None:
    """File and line of the user code that raised *error*, directly or through a library; None if it did not."""
    places = [
        (_owner(f.f_globals.get("__name__")), f, line)
        for f, line in traceback.walk_tb(error.__traceback__)
    ]
    if next((owner for owner, _, _ in reversed(places) if owner), "") != "user":
        return None
    chain = [
        f"{f.f_code.co_filename}:{line} in {f.f_code.co_name}"
        for owner, f, line in places
        if owner == "user"
    ]
    return ", called at ".join(reversed(chain[-3:]))


def _owner(module: object) -> str:
    """``user`` or ``ours``; empty for a library."""
    parts = str(module).split(".")
    names = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return "user" if names & _user_modules else "ours" if parts[0] == "automodel_ckpt" else ""


@contextmanager
def reporting_user_failures(kind: type[AutomodelError]) -> Iterator[None]:
    """Convert exceptions of user code inside this context to an error of type *kind* with the place in that code."""
    try:
        yield
    except (AutomodelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = location_in_user_code(error)
        if place is None:
            raise
        problem = Problem(
            "user code failed",
            place,
            f"{type(error).__name__}: {error}",
            "fix this code, or the arguments that the recipe passes to it",
        )
        raise kind.all_of([problem]) from error
