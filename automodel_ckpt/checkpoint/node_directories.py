"""The directories of a run on nodes without shared storage: each node has its own, and a store has all files.

A checkpoint is distributed over the nodes (:mod:`.memory.nodes`), and each of them uploads its files. A start finds the
checkpoints that the nodes have completely together, whatever nodes there are now, and sets the rest aside. If that has
a later checkpoint than the start continues from, it stays until the run publishes a checkpoint: a start with the nodes
that are absent now can continue from it before.

A node that was absent for some time may have checkpoints that the run has abandoned meanwhile. Each start begins a new
generation. It has a random name, which the manifests of its checkpoints contain, and a record in the directory of each
node. If records differ, the one of the latest start is valid, by its time: new nodes do not know how many starts there
were.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import ProcessGroup

from automodel_ckpt.base.durable_io import file_system_of, replace_file
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.files.type_aliases import FileDict, TextDict
from automodel_ckpt.checkpoint.memory.save_files import (
    EARLIER_LOGS,
    remove_set_aside,
    saves_set_aside,
)
from automodel_ckpt.checkpoint.options import CheckpointOptions, Level
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Summary
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.run.links import remove_fetched, step_of
from automodel_ckpt.checkpoint.run.notes import Damaged, read_note, write_note
from automodel_ckpt.checkpoint.transfers import is_scratch_directory
from automodel_ckpt.errors import AutomodelError, RecipeError
from automodel_ckpt.parallel.ranks import agree
from automodel_ckpt.parallel.ranks.network import own_address

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.memory.survey import CheckpointOnNodes


NOTE = "generation"
"""The key in the manifest's ``environment`` with the name of the generation."""


@dataclass(frozen=True)
class Postponed:
    """A later checkpoint, by the *digest* of its manifest, of which absent nodes may have the missing files.

    It continues the logs of the generation with this *number*. Without a digest, there is no such checkpoint.
    """

    digest: str = ""
    number: int = 0


