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

# Network file systems may take a moment to show another machine's new file.
_PATIENCE_SECONDS = 5.0


def check_shared_storage(directory: Path, rank: int, group: ProcessGroup | None) -> None:
    """Raise :class:`RecipeError` on all ranks where one does not see a file that rank 0 created in *directory*.

    Collective. *directory* is an absolute path that rank 0 has created. Raises OSError on rank 0 where it cannot write
    there.
    """
    if agree.size(group) == 1:
        return
    # Named like trash, so that a killed start leaves nothing for good.
    name, failure = layout.trash_name(uuid.uuid4().hex), None
    if rank == 0:
        try:
            (directory / name).touch()
        except OSError as error:
            failure = error
    name = agree.broadcast_object(group, name)
    seen = agree.gather_objects(group, failure is not None or _appears(directory / name))
    if rank == 0:
        (directory / name).unlink(missing_ok=True)
    if failure is not None:
        raise failure
    if not all(seen):
        blind = [number for number, sees in enumerate(seen) if not sees]
        raise RecipeError(
            "the ranks do not share storage: some do not see a file that rank 0 created",
            where=f"checkpoint.checkpoint_dir: {directory}",
            value="not seen by rank " + ", ".join(map(str, blind)),
            hint="use a directory on storage that all nodes mount at the same path",
        )


def _appears(path: Path) -> bool:
    end = time.monotonic() + _PATIENCE_SECONDS
    while not os.path.exists(path):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
