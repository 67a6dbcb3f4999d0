"""Convert any exception of a save or a load to an error for the user, and raise it on all ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from automodel_ckpt.base.user_code import location_in_user_code
from automodel_ckpt.errors import (
    NOT_ALLOWED,
    PERMISSIONS_HINT,
    AutomodelError,
    ExportFailed,
    RecipeError,
    SaveFailed,
    limit_error,
    os_problem,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("automodel_ckpt")

T = TypeVar("T")

REPAIR = "free disk space or repair the directory"
NEXT_SAVE = f"{REPAIR}; the next save tries this again"
SAME_COMMAND = "run the same command"
STALLED = "check for a disk that does not respond or a stopped process"
RESUME = "run the same command to resume from the previous checkpoint"
_NAME_ANOTHER = "set checkpoint.checkpoint_dir to a writable directory with enough free space"
_EXPORT_AGAIN = f"{REPAIR}, then run `ckpt consolidate` to export the checkpoint"
_HINTS = {RecipeError: _NAME_ANOTHER, ExportFailed: _EXPORT_AGAIN}
_DEFECT = "this is a defect, not a mistake of yours: please report it (logging.level: debug shows the traceback)"


def text_while_running(error: AutomodelError) -> str:
    """Return the message of a failure after which the run continues: without the advice to start it again."""
    return "\n".join(str(problem.while_running()) for problem in error.problems)


def as_failure(
    error: Exception,
    doing: str,
    where: Path | str,
    kind: type[AutomodelError] = SaveFailed,
    hint: str | None = None,
    restart: str | None = None,
) -> AutomodelError:
    """Convert *error* to an error for the user; an :class:`AutomodelError` is returned unchanged.

    Others become *kind*, with a message of what was being done (*doing*) and *where*. *hint* is what to do about a
    failed system call; None: the hint for checkpoints. *restart* is what to do then; None: to resume the run, unless a
    hint is given. If the system did not permit the call, the hint is on permissions, followed by the given one.
    """
    if isinstance(error, AutomodelError):
        return error
    if isinstance(error, OSError):
        # Errors of a descriptor's system calls do not contain a path.
        error.filename = error.filename or str(where)
        if error.errno in NOT_ALLOWED:
            hint = PERMISSIONS_HINT if hint is None else f"{PERMISSIONS_HINT}; {hint}"
        elif hint is None:
            hint = _HINTS.get(kind, REPAIR)
            if hint == REPAIR and restart is None:
                restart = RESUME
        return kind.all_of([os_problem(error, f"{doing} failed", hint=hint, restart=restart or "")])
    log.debug("unexpected", exc_info=error)
    limit = limit_error(error)
    if limit is not None:
        (problem,) = limit.problems
        return kind.all_of([replace(problem, what=f"{doing} failed: {problem.what}")])
    location = location_in_user_code(error)
    if location is not None:
        return kind(
            f"{doing} failed in user code",
            where=location,
            value=f"{type(error).__name__}: {error}",
            hint="fix this code",
            restart=SAME_COMMAND,
        )
    return kind(f"{doing} failed", where=where, value=repr(error), hint=_DEFECT)


def raise_on_all_ranks(
    group: ProcessGroup | None,
    doing: str,
    where: Path | str,
    kind: type[AutomodelError] = SaveFailed,
    hint: str | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that raises on all ranks what its block raises on one rank.

    Exceptions that are not errors for the user are converted to *kind*, with *doing* and *where* in the message. *hint*
    is what to do about a failed system call; None: the hint for checkpoints.
    """
    from automodel_ckpt.parallel.ranks import agree  # torch

    return agree.raise_on_all_ranks(group, _conversion(doing, where, kind, hint))


def gather_or_raise(
    group: ProcessGroup | None,
    work: Callable[[], T],
    doing: str,
    where: Path | str,
    kind: type[AutomodelError] = SaveFailed,
    hint: str | None = None,
) -> list[T]:
    """Return the result of *work* of each rank, in their order; raise on all ranks what it raises on one rank.

    One exchange. The other arguments are as in :func:`raise_on_all_ranks`.
    """
    from automodel_ckpt.parallel.ranks import agree

    return agree.gather_or_raise(group, work, _conversion(doing, where, kind, hint))


def _conversion(
    doing: str, where: Path | str, kind: type[AutomodelError], hint: str | None
) -> Callable[[Exception], AutomodelError]:
    return partial(as_failure, doing=doing, where=where, kind=kind, hint=hint)
