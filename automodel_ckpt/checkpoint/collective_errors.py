"""Collective error handling: an exception on one rank is raised on all ranks, with its message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.failures import as_failure
from automodel_ckpt.distributed import agree
from automodel_ckpt.errors import AutomodelError, SaveFailed


@contextlib.contextmanager
def raise_on_all_ranks(
    group: ProcessGroup | None, doing: str, where: Path, kind: type[AutomodelError] = SaveFailed
) -> Iterator[None]:
    """Raise on all ranks what the block raises on one rank.

    Exceptions that are not errors for the user are converted to *kind*, with *doing* and *where* in the message.
    """
    failure: AutomodelError | None = None
    try:
        yield
    except Exception as error:
        failure = as_failure(error, doing, where, kind)
    agree.all_or_nothing(group, failure)
