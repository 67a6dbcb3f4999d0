"""How whatever goes wrong in a save or a load becomes an error for the user."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.errors import (
    AutomodelError,
    ExportFailed,
    RecipeError,
    SaveFailed,
    limit_error,
    os_problem,
)
from automodel_ckpt.user_code import location_in_user_code

log = logging.getLogger("automodel_ckpt")

RETRY = "free disk space or repair the directory, then run the same command to resume from the previous checkpoint"
_NAME_ANOTHER = "set checkpoint.checkpoint_dir to a writable directory with enough free space"
_EXPORT_AGAIN = (
    "free disk space or repair the directory, then run `ckpt consolidate` to export the checkpoint"
)
_DEFECT = "this is a defect, not a mistake of yours: please report it (logging.level: debug shows the traceback)"


def as_failure(
    error: Exception, doing: str, where: Path, kind: type[AutomodelError] = SaveFailed
) -> AutomodelError:
    """*error* as one for the user: our own as they are, others as *kind*, saying what was being done and *where*."""
    if isinstance(error, AutomodelError):
        return error
    if isinstance(error, OSError):
        error.filename = error.filename or str(where)
        hint = (
            _NAME_ANOTHER
            if kind is RecipeError
            else _EXPORT_AGAIN
            if kind is ExportFailed
            else RETRY
        )
        return kind.all_of([os_problem(error, f"{doing} failed", hint=hint)])
    log.debug("unexpected", exc_info=error)
    if (limit := limit_error(error)) is not None:
        (problem,) = limit.problems
        return kind.all_of([replace(problem, what=f"{doing} failed: {problem.what}")])
    place = location_in_user_code(error)
    if place is not None:
        said, hint = (
            f"{type(error).__name__}: {error}",
            "fix that code, then run the same command",
        )
        return kind(
            f"{doing} failed in user code that the recipe names",
            where=place,
            value=said,
            hint=hint,
        )
    return kind(f"{doing} failed", where=str(where), value=repr(error), hint=_DEFECT)
