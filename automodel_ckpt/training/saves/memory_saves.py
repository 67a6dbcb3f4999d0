"""Checkpoints in memory, between those on disk: a restart after a failure loses a step instead of many."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed import ProcessGroup

from automodel_ckpt.base.units import counted, size_text
from automodel_ckpt.checkpoint.checkpointer import Checkpointer, Resumed
from automodel_ckpt.checkpoint.files.layout import RankLayout
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.memory.directory import GENERATION, remove_memory
from automodel_ckpt.checkpoint.memory.nodes import Nodes, open_memory
from automodel_ckpt.checkpoint.memory.save_files import is_of_save, remove_set_aside
from automodel_ckpt.checkpoint.memory.survey import CheckpointOnNodes, survey
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.failures import text_while_running
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig, MemoryConfig
from automodel_ckpt.errors import AutomodelError, LeaseLost, RecipeError, SaveFailed
from automodel_ckpt.parallel.ranks import agree
from automodel_ckpt.parallel.ranks.network import own_address
from automodel_ckpt.training.counters.step_scheduler import StepScheduler

log = logging.getLogger("automodel_ckpt")

_STALL_SHARE = 0.01
"""With ``every_steps: auto``, training waits for copies for at most about this share of its time."""
_MAX_FAILURES = 3
_OTHER_DIRECTORY = (
    "enlarge this tmpfs (docker run --shm-size), set checkpoint.memory.directory to another one that this user can "
    "write, or remove checkpoint.memory"
)

SaveState = Callable[[Checkpointer], object]
"""Saves the present step with a checkpointer."""


class MemorySaves:
    """Saves the state of a run to memory after every few steps, asynchronously, and removes it when the run ends.

    *disk* is the checkpointer of the run directory, which finds the memory checkpoints of an earlier start from the
    construction on. On several nodes, each checkpoint is distributed over their memory. All methods are collective
    unless they state otherwise. Raises :class:`RecipeError` on all ranks if the directory cannot be used.
    """

    def __init__(
        self,
        section: MemoryConfig,
        options: CheckpointConfig,
        disk: Checkpointer,
        ranks: RankLayout,
        group: ProcessGroup | None,
        timeout_seconds: float,
    ) -> None:
        """*section* is ``checkpoint.memory``, and *options* the section that contains it."""
        self._group = group
        self._disk = disk
        self._verify = options.verify
        self._is_rank0 = ranks.rank == 0
        self._is_auto = section.every_steps == "auto"
        self._every_steps = 1 if section.every_steps == "auto" else section.every_steps
        self._num_failures = 0
        self._last_failed = False
        self._gave_up = False
        self._next_step = 0
        self._last_saved = (0, time.monotonic())
        """The step of the last save, and when it began."""
        rate = section.max_mb_per_second
        run = disk.directory.absolute()
        opened = open_memory(run, Path(section.directory), group, _as_recipe_error)
        self.directory = opened.directory
        """The directory of this run's memory checkpoints, on this node."""
        self._record = opened.record
        self.nodes: Nodes | None = None
        """The nodes of a run on several nodes."""
        if len(opened.of_ranks) > 1:
            self.nodes = Nodes(
                self.directory,
                opened.of_ranks,
                ranks.rank,
                group,
                host=own_address(group),
                replicas=section.replicas,
                bytes_per_second=None if rate is None else 1e6 * rate,
                convert=_as_recipe_error,
            )
        if self.nodes is not None and self._is_rank0:
            log.info(
                "checkpoints in memory are distributed over %s, with %s of each node's part on others",
                counted(len(self.nodes.nodes), "node"),
                counted(self.nodes.replicas, "copy", "copies"),
            )
        self._on_nodes: dict[Path, CheckpointOnNodes] = {}
        self.find()
        # None after a failure.
        self.checkpointer: Checkpointer | None = Checkpointer(
            self.directory,
            ranks,
            group,
            memory_options(options, is_distributed=self.nodes is not None),
            timeout_seconds=timeout_seconds,
            is_quiet=True,
            nodes=self.nodes,
        )
        self.checkpointer.open()

    def find(self) -> None:
        """Let the checkpointer of the run directory find the checkpoints in memory. Collective.

        On several nodes, these are the ones that all nodes together have completely. There are none after a failure.
        """
        if self._gave_up:
            return
        if self.nodes is not None:
            self._on_nodes = survey(self.nodes, self._group, self._verify, self._record.is_current)
        self._disk.run.memory, self._disk.loader.on_nodes = self.directory, dict(self._on_nodes)

    def share_notes(self, disk: Checkpointer) -> None:
        """Give memory checkpoints the notes of *disk*'s checkpoints, and their files in addition to weights. Local."""
        if self.checkpointer is not None:
            self.checkpointer.assets.update(disk.assets)
            self.checkpointer.notes.update(disk.notes)

    def start(self, resumed: Resumed | None, step: int) -> None:
        """Remove what an earlier start left, except the checkpoint that was *resumed*. The run is at *step*."""
        self._next_step = step + self._every_steps
        self._last_saved = (step, time.monotonic())
        base = resumed if resumed is not None and resumed.in_memory else None
        with agree.raise_on_all_ranks(self._group, _as_recipe_error):
            if self._is_rank0:
                # From here on, other checkpoints on nodes that are not reachable now are never used.
                self._record = self._record.next("" if base is None else base.manifest.digest)
                self._record.write(self._disk.directory.absolute())
        self._record = agree.broadcast_object(self._group, self._record)
        if self.checkpointer is not None:
            self.checkpointer.notes[GENERATION] = self._record.generation
        if self._gave_up:
            return
        with agree.raise_on_all_ranks(self._group, _as_recipe_error):
            if self._is_rank0 or (self.nodes is not None and self.nodes.is_leader):
                self._remove_all_but(None if base is None else base.path.name)

    def check_space(self, state: Values) -> None:
        """Save nothing to memory, with a warning, if the node of rank 0 has too little for checkpoints of *state*.

        Called before the first step. Collective.
        """
        checkpointer = self.checkpointer
        if checkpointer is None:
            return
        doing = "estimating the size of a checkpoint in memory"
        try:
            checkpointer.call_on_rank0(doing, partial(self._check_fits, checkpointer, state))
        except SaveFailed as failure:
            self._give_up(failure, "no")

    def _check_fits(self, checkpointer: Checkpointer, state: Values) -> None:
        """Raise :class:`SaveFailed` if this node has too little memory for its parts of checkpoints of *state*."""
        forecast = checkpointer.forecast(state)
        share = 1.0 if self.nodes is None else self.nodes.share
        # The checkpoint before is removed when the next one is complete.
        num_new = 1 if checkpoint_names(self.directory) else 2
        needed = num_new * int(forecast.nbytes * share)
        if needed <= forecast.free_bytes:
            return
        free = size_text(forecast.free_bytes)
        raise SaveFailed(
            "there is too little space for checkpoints in memory",
            where=str(self.directory),
            value=f"two at a time need about {size_text(2 * forecast.nbytes * share)}, {free} are free",
            hint=_OTHER_DIRECTORY,
        )

    def _remove_all_but(self, kept: str | None) -> None:
        # Someone may have removed it, as systemd does at the end of a session. The next save reports that.
        if not self.directory.is_dir():
            return
        commit.recover(self.directory)
        remove_set_aside(self.directory)
        for name in checkpoint_names(self.directory):
            if str(name) != kept and is_of_save(self.directory / str(name)):
                commit.discard(commit.withdraw(self.directory / str(name)))

    def is_due(self, scheduler: StepScheduler) -> bool:
        """Whether the present step is to be saved. A collective, with ``every_steps: auto``."""
        checkpointer = self.checkpointer
        if checkpointer is None or scheduler.step < self._next_step:
            return False
        if not self._is_auto:
            return True
        num_writing, num_failed = agree.sum_over_ranks(
            self._group, checkpointer.is_writing, checkpointer.upload_failed
        )
        return num_writing == 0 or num_failed > 0

    def save(self, step: int, save: SaveState) -> None:
        """Save the present *step* with *save*. It first waits for an earlier save that is still in progress.

        After a failure, a warning is logged, and the next step that is due is saved. After _MAX_FAILURES in a row,
        saves to memory end. Training continues.
        """
        assert self.checkpointer is not None, "it was due"
        # A save in progress does it when it is published.
        if self._is_rank0 and not self._disk.is_writing:
            # Otherwise, a restart would prefer their later steps to the checkpoint that is saved now.
            # After a lost lease, all ranks raise it soon.
            with contextlib.suppress(LeaseLost):
                self._disk.run.set_aside_abandoned()
        started = time.monotonic()
        try:
            save(self.checkpointer)
        except (SaveFailed, LeaseLost) as failure:
            # Perhaps the failure of an earlier save, which was in progress.
            self._note_failure(failure)
        else:
            # The return of a second save in a row shows that the first one was published.
            if not self._last_failed:
                self._num_failures = 0
            self._last_failed = False
        if self._is_auto:
            self._adapt(step, started, time.monotonic() - started)
        self._next_step = step + self._every_steps

    def _note_failure(self, failure: AutomodelError) -> None:
        """Count a failed save, and warn of it. After _MAX_FAILURES in a row, save no more."""
        self._num_failures += 1
        self._last_failed = True
        if self._num_failures >= _MAX_FAILURES or isinstance(failure, LeaseLost):
            self._give_up(failure)
        elif self._is_rank0:
            log.warning("a checkpoint in memory failed: %s", text_while_running(failure))

    def _adapt(self, step: int, started: float, stall_seconds: float) -> None:
        """Choose the interval with which training waits for copies for _STALL_SHARE of its time."""
        step_before, started_before = self._last_saved
        self._last_saved = (step, started)
        step_seconds = (started - started_before) / (step - step_before)
        every_steps = max(1, math.ceil(stall_seconds / (_STALL_SHARE * step_seconds)))
        # Clocks differ between ranks, and is_due() has a collective, which all of them must enter at the same step.
        self._every_steps = agree.broadcast_object(self._group, every_steps)

    def _give_up(self, failure: AutomodelError, count: str = "no more") -> None:
        """Continue without checkpoints in memory. The warning says that there are *count*."""
        checkpointer, self.checkpointer = self.checkpointer, None
        assert checkpointer is not None
        self._gave_up = True
        self._disk.run.memory, self._disk.loader.on_nodes = None, {}
        if self._is_rank0:
            log.warning(
                "%s checkpoints in memory, the run continues with those on disk: %s",
                count,
                text_while_running(failure),
            )
        checkpointer.close()
        # After a lost lease, the directory belongs to another run.
        if not isinstance(failure, LeaseLost):
            self._remove_directory()
        self._release_nodes()

    def finish_save(self) -> None:
        """Wait for the save in progress. Its failure counts as one of :meth:`save`. Collective."""
        if self.checkpointer is None:
            return
        try:
            self.checkpointer.wait_for_save()
        except (SaveFailed, LeaseLost) as failure:
            self._note_failure(failure)

    def wait(self) -> None:
        """Wait until this rank has no save in progress. Local."""
        if self.checkpointer is not None:
            self.checkpointer.wait()

    def close(self) -> None:
        """Release the directory, and keep its checkpoints for the next start. Local."""
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            if self.nodes is not None:
                # It could wait forever for the files of a node if the process there has ended already.
                checkpointer.abandon_save()
            checkpointer.close()
        self._release_nodes()

    def remove(self) -> None:
        """Remove the checkpoints in memory, because the run directory has all that the run needs."""
        self.finish_save()
        self.close()
        # It was removed, or belongs to another run.
        if not self._gave_up:
            self._remove_directory()

    def _remove_directory(self) -> None:
        """Remove the directory on this node, by one rank of it."""
        if self._is_rank0 or (self.nodes is not None and self.nodes.is_leader):
            remove_memory(self.directory)

    def _release_nodes(self) -> None:
        if self.nodes is not None:
            self.nodes.release()

    def origins(self) -> str:
        """The end of a message about a load from memory: where the state of the ranks came from. Collective."""
        if self.nodes is None:
            return ", where every rank's state was"
        own = others = 0
        for checkpoint in self._on_nodes.values():
            for node, nbytes in checkpoint.read_bytes.items():
                own += nbytes if node == self.nodes.own else 0
                others += nbytes if node != self.nodes.own else 0
        own, others = (int(each) for each in agree.sum_over_ranks(self._group, own, others))
        if not others:
            return ": each rank's state from its own node"
        return f": {size_text(own)} from the ranks' own nodes, and {size_text(others)} from the memory of other nodes"


def memory_options(section: CheckpointConfig, *, is_distributed: bool = False) -> CheckpointConfig:
    """Return the options of saves to memory: asynchronous, only the newest is kept, nothing is exported.

    If the checkpoints are distributed over several nodes, no file has parts of ranks on different nodes.
    """
    return replace(
        section,
        model_layout="shards" if is_distributed else section.model_layout,
        is_async=True,
        incremental=False,
        save_consolidated=False,
        keep_last=1,
        keep_best=0,
        keep_every_steps=None,
        keep_steps=[],
        remote=None,
        memory=None,
    )


def _as_recipe_error(error: Exception) -> AutomodelError:
    if isinstance(error, AutomodelError):
        return error
    return RecipeError(
        "checkpoints in memory are not possible",
        where="checkpoint.memory.directory",
        value=str(error),
        hint=_OTHER_DIRECTORY,
    )
