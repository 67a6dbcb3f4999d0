"""The directories of a run on nodes without shared storage: each node has its own, and a store has all files.

A checkpoint is distributed over the nodes (:mod:`.memory.nodes`), and each of them uploads its files. A start finds the
checkpoints that the nodes have completely together, whatever nodes there are now, and sets the rest aside until it
begins to train.

A node that was absent for some time may have checkpoints that the run has abandoned meanwhile. Each start therefore
begins a new generation. It has a random name, which the manifests of its checkpoints contain, and a record in the
directory of each node. If records differ, the one of the latest start is valid, by its time: new nodes do not know how
many starts there were.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import ProcessGroup

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.ownership import file_system_of
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.options import CheckpointOptions
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.collective_errors import raise_on_all_ranks
from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.parts.verify import Level
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.run.notes import Damaged, read_note, write_note
from automodel_ckpt.checkpoint.run.transfer_files import remove_fetched
from automodel_ckpt.checkpoint.transfers import is_scratch_directory
from automodel_ckpt.errors import AutomodelError, RecipeError
from automodel_ckpt.parallel.ranks import agree
from automodel_ckpt.parallel.ranks.network import own_address

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.memory.survey import CheckpointOnNodes


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

log = logging.getLogger("automodel_ckpt")

Convert = Callable[[Exception], AutomodelError]
NOTE = "generation"
"""The key in the manifest's ``environment`` with the name of the generation."""


@dataclass(frozen=True, slots=True)
class RunGeneration:
    """The generation *name* of a run, with its *number* and the digests of the *kept* checkpoints.

    The number is the time in nanoseconds since 1970 at which the generation began, or one more than the number of the
    generation before. The kept checkpoints are the checkpoints of earlier generations that it continues. Without a
    record, a run is in a generation without a name, to which all checkpoints belong. *has_logs* states whether the logs
    of the run are on this node, because rank 0 was there.
    """

    number: int = 0
    name: str = ""
    kept: tuple[str, ...] = ()
    has_logs: bool = False

    @classmethod
    def read(cls, run: Path) -> RunGeneration:
        """Read the record in the directory *run*.

        When it is missing or damaged, returns the generation of a run without a record.
        """
        found = read_note(run, layout.GENERATION)
        try:
            return cls(
                int(found["number"]),
                str(found["name"]),
                tuple(str(digest) for digest in found["kept"]),
                bool(found["has_logs"]),
            )
        except Damaged:
            return cls()

    def write(self, run: Path) -> None:
        """Replace the record in the directory *run*. Raises OSError."""
        write_note(run / layout.GENERATION, asdict(self))

    def is_current(self, summary: Summary) -> bool:
        """Whether the checkpoint with this manifest is of this generation, or of an earlier one that it continues."""
        name = summary.environment.get(NOTE, "")
        return not self.name or name == self.name or summary.digest in self.kept

    def next(self, kept: Iterable[str]) -> RunGeneration:
        """Return the generation of the next start, which continues the checkpoints with the digests *kept*."""
        # This node's clock may be behind the clock of the start before.
        number = max(self.number + 1, time.time_ns())
        return RunGeneration(number, uuid.uuid4().hex, tuple(kept))


