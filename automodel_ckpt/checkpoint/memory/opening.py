"""Open the directories of a run's memory checkpoints on all nodes: all ranks agree on their name and on the nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.memory.directory import (
    MemoryRecord,
    claim_directory,
    is_outdated,
    make_directory,
)
from automodel_ckpt.checkpoint.memory.nodes import nodes_of_ranks
from automodel_ckpt.errors import AutomodelError, RecipeError
from automodel_ckpt.parallel.ranks import agree

Convert = Callable[[Exception], AutomodelError]


@dataclass(frozen=True, slots=True)
class OpenedMemory:
    """The *directory* of memory checkpoints, which has the same path on all nodes, the ranks of each node, and the
    record of the run."""

    directory: Path
    of_ranks: Sequence[tuple[int, ...]]
    record: MemoryRecord


def open_memory(
    run: Path, parent: Path, group: ProcessGroup | None = None, convert: Convert | None = None
) -> OpenedMemory:
    """Create the directories of *run*'s memory checkpoints in *parent*, or find those of an earlier start. Collective.

    *run* is an existing run directory, whose lease rank 0 holds. A node that has none gets one; if no node has one, the
    run gets a new identity. Directories in *parent* that no run refers to are removed. Raises OSError, and
    :class:`RecipeError` if another user owns a directory, on all ranks; converted by *convert*.
    """
    rank = 0 if group is None else dist.get_rank(group)
    record = agree.broadcast_object(group, MemoryRecord.read(run) if rank == 0 else None)
    is_here = False
    with agree.raise_on_all_ranks(group, convert):
        is_here = record is not None and not is_outdated(parent, record.identity, run)
    if record is None or not any(agree.gather_objects(group, is_here)):
        record = agree.broadcast_object(group, MemoryRecord.create())
        with agree.raise_on_all_ranks(group, convert):
            if rank == 0:
                record.write(run)
    directory = parent
    with agree.raise_on_all_ranks(group, convert):
        directory = make_directory(parent, record.identity)
    _check_same_path(directory, group)
    of_ranks = nodes_of_ranks(directory, group, convert)
    with agree.raise_on_all_ranks(group, convert):
        if any(ranks[0] == rank for ranks in of_ranks):
            claim_directory(directory, run, record.identity)
    return OpenedMemory(directory, of_ranks, record)


def _check_same_path(directory: Path, group: ProcessGroup | None) -> None:
    """Raise :class:`RecipeError` on all ranks if the path is not the same on all of them: the user IDs differ."""
    paths = sorted(set(agree.gather_objects(group, str(directory))))
    if len(paths) > 1:
        raise RecipeError(
            "the ranks of the run belong to different users",
            where="checkpoint.memory.directory",
            value=", ".join(paths),
            hint="run all ranks as the same user, or remove checkpoint.memory",
        )