@dataclass(frozen=True)
class RunGeneration:
    """The generation *name* of a run, with its *number* and the digests of the *kept* checkpoints.

    The number is the time in nanoseconds since 1970 at which the generation began, or one more than the number of the
    generation before. The kept checkpoints are the checkpoints of earlier generations that it continues. Without a
    record, a run is in a generation without a name, to which all checkpoints belong. *has_logs* states whether the logs
    of the run are on this node, because rank 0 was there. The run continues from the *postponed* checkpoint if the
    nodes of a start have it completely before the generation publishes a checkpoint. The publication removes what the
    nodes have of it.
    """

    number: int = 0
    name: str = ""
    kept: tuple[str, ...] = ()
    has_logs: bool = False
    postponed: Postponed = field(default_factory=Postponed)

    @classmethod
    def read(cls, run: Path) -> RunGeneration:
        """Read the record in the directory *run*.

        When it is missing or damaged, returns the generation of a run without a record.
        """
        found = read_note(run, layout.GENERATION)
        postponed = found.get("postponed", {"digest": "", "number": 0})
        try:
            return cls(
                int(found["number"]),
                str(found["name"]),
                tuple(str(digest) for digest in found["kept"]),
                bool(found["has_logs"]),
                Postponed(str(postponed["digest"]), int(postponed["number"])),
            )
        except Damaged:
            return cls()

    def write(self, run: Path) -> None:
        """Replace the record in the directory *run*. Raises OSError."""
        write_note(run / layout.GENERATION, asdict(self))

    def is_current(self, summary: Summary) -> bool:
        """Whether the checkpoint with this manifest is of this generation, or of an earlier one that it continues."""
        name = summary.environment.get(NOTE, "")
        continued = (*self.kept, self.postponed.digest)
        return not self.name or name == self.name or summary.digest in continued

    def next(self, kept: Iterable[str], postponed: Postponed | None = None) -> RunGeneration:
        """Return the generation of the next start, which continues the checkpoints with the digests *kept*."""
        # This node's clock may be behind the clock of the start before.
        number = max(self.number + 1, time.time_ns())
        name = uuid.uuid4().hex
        return RunGeneration(number, name, tuple(kept), postponed=postponed or Postponed())


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
_POSTPONED = (
    "the disks of the nodes do not have all files of %s, nor does the store: training continues from an earlier state. "
    "Absent nodes may have the rest. To continue from %s, start again with all nodes before this run saves a checkpoint"
)


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
        with agree.raise_on_all_ranks(group, convert):
            commit.make_run_directory(root)
        from automodel_ckpt.checkpoint.memory.nodes import Nodes, nodes_of_ranks

        of_ranks = [tuple(range(agree.size(group)))]
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
        self._last_here = RunGeneration.read(root)
        """The generation of the last start of this node. It may be earlier than the run's generation."""
        generations = agree.gather_objects(group, self._last_here)
        self._generation = max(generations, key=lambda generation: generation.number)
        self.has_generation = False
        """Whether this start has begun a generation."""
        self.on_nodes: Mapping[Path, CheckpointOnNodes] = {}
        """The checkpoints that the nodes have completely together, by path."""
        with agree.raise_on_all_ranks(group, convert):
            if self.nodes.is_leader:
                commit.recover(root)
                remove_fetched(root)
            if not self.is_one:
                self.nodes.share_hang_reports()
        with agree.raise_on_all_ranks(group, convert):
            if self._generation.postponed.digest:
                # Before the logs of the last start replace them.
                self._keep_logs(self._generation.postponed.number)
        self._bring_logs(generations)
        self.find()

    @property
    def is_one(self) -> bool:
        """Whether all ranks have the same directory."""
        return len(self.nodes.nodes) == 1

    @property
    def generation(self) -> str:
        """The name of the present generation, for the manifests of its checkpoints."""
        return self._generation.name

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
        self._copy_logs(self.root, with_logs)

    def _copy_logs(self, directory: Path, with_logs: Sequence[int]) -> None:
        """Replace the logs of rank 0's node by those in *directory* on the node of the first rank *with_logs*.

        Without such a rank, they are removed.
        """
        source = with_logs[0] if with_logs else 0
        logs = {}
        with agree.raise_on_all_ranks(self._group, self._convert):
            if self._rank == source and with_logs:
                logs = _read_logs(directory)
        logs = agree.broadcast_object(self._group, logs, source)
        with agree.raise_on_all_ranks(self._group, self._convert):
            if self._rank == 0:
                from automodel_ckpt.checkpoint.remote.pull import LOGS

                for name in LOGS:
                    (self.root / name).unlink(missing_ok=True)
                for name, data in logs.items():
                    replace_file(self.root / name, data)

    def _keep_logs(self, number: int) -> None:
        """Copy the logs of the generation with this *number*, if this rank leads the node that has them.

        Not collective. Raises OSError.
        """
        last = self._last_here
        target = self._logs_of(number)
        if not (self.nodes.is_leader and last.has_logs and last.number == number):
            return
        if target.exists():
            return
        # A start removes what is left of it.
        staged = self.root / layout.trash_name()
        staged.mkdir()
        for name, data in _read_logs(self.root).items():
            replace_file(staged / name, data)
        os.rename(staged, target)

    def _logs_of(self, number: int) -> Path:
        return self.root / f"{EARLIER_LOGS}{number}"

    def find(self) -> None:
        """Update :attr:`on_nodes`, and set aside what the nodes do not have completely or the run has abandoned."""
        from automodel_ckpt.checkpoint.memory.survey import survey

        self.on_nodes = survey(self.nodes, self._group, self._level, self._generation.is_current)

    def continue_from(
        self, resumed: Manifest | None, notes: TextDict, *, abandons_later: bool
    ) -> None:
        """Begin a generation that continues from *resumed*, once: see :attr:`has_generation`. *notes* gets its name.

        If it *abandons_later* checkpoints, what the nodes have of them is removed.
        """
        if self.has_generation:
            return
        self.has_generation = True
        step = 0 if resumed is None else resumed.step
        of_generation = "" if resumed is None else resumed.environment.get(NOTE, "")
        self.begin(step, of_generation=of_generation, abandons_later=abandons_later)
        notes[NOTE] = self.generation

    def begin(self, step: int, *, of_generation: str = "", abandons_later: bool = False) -> None:
        """Begin a generation that continues from *step*: later checkpoints of earlier starts are abandoned.

        What :meth:`find` has set aside is removed. Before, another start on more nodes may still use it. Unless
        *abandons_later*, the newest later checkpoint stays until the run publishes one. *of_generation* is the name of
        the generation that the checkpoint of *step* is of: if the present one has published it, the run has gone on
        without the postponed one.
        """
        self._restore_logs(step)
        has_gone_on = of_generation == self._generation.name
        later = None if abandons_later else self._later_checkpoint(step, has_gone_on=has_gone_on)
        postponed = Postponed()
        if later is not None:
            postponed = self._generation.postponed
            if later.digest != postponed.digest:
                postponed = Postponed(later.digest, self._generation.number)
        kept = [
            checkpoint.digest
            for path, checkpoint in self.on_nodes.items()
            if step_of(path.name) <= step
        ]
        generation = agree.broadcast_object(self._group, self._generation.next(kept, postponed))
        with agree.raise_on_all_ranks(self._group, self._convert):
            if postponed.digest:
                # Before the recipe shortens them to the step.
                self._keep_logs(postponed.number)
            if self.nodes.is_leader:
                replace(generation, has_logs=self._rank == 0).write(self.root)
        self._generation = generation
        own = []
        with agree.raise_on_all_ranks(self._group, self._convert):
            if self.nodes.is_leader:
                own = remove_set_aside(self.root, postponed.digest)
        by_rank = agree.gather_objects(self._group, own)
        removed = sorted({name for names in by_rank for name in names})
        if removed and self._rank == 0:
            message = "removed from the disks of the nodes (abandoned, or without all files): %s"
            log.warning(message, ", ".join(removed))
        if later is not None and self._rank == 0:
            name = layout.CheckpointName(later.step, later.epoch)
            log.warning(_POSTPONED, name, name)

    def _later_checkpoint(self, step: int, *, has_gone_on: bool) -> Summary | None:
        """The newest checkpoint after *step* that was set aside because files of it are missing. Collective.

        Not the postponed one, if the run *has_gone_on* without it. Returns None when the nodes have the checkpoint of
        *step*: their disks may have no space for the files that they have of a third one.
        """
        own = []
        with agree.raise_on_all_ranks(self._group, self._convert):
            if self.nodes.is_leader:
                own = saves_set_aside(self.root)
        found = [each for of_rank in agree.gather_objects(self._group, own) for each in of_rank]
        if self._checkpoint_at(step) is not None:
            return None
        abandoned = self._generation.postponed.digest if has_gone_on else ""
        later = []
        for each in found:
            is_current = each.digest != abandoned and self._generation.is_current(each)
            if each.step > step and is_current:
                later.append(each)
        return max(later, key=lambda each: (each.step, each.digest), default=None)

    def _checkpoint_at(self, step: int) -> CheckpointOnNodes | None:
        for path, checkpoint in self.on_nodes.items():
            if step_of(path.name) == step:
                return checkpoint
        return None

    def _restore_logs(self, step: int) -> None:
        """If the run continues from the postponed checkpoint, bring the logs of its generation to rank 0's node.

        The logs of the starts since do not have its steps. Collective.
        """
        found, postponed = self._checkpoint_at(step), self._generation.postponed
        if found is None or found.digest != postponed.digest:
            return
        directory = self._logs_of(postponed.number)
        # A start creates a directory. The target of a link can be anything.
        is_here = self.nodes.is_leader and directory.is_dir() and not directory.is_symlink()
        exist = agree.gather_objects(self._group, is_here)
        with_logs = [rank for rank, exists in enumerate(exist) if exists]
        if with_logs:
            self._copy_logs(directory, with_logs)


def _read_logs(directory: Path) -> FileDict:
    """The contents of the logs in *directory*, by name."""
    found = {}
    from automodel_ckpt.checkpoint.remote.pull import LOGS

    for name in LOGS:
        with contextlib.suppress(FileNotFoundError):
            found[name] = read_safely(directory, name)
    return found


def open_node_directories(
    run: RunDirectory, rank: int, group: ProcessGroup | None, options: CheckpointOptions
) -> NodeDirectories | None:
    """Find out whether the nodes share the directory of *run*, which rank 0 holds. Collective.

    Returns the directories of the nodes if they do not share it, or did not in an earlier start; otherwise None. Raises
    :class:`RecipeError` on all ranks where they have to share it.
    """
    root = run.root
    doing = "checking for shared storage"
    convert = partial(as_failure, doing=doing, where=run.path, kind=RecipeError)
    with agree.raise_on_all_ranks(group, convert):
        without = ranks_without_storage(root, rank, group)
    if without and not is_scratch_directory(root, options):
        raise no_shared_storage(root, without)
    # An earlier start may have distributed checkpoints over the nodes.
    if not without and not any(agree.gather_objects(group, (root / layout.GENERATION).exists())):
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
    name = layout.trash_name()
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
