"""What follows saves: uploads to the Hub, and the average of the last checkpoints (``checkpoint.average_last``)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from automodel_ckpt.checkpoint.checkpointer import Checkpointer
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.config.keys.checkpoint import HubConfig
from automodel_ckpt.convert.imports.new_checkpoint import write_checkpoint
from automodel_ckpt.convert.merging.average import (
    last_checkpoints,
    prepare,
    sources_in,
)
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed
from automodel_ckpt.hub.background import Pushes

log = logging.getLogger("automodel_ckpt")

AVERAGED = "averaged"
"""The directory below a run directory that has the averages: a run directory of checkpoints of weights."""


def average_last(run: Path, count: int) -> Path | None:
    """Average the newest *count* complete checkpoints of *run* into ``run/averaged``. Returns the new checkpoint.

    With fewer checkpoints, all of them are averaged. With fewer than two, nothing is, and a warning is logged. An
    average of the same checkpoints that exists already is returned. Raises :class:`SaveFailed` or
    :class:`CheckpointUnusable`.
    """
    existing = len(list(resume.records(run, "")))
    if existing < 2:
        log.warning("average_last: the run has fewer than two checkpoints, so there is no average")
        return None
    if existing < count:
        log.warning("average_last: averaging %d checkpoints, since there are no more", existing)
    sources = last_checkpoints(run, min(count, existing))
    target = run / AVERAGED / sources[-1].name
    if target.is_dir():
        averaged = None
        with contextlib.suppress(CheckpointUnusable):
            averaged = sources_in(Summary.read(target))
        if averaged == [Summary.read(source).digest for source in sources]:
            log.info("average of the last %d checkpoints: %s", len(sources), target)
            return target
        # The run went back to an earlier checkpoint, and has saved this step again.
        commit.supersede(target.parent, target.name)
    # Counters, such as the counters of batch normalization: the newest ones.
    planned = prepare(sources, target.parent, integers="last")
    path = write_checkpoint(planned.checkpoint)
    log.info("average of the last %d checkpoints: %s", len(sources), path)
    return path


STARTING = "starting the uploads to the Hugging Face Hub"


class HubUploads:
    """The uploads of a run, which a process of rank 0 makes.

    All methods are collective, except :meth:`note_saved`, :attr:`uploading` and :meth:`close`.
    """

    def __init__(self, section: HubConfig, checkpointer: Checkpointer) -> None:
        self._section = section
        self._checkpointer = checkpointer
        self._pushes: Pushes | None = None

    def start(self, resumed_step: int | None) -> None:
        """Start the uploading process. The run continues from *resumed_step*, which is None for a new run.

        Raises :class:`SaveFailed` on all ranks if it cannot be started.
        """
        checkpointer = self._checkpointer

        def start() -> None:
            makes_exports = checkpointer.exports.of_each_checkpoint
            self._pushes = Pushes(
                checkpointer.directory, self._section, makes_exports=makes_exports
            )
            self._pushes.start(resumed_step)

        checkpointer.call_on_rank0(STARTING, start)

    def roll_back(self, step: int) -> None:
        """Continue after *step*, to which the run went back."""

        def roll_back() -> None:
            if self._pushes is not None:
                self._pushes.roll_back(step)

        self._checkpointer.call_on_rank0(STARTING, roll_back)

    def note_saved(self, name: str) -> None:
        """Have the checkpoint *name* uploaded if the section asks for it. Called by rank 0, in any thread."""
        if self._pushes is not None:
            self._pushes.note_saved(name)

    def finish(self, name: str, must_end: Callable[[], bool]) -> None:
        """Upload the last model, from the checkpoint *name*, and wait until *must_end* returns true at the latest.

        Raises :class:`SaveFailed` with ``hub.required``.
        """

        def finish() -> None:
            if self._pushes is not None:
                self._pushes.note_last(name)
                self._pushes.finish(must_end)

        doing = "uploading to the Hugging Face Hub (the checkpoints are safe)"
        self._checkpointer.exports.run_on_rank0(doing, finish, SaveFailed)

    @property
    def uploading(self) -> str:
        """How far the uploads are that :meth:`finish` waits for. Not collective."""
        return "" if self._pushes is None else self._pushes.process.uploading

    def close(self) -> None:
        """Let uploads continue for a while without this process."""
        if self._pushes is not None:
            self._pushes.close()
