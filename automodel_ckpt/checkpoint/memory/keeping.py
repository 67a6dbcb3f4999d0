"""Keep the newest checkpoint in memory when a run ends with a failure that no restart follows. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from automodel_ckpt.checkpoint.memory.directory import memory_of, remove_memory
from automodel_ckpt.checkpoint.memory.rescue import copy_to_disk
from automodel_ckpt.checkpoint.parts.failures import REPAIR, RESUME
from automodel_ckpt.checkpoint.run.lease import Lease
from automodel_ckpt.errors import AutomodelError, RecipeError, describe, os_problem


def keep_on_disk(run: Path, parent: Path, *, copies: bool = True, by_rank: bool = False) -> str:
    """Copy the newest checkpoint of *run* in the memory of this node to disk, and free the memory.

    Args:
        run: The run directory.
        parent: The value of ``checkpoint.memory.directory``.
        copies: False: free the memory without a copy.
        by_rank: The caller is a rank that ends. While another rank of this node owns the memory, nothing is done: that
            one will do it.

    Raises nothing. Returns a message for the user, empty if there was nothing to copy. After a failure, the memory is
    kept for the next start.
    """
    try:
        directory = memory_of(run.absolute(), parent)
        if directory is None:
            return ""
        # A live run of this directory would own the memory, too.
        try:
            lease = Lease(directory)
        except RecipeError:
            if by_rank:
                return ""
            raise
        try:
            copy = copy_to_disk(directory, run.absolute()) if copies else None
            remove_memory(directory)
        finally:
            lease.release()
    except AutomodelError as error:
        return f"the checkpoints in memory are kept: {describe(error)[1]}"
    except OSError as error:
        what = "the checkpoint in memory could not be copied"
        return str(os_problem(error, what, hint=REPAIR, restart=RESUME))
    return "" if copy is None else f"the newest checkpoint in memory was copied to {copy}"
