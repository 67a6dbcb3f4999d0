"""The nodes of a run, and the saves that are distributed over their directories.

Each node has a directory on its own tmpfs, or on its own disk if the run is stored in an object store. A checkpoint is
distributed over them: the ranks of a node write their files there, and the node sends copies to the next ``replicas``
nodes. The saves follow the protocol of saves on a shared disk, with three additions. In asynchronous saves, the
additions run in background threads:

1. When the ranks of a node have written, the node sends its files to the next nodes, and then its rank manifests to the
   node of rank 0. When rank 0 has all rank manifests, all copies exist.
2. Rank 0 finalizes the checkpoint, sends the manifest and the files that it wrote itself to the nodes that have its
   copies, and then has all nodes rename their staging directories.
3. When all have, they remove the checkpoints that rank 0 has removed.

A node that fails in between leaves the checkpoint before usable on all others.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from automodel_ckpt.base.durable_io import file_system_identity, kernel_boot_id
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.memory.directory import (
    MemoryRecord,
    claim_directory,
    is_outdated,
    make_directory,
)
from automodel_ckpt.checkpoint.memory.node_process import NodeProcess
from automodel_ckpt.checkpoint.memory.requests import Address, NodeFailed, listens
from automodel_ckpt.checkpoint.run.lease import Lease
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.errors import AutomodelError, RecipeError
from automodel_ckpt.parallel.ranks import agree

Convert = Callable[[Exception], AutomodelError]
Pause = Callable[[float], None]
"""Waits for some seconds, in the thread of a save. Raises when the save was abandoned."""

log = logging.getLogger("automodel_ckpt")

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Node:
    """A node of the run: its ranks, and where its process listens. The first rank leads the node."""

    ranks: tuple[int, ...]
    address: Address


def nodes_of_ranks(
    directory: Path,
    group: ProcessGroup | None,
    convert: Callable[[Exception], AutomodelError] | None = None,
) -> list[tuple[int, ...]]:
    """Group the ranks by the file system that *directory* is on, which exists. Collective.

    Ranks on different machines have different ones; containers of one machine may share one. The groups are ordered by
    their first ranks. Raises OSError on all ranks, converted by *convert*, and :class:`RecipeError` if the path is not
    the same on all of them.
    """
    paths = sorted(set(agree.gather_objects(group, str(directory))))
    if len(paths) > 1:
        raise RecipeError(
            "the ranks have different directories for the checkpoints of this run",
            where="checkpoint.scratch_dir, checkpoint.memory.directory",
            value=", ".join(paths),
            hint="set these to paths that exist on all nodes, and run all ranks as the same user",
        )
    identity: tuple[Any, ...] = ()
    with agree.raise_on_all_ranks(group, convert):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            inode = os.fstat(descriptor).st_ino
            identity = (kernel_boot_id(), *file_system_identity(descriptor), inode)
        finally:
            os.close(descriptor)
    ranks: dict[tuple[Any, ...], list[int]] = {}
    for rank, each in enumerate(agree.gather_objects(group, identity)):
        ranks.setdefault(each, []).append(rank)
    return [tuple(found) for found in ranks.values()]


class Nodes:
    """The nodes of a run with several nodes, from the side of one rank.

    *directory* has this node's checkpoints. It has the same path on all nodes. *of_ranks* are the groups of
    :func:`nodes_of_ranks`. Each node's files are copied to the memory of *replicas* others, with at most
    *bytes_per_second* from each node. With *shares_manifest*, every node gets the manifest.

    Collective: it starts a process on each node, which listens at *host*, an address that the other nodes can reach.
    Raises :class:`AutomodelError` on all ranks.
    """

    def __init__(
        self,
        directory: Path,
        of_ranks: Sequence[tuple[int, ...]],
        rank: int,
        group: ProcessGroup | None,
        *,
        host: str,
        replicas: int,
        bytes_per_second: float | None,
        convert: Callable[[Exception], AutomodelError],
        shares_manifest: bool = False,
    ) -> None:
        self._shares_manifest = shares_manifest
        self.directory = directory
        self.rank = rank
        self.own = next(number for number, ranks in enumerate(of_ranks) if rank in ranks)
        self.is_leader = of_ranks[self.own][0] == rank
        self._process: NodeProcess | None = None
        self._lease: Lease | None = None
        # Only the ranks of this start know it.
        self.token = agree.broadcast_object(group, secrets.token_hex(32))
        with agree.raise_on_all_ranks(group, convert):
            if self.is_leader:
                self._process = NodeProcess(directory, host, self.token, bytes_per_second)
                # Otherwise, another run would remove the directory. Rank 0's checkpointer holds its node's lease.
                if rank != 0:
                    self._lease = Lease(directory)
        own = Address(host, 0) if self._process is None else self._process.address
        addresses = agree.gather_objects(group, own)
        self.nodes = [Node(ranks, addresses[ranks[0]]) for ranks in of_ranks]
        self.replicas = min(replicas, len(self.nodes) - 1)

    @property
    def share(self) -> float:
        """The part of a checkpoint that each node has in its memory, with the copies of others."""
        return (1 + self.replicas) / len(self.nodes)

    @property
    def _others(self) -> list[Address]:
        """The addresses of all other nodes."""
        return [node.address for number, node in enumerate(self.nodes) if number != self.own]

    @property
    def _copy_targets(self) -> list[Address]:
        """The addresses of the nodes that have copies of this node's files."""
        count = len(self.nodes)
        numbers = [(self.own + offset) % count for offset in range(1, self.replicas + 1)]
        return [self.nodes[number].address for number in numbers]

    def start_again(self) -> None:
        """Start the process of this node unless it runs: others read from it. Called by every rank. Raises OSError, and
        :class:`~.requests.NodeFailed`.
        """
        if self._process is not None:
            self._process.start_again()

    def share_hang_reports(self) -> None:
        """Let each node have the reports on hangs of all nodes. Called by every rank. Raises OSError, and
        :class:`~.requests.NodeFailed`.
        """
        if self._process is not None:
            self._process.send_reports(self._others)

    # ---------------------------------------------------------------- a save

    def create(self, staging: Path, directories: Iterable[str]) -> None:
        """Create the directory of a save on this node, with empty *directories* in it. Called by every rank.

        Raises OSError, and :class:`~.requests.NodeFailed`.
        """
        self.start_again()
        for directory in (layout.PARTS, *directories):
            os.makedirs(staging / directory, exist_ok=True)

    def contribute(self, staging: Path, pause: Pause = time.sleep) -> None:
        """Send the files that the ranks of this node have written. Called in the thread of the first rank of a node.

        Raises :class:`~.requests.NodeFailed`.
        """
        assert self._process is not None
        node = self.nodes[self.own]
        parts = [layout.rank_manifest_file(rank) for rank in node.ranks]
        for part in parts:
            while not (staging / part).exists():
                pause(_POLL_SECONDS)
        if self.replicas:
            self._do(pause, "copy", self._copy_targets, staging=staging.name)
        if 0 not in node.ranks:
            # After the copies: they show rank 0 that these exist.
            first = [self.nodes[0].address]
            self._do(pause, "deliver", first, staging=staging.name, files=parts)

    def publish(self, staging: Path, name: str, pause: Pause = time.sleep) -> None:
        """Publish a finalized checkpoint on the other nodes. Called in rank 0's thread."""
        if self.replicas:
            self._do(pause, "copy", self._copy_targets, staging=staging.name)
        if self._shares_manifest:
            files = [layout.MANIFEST]
            self._do(pause, "deliver", self._others, staging=staging.name, files=files)
        self._do(pause, "publish", self._others, staging=staging.name, name=name)

    def remove_others(self, pause: Pause = time.sleep) -> None:
        """Have the other nodes remove the checkpoints that rank 0's node does not have. Called by rank 0."""
        names = [str(name) for name in checkpoint_names(self.directory)]
        if not names:
            return
        try:
            self._do(pause, "keep", self._others, names=names)
        except NodeFailed as failure:
            # The save itself is complete. The next one tries again.
            log.warning("earlier checkpoints were not removed from all nodes: %s", failure)

    def have_ended(self, ranks: Iterable[int]) -> bool:
        """Whether the process of a node of *ranks* does not listen any more: that node has ended, or was released."""
        needed = set(ranks)
        for number, node in enumerate(self.nodes):
            is_needed = number != self.own and not needed.isdisjoint(node.ranks)
            if is_needed and not listens(node.address):
                return True
        return False

    def _do(self, pause: Pause, do: str, to: Sequence[Address], **fields: Any) -> None:
        assert self._process is not None
        document = {"do": do, "to": to, **fields}
        self._process.do(document, lambda: pause(0))

    # ---------------------------------------------------------------- end

    def release(self) -> None:
        """End the process and release the directory; its checkpoints stay."""
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None


@dataclass(frozen=True)
class OpenedMemory:
    """The *directory* of memory checkpoints, which has the same path on all nodes, the ranks of each node, and the
    record of the run."""

    directory: Path
    of_ranks: Sequence[tuple[int, ...]]
    record: MemoryRecord


def open_memory(
    run: Path, parent: Path, group: ProcessGroup | None = None, convert: Convert | None = None
) -> OpenedMemory:
    """Create *run*'s directories of memory checkpoints in *parent*, or find the ones of an earlier start. Collective.

    *run* is an existing run directory. Rank 0 holds its lease. A node that has none gets one; if no node has one, the
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
    of_ranks = nodes_of_ranks(directory, group, convert)
    with agree.raise_on_all_ranks(group, convert):
        if any(ranks[0] == rank for ranks in of_ranks):
            claim_directory(directory, run, record.identity)
    return OpenedMemory(directory, of_ranks, record)