class NodeDirectories:
    """The directories *root* of all nodes, with the same path on each. Rank 0 holds the lease of its node's.

    *level* is how files are verified. If *is_shared*, all ranks see the same directory, and continue a run that had
    separate ones. Methods are collective unless they state otherwise, and raise on all ranks what one of them raises;
    *convert* makes an error for the user of it.
    """

    def __init__(
        self,
        root: Path,
        group: ProcessGroup | None,
        level: Level,
        convert: Convert,
        *,
        is_shared: bool = False,
    ) -> None:
        """Start a process on each node, and find the checkpoints of earlier starts."""
        self.root = root
        self._group, self._level, self._convert = group, level, convert
        self._rank = 0 if group is None else dist.get_rank(group)
        self._check_same_path()
        with agree.raise_on_all_ranks(group, convert):
            commit.make_run_directory(root)
        of_ranks = [tuple(range(agree.size(group)))]
        from automodel_ckpt.checkpoint.memory.nodes import Nodes, nodes_of_ranks

        if not is_shared:
            of_ranks = nodes_of_ranks(root, group, convert)
        self.nodes = Nodes(
            root,
            of_ranks,
            self._rank,
            group,
            host=own_address(group),
            replicas=0,
            bytes_per_second=None,
            convert=convert,
            shares_manifest=True,
        )
        # The last start of this node may be earlier than the last start of the run.
        generations = agree.gather_objects(group, RunGeneration.read(root))
        self._generation = max(generations, key=lambda generation: generation.number)
        self.on_nodes: Mapping[Path, CheckpointOnNodes] = {}
        """The checkpoints that the nodes have completely together, by path."""
        with agree.raise_on_all_ranks(group, convert):
            if self.nodes.is_leader:
                commit.recover(root)
                remove_fetched(root)
            if not self.is_one:
                self.nodes.share_hang_reports()
        self._bring_logs(generations)
        self.find()

    @staticmethod
    def were_used(root: Path, group: ProcessGroup | None) -> bool:
        """Whether an earlier start has distributed checkpoints over directories *root*. Collective."""
        return any(agree.gather_objects(group, (root / layout.GENERATION).exists()))

    @property
    def is_one(self) -> bool:
        """Whether all ranks have the same directory."""
        return len(self.nodes.nodes) == 1

    @property
    def generation(self) -> str:
        """The name of the present generation, for the manifests of its checkpoints."""
        return self._generation.name

    def _check_same_path(self) -> None:
        paths = sorted(set(agree.gather_objects(self._group, str(self.root))))
        if len(paths) > 1:
            raise RecipeError(
                "the nodes have different directories for the checkpoints of this run",
                where="checkpoint.scratch_dir",
                value=", ".join(paths),
                hint="set checkpoint.scratch_dir to a path that exists on all nodes",
            )

    def _bring_logs(self, generations: Sequence[RunGeneration]) -> None:
        """Bring the logs of the last start to rank 0's node. *generations* are the generations of all ranks' nodes.

        If no node has them, rank 0's node has none afterwards: the store has them up to its newest checkpoint.
        """
        last = self._generation.number
        with_logs = [
            rank for rank, each in enumerate(generations) if each.has_logs and each.number == last
        ]
        if last == 0 or 0 in with_logs:
            return
        from automodel_ckpt.checkpoint.remote.pull import LOGS

        source = with_logs[0] if with_logs else 0
        logs: dict[str, bytes] = {}
        with agree.raise_on_all_ranks(self._group, self._convert):
            if self._rank == source and with_logs:
                for name in LOGS:
                    with contextlib.suppress(FileNotFoundError):
                        logs[name] = read_safely(self.root, name)
        logs = agree.broadcast_object(self._group, logs, source)
        with agree.raise_on_all_ranks(self._group, self._convert):
            for name in LOGS if self._rank == 0 else ():
                (self.root / name).unlink(missing_ok=True)
                if name in logs:
                    replace_file(self.root / name, logs[name])

    def find(self) -> None:
        """Update :attr:`on_nodes`, and set aside what the nodes do not have completely or the run has abandoned."""
        from automodel_ckpt.checkpoint.memory.survey import survey

        self.on_nodes = survey(self.nodes, self._group, self._level, self._generation.is_current)

    def begin(self, step: int) -> None:
        """Begin a generation that continues from *step*: later checkpoints of earlier starts are abandoned.

        What :meth:`find` has set aside is removed. Before, another start on more nodes may still use it.
        """
        from automodel_ckpt.checkpoint.memory.save_files import remove_set_aside

        kept = []
        for path, checkpoint in self.on_nodes.items():
            name = layout.parse_checkpoint_name(path.name)
            if name is not None and name.step <= step:
                kept.append(checkpoint.digest)
        self._generation = agree.broadcast_object(self._group, self._generation.next(kept))
        own: list[str] = []
        with agree.raise_on_all_ranks(self._group, self._convert):
            if self.nodes.is_leader:
                replace(self._generation, has_logs=self._rank == 0).write(self.root)
                own = remove_set_aside(self.root)
        by_rank = agree.gather_objects(self._group, own)
        removed = sorted({name for names in by_rank for name in names})
        if removed and self._rank == 0:
            message = "removed from the disks of the nodes (abandoned, or without all files): %s"
            log.warning(message, ", ".join(removed))

    def release(self) -> None:
        """End the process of this node. Not collective."""
        self.nodes.release()


def open_node_directories(
    run: RunDirectory, rank: int, group: ProcessGroup | None, options: CheckpointOptions
) -> NodeDirectories | None:
    """Find out whether the nodes share the directory of *run*, which rank 0 holds. Collective.

    Returns the directories of the nodes if they do not share it, or did not in an earlier start; otherwise None. Raises
    :class:`RecipeError` on all ranks where they have to share it.
    """
    root = run.root
    with raise_on_all_ranks(group, "checking for shared storage", run.path, RecipeError):
        without = ranks_without_storage(root, rank, group)
    if without and not is_scratch_directory(root, options):
        raise no_shared_storage(root, without)
    if not without and not NodeDirectories.were_used(root, group):
        return None
    convert = partial(as_failure, doing="opening the run directory", where=root, kind=RecipeError)
    return NodeDirectories(root, group, options.verify, convert, is_shared=not without)


def check_node_options(options: CheckpointOptions) -> None:
    """Raise :class:`RecipeError` for options that nodes without shared storage do not support."""
    unsupported = {
        "model_layout": options.model_layout == "hf",
        "incremental": options.incremental is True,
        "on_incompatible": options.on_incompatible == "sibling",
    }
    for key, is_set in unsupported.items():
        if is_set:
            raise not_without_storage(f"checkpoint.{key}", getattr(options, key))


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
    # Each rank drew another name; rank 0's name counts. The broadcast also orders its touch()
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
    """The error of a *key* that needs storage that all nodes share, in a run with checkpoints in a store only."""
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
