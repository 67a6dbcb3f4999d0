"""Collective error handling: an exception on one rank is raised on all ranks, with its message."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.errors import AutomodelError, SaveFailed
from automodel_ckpt.parallel.ranks import agree

T = TypeVar("T")


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
    return agree.gather_or_raise(group, work, _conversion(doing, where, kind, hint))


def _conversion(
    doing: str, where: Path | str, kind: type[AutomodelError], hint: str | None
) -> Callable[[Exception], AutomodelError]:
    return partial(as_failure, doing=doing, where=where, kind=kind, hint=hint)
