"""Collective error handling: an exception on one rank is raised on all ranks, with its message."""

from __future__ import annotations

import contextlib
from pathlib import Path

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.failures import as_failure
from automodel_ckpt.distributed import agree
from automodel_ckpt.errors import AutomodelError, SaveFailed


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

    def convert(error: Exception) -> AutomodelError:
        return as_failure(error, doing, where, kind, hint)

    return agree.raise_on_all_ranks(group, convert)
