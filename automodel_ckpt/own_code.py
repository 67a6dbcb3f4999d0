"""Code of the user's own, which a recipe names: known, so that its exceptions are told as its own and not as ours."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from automodel_ckpt.errors import AutomodelError, Problem

_own_modules: set[str] = set()  # what the recipe names of code that is neither ours nor a library's


def note_own_code(module: str) -> None:
    """Have what is raised in this module, and in the modules of this package, be told as the user's own."""
    _own_modules.add(module)


def place_in_own_code(error: BaseException) -> str | None:
    """File and line of the recipe's own code that raised *error*, or had a library raise it; None where ours did."""
    places = [(_owner(f.f_globals.get("__name__")), f, line) for f, line in traceback.walk_tb(error.__traceback__)]
    if next((owner for owner, _, _ in reversed(places) if owner), "") != "user":
        return None
    chain = [f"{f.f_code.co_filename}:{line} in {f.f_code.co_name}" for owner, f, line in places if owner == "user"]
    return ", called at ".join(reversed(chain[-3:]))


def _owner(module: object) -> str:
    """``user``, ``ours``, or nobody for a library."""
    parts = str(module).split(".")
    names = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return "user" if names & _own_modules else "ours" if parts[0] == "automodel_ckpt" else ""


@contextmanager
def telling_own_failures(kind: type[AutomodelError]) -> Iterator[None]:
    """Inside, what the recipe's own code raises becomes an error of this *kind* that tells where in that code."""
    try:
        yield
    except (AutomodelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = place_in_own_code(error)
        if place is None:
            raise
        problem = Problem(
            "user code failed",
            place,
            f"{type(error).__name__}: {error}",
            "fix this code, or the arguments that the recipe passes to it",
        )
        raise kind.all_of([problem]) from error
