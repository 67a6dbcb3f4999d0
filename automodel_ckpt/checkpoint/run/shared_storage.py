"""Check that all ranks see the same run directory: they write into one checkpoint, which rank 0 publishes."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.distributed import agree
from automodel_ckpt.errors import RecipeError

# Network file systems may show a file that another node created only after a few seconds.
_PATIENCE_SECONDS = 5.0


def check_shared_storage(directory: Path, rank: int, group: ProcessGroup | None) -> None:
    """Raise :class:`RecipeError` on all ranks if one of them does not see a file that rank 0 created in *directory*.

    Collective. *directory* is an absolute path that rank 0 has created. Raises OSError on rank 0 if it cannot write
    there.
    """
    if agree.size(group) == 1:
        return
    # Named like trash, so that the next start removes what a killed start left.
    name = layout.trash_name(uuid.uuid4().hex)
    failure = None
    if rank == 0:
        try:
            (directory / name).touch()
        except OSError as error:
            failure = error
    # Each rank drew another name; that of rank 0 counts. The broadcast also orders its touch()
    # before the other ranks' checks.
    name = agree.broadcast_object(group, name)
    # If rank 0 cannot write, no rank waits for the file.
    is_seen = failure is not None or _appears(directory / name)
    seen = agree.gather_objects(group, is_seen)
    if rank == 0:
        (directory / name).unlink(missing_ok=True)
    if failure is not None:
        raise failure
    if not all(seen):
        without = [str(number) for number, sees in enumerate(seen) if not sees]
        raise RecipeError(
            "the ranks do not share storage: some do not see a file that rank 0 created",
            where=f"checkpoint.checkpoint_dir: {directory}",
            value=f"not seen by rank {', '.join(without)}",
            hint="use a directory on storage that all nodes mount at the same path; "
            "if checkpoint_dir is a URL, set checkpoint.scratch_dir to it",
        )


def _appears(path: Path) -> bool:
    end = time.monotonic() + _PATIENCE_SECONDS
    while not os.path.exists(path):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
