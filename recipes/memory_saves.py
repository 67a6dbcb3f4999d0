"""Checkpoints in memory, between those on disk: a restart after a failure loses a step instead of many."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint import Checkpointer, commit
from automodel_ckpt.checkpoint.checkpointer import Resumed
from automodel_ckpt.checkpoint.layout import RankLayout
from automodel_ckpt.checkpoint.run.memory_directory import open_memory, remove_memory
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.config.schema import CheckpointConfig, MemoryConfig
from automodel_ckpt.distributed import agree
from automodel_ckpt.errors import AutomodelError, LeaseLost, RecipeError, SaveFailed
from automodel_ckpt.training.step_scheduler import StepScheduler

log = logging.getLogger("automodel_ckpt")

_STALL_SHARE = 0.01
"""With ``every_steps: auto``, training waits for copies for at most about this share of its time."""
_MAX_FAILURES = 3

SaveState = Callable[[Checkpointer], object]
"""Saves the present step with a checkpointer."""


class MemorySaves:
    """Saves the state of a run to memory after every few steps, asynchronously, and removes it when the run ends.

    *disk* is the checkpointer of the run directory, which finds the memory checkpoints of an earlier start from the
    construction on. All ranks must run on one node. All methods are collective unless they state otherwise. Raises
    :class:`RecipeError` on all ranks if the directory cannot be used.
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
        _check_one_node(ranks.world_size)
        self._group = group
        self._disk = disk
        self._is_rank0 = ranks.rank == 0
        self._is_auto = section.every_steps == "auto"
        self._every_steps = 1 if section.every_steps == "auto" else section.every_steps
        self._num_failures = 0
        self._last_failed = False
        self._next_step = 0
        self._last_saved = (0, time.monotonic())
        """The step of the last save, and when it began."""
        self.directory = self._open(section, disk)
        """The directory of this run's memory checkpoints."""
        disk.use_memory(self.directory)
        self._checkpointer: Checkpointer | None = Checkpointer(
            self.directory,
            ranks,
            group,
            memory_options(options),
            timeout_seconds=timeout_seconds,
            is_quiet=True,
        )
        self._checkpointer.open()

    def _open(self, section: MemoryConfig, disk: Checkpointer) -> Path:
        """Create the directory on rank 0; return its path on all ranks."""
        directory: Path | None = None
        with agree.raise_on_all_ranks(self._group, _as_recipe_error):
            if self._is_rank0:
                directory = open_memory(disk.directory.absolute(), Path(section.directory))
        directory = agree.broadcast_object(self._group, directory)
        assert directory is not None
        return directory

    @property
    def checkpointer(self) -> Checkpointer | None:
        """What saves to memory; None after a failure."""
        return self._checkpointer

    def share_notes(self, disk: Checkpointer) -> None:
        """Give memory checkpoints the files beside the weights, and the notes, of those of *disk*. Local."""
        if self._checkpointer is not None:
            self._checkpointer.assets.update(disk.assets)
            self._checkpointer.notes.update(disk.notes)

    def start(self, resumed: Resumed | None, step: int) -> None:
        """Remove what an earlier start left, except the checkpoint that was *resumed*. The run is at *step*."""
        self._next_step = step + self._every_steps
        self._last_saved = (step, time.monotonic())
        with agree.raise_on_all_ranks(self._group, _as_recipe_error):
            if self._is_rank0:
                kept = resumed.path.name if resumed is not None and resumed.in_memory else None
                self._remove_all_but(kept)

    def _remove_all_but(self, kept: str | None) -> None:
        commit.recover(self.directory)
        for name in checkpoint_names(self.directory):
            if str(name) != kept:
                commit.discard(commit.withdraw(self.directory / str(name)))

    def is_due(self, scheduler: StepScheduler) -> bool:
        """Whether the present step is to be saved. A collective, with ``every_steps: auto``."""
        checkpointer = self._checkpointer
        if checkpointer is None or scheduler.step < self._next_step:
            return False
        return not (self._is_auto and self._is_busy(checkpointer))

    def save(self, step: int, save: SaveState) -> None:
        """Save the present *step* with *save*. It first waits for an earlier save that is still in progress.

        Where that one failed, the present step is saved in its place. After _MAX_FAILURES in a row, saves to memory end
        with a warning; training continues.
        """
        assert self._checkpointer is not None, "it was due"
        if self._is_rank0:
            # Otherwise, a restart would prefer their later steps to the checkpoint that is saved now.
            self._disk.set_aside_abandoned()
        started = time.monotonic()
        # The failure of an earlier save is raised before the present step is saved.
        for _ in range(2):
            if self._saved(save):
                break
        if self._is_auto:
            self._adapt(step, started, time.monotonic() - started)
        self._next_step = step + self._every_steps

    def _saved(self, save: SaveState) -> bool:
        """Call *save*; returns False if it failed and can be repeated."""
        checkpointer = self._checkpointer
        assert checkpointer is not None
        try:
            save(checkpointer)
        except (SaveFailed, LeaseLost) as failure:
            self._num_failures += 1
            self._last_failed = True
            if self._num_failures >= _MAX_FAILURES or isinstance(failure, LeaseLost):
                self._give_up(failure)
                return True
            if self._is_rank0:
                log.warning(
                    "a checkpoint in memory failed, and the present step is saved in its place: %s",
                    failure,
                )
            return False
        # The return of a second save in a row shows that the first one was published.
        if not self._last_failed:
            self._num_failures = 0
        self._last_failed = False
        return True

    def _is_busy(self, checkpointer: Checkpointer) -> bool:
        """Whether a save is in progress on a rank."""
        num_writing, num_failed = agree.sum_over_ranks(
            self._group, checkpointer.is_writing, checkpointer.upload_failed
        )
        return num_writing > 0 and num_failed == 0

    def _adapt(self, step: int, started: float, stall_seconds: float) -> None:
        """Choose the interval with which training waits for copies for _STALL_SHARE of its time."""
        step_before, started_before = self._last_saved
        self._last_saved = (step, started)
        step_seconds = (started - started_before) / (step - step_before)
        every_steps = max(1, math.ceil(stall_seconds / (_STALL_SHARE * step_seconds)))
        # Clocks differ between ranks, and is_due() has a collective, which all of them must enter at the same step.
        self._every_steps = agree.broadcast_object(self._group, every_steps)

    def _give_up(self, failure: AutomodelError) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        assert checkpointer is not None
        if self._is_rank0:
            log.warning(
                "no more checkpoints in memory: %s; the run continues with those on disk", failure
            )
        checkpointer.close()
        # After a lost lease, the directory belongs to another run.
        if self._is_rank0 and not isinstance(failure, LeaseLost):
            remove_memory(self.directory)

    def finish_save(self) -> None:
        """Wait for the save in progress. A failure ends the saves to memory with a warning. Collective."""
        if self._checkpointer is None:
            return
        try:
            self._checkpointer.wait_for_save()
        except (SaveFailed, LeaseLost) as failure:
            self._give_up(failure)

    def wait(self) -> None:
        """Wait until this rank has no save in progress. Local."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def close(self) -> None:
        """Release the directory, and keep its checkpoints for the next start. Local."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def remove(self) -> None:
        """Remove the checkpoints in memory, because the run directory has all that the run needs. Local."""
        self.close()
        if self._is_rank0:
            remove_memory(self.directory)


def _check_one_node(world_size: int) -> None:
    """Raise :class:`RecipeError` if the run has ranks on several nodes, which do not share memory."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if num_local != world_size:
        raise RecipeError(
            "checkpoints in memory require that all ranks run on one node",
            where="checkpoint.memory",
            value=f"{num_local} of {world_size} ranks on this node",
            hint="remove checkpoint.memory, and save more often with checkpoint.is_async",
        )


def memory_options(section: CheckpointConfig) -> CheckpointConfig:
    """Return the options of saves to memory: asynchronous, only the newest is kept, nothing is exported."""
    return replace(
        section,
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
        hint="name a directory on a tmpfs that this user can write, or remove checkpoint.memory",
    )
