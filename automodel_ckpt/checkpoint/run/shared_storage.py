"""Find out whether all ranks see the same run directory: they write into one checkpoint, which rank 0 publishes."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.file_system import file_system_of
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.ranks import agree

_PATIENCE_SECONDS = 5.0
"""Network file systems may show a file that another node created only after a few seconds."""
_LOCAL_FILE_SYSTEMS = frozenset(
    {
        "bcachefs",
        "btrfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "overlay",
        "ramfs",
        "tmpfs",
        "xfs",
        "zfs",
    }
)
"""File systems of one kernel: a file there is visible immediately, or it was created elsewhere."""


def ranks_without_storage(directory: Path, rank: int, group: ProcessGroup | None) -> list[int]:
    """List the ranks that do not see a file that rank 0 created in *directory*; equal on all ranks. Collective.

    *directory* is an absolute path that rank 0 has created. Raises OSError on rank 0 if it cannot write there.
    """
    if agree.size(group) == 1:
        return []
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
    return [number for number, sees in enumerate(seen) if not sees]


def no_shared_storage(directory: Path, without: Sequence[int]) -> RecipeError:
    """The error of a run that needs a shared *directory*, which the ranks *without* do not see."""
    return RecipeError(
        "the ranks do not share storage: some do not see a file that rank 0 created",
        where=f"checkpoint.checkpoint_dir: {directory}",
        value=f"not seen by rank {', '.join(str(rank) for rank in without)}",
        hint="use a directory on storage that all nodes mount at the same path, "
        "or the URL of an object store as checkpoint_dir",
    )


def not_without_storage(key: str, value: object) -> RecipeError:
    """The error of a *key* that needs storage that all nodes share, in a run whose checkpoints are in a store only."""
    return RecipeError(
        "the nodes share no storage, so none has all files of a checkpoint",
        where=key,
        value=str(value).lower() if isinstance(value, bool) else str(value),
        hint="remove the key (`ckpt pull` downloads a checkpoint, and `ckpt export` makes Hugging Face files of it), "
        "or set checkpoint.scratch_dir to a directory that all nodes mount",
    )


def _appears(path: Path) -> bool:
    """Whether a file that rank 0 has created is visible here. Waits only if its file system may show it late."""
    is_local = file_system_of(Path(os.path.realpath(path.parent))) in _LOCAL_FILE_SYSTEMS
    end = time.monotonic() + (0.0 if is_local else _PATIENCE_SECONDS)
    while not os.path.exists(path):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
