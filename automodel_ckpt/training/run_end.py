"""The end of a run: after a stop request, after its last step, or because nothing was left to do."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.errors import Stopped
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.ranks.stop import StopRequest
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.values.records import StepResult
from automodel_ckpt.training.values.run_log import RunLog

log = logging.getLogger("automodel_ckpt")


class RunEnd:
    """Saves what a run that ends has not saved yet, and reports how it ended and how to continue."""

    def __init__(self, recipe: Any) -> None:
        self._layout: RankLayout = recipe.layout
        self._scheduler: StepScheduler = recipe.step_scheduler
        self._stop_request: StopRequest = recipe.stop_request
        self._checkpointer: Checkpointer | None = recipe.checkpointer
        self._saves: Any = recipe.saves
        self._run_log: RunLog = recipe.run_log

    def acknowledge_stop(self, number: int) -> None:
        """Log that a signal was received, and what follows; a thread calls it while the step continues.

        *number* is the number of the signal, 0 if another rank received it.
        """
        again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
        saves = "saving"
        if self._checkpointer is None:
            saves = "nothing is saved, checkpoint.enabled is false"
        code = self._stop_request.exit_code
        then = f"{saves}, then exit {code}" if code else f"{saves}, then exit"
        step = self._scheduler.stops_after
        self._run_log.progress.write_above(
            f"{_name(number)}: stopping after step {step} at the latest: {then}; {again} to stop now without saving"
        )

    def stop(self, losses: Mapping[str, Any]) -> NoReturn:
        """Save the last completed step unless it is saved. Raises :class:`Stopped`. A collective.

        *losses* is the content of ``losses.json``.
        """
        step = self._scheduler.step
        self._saves.stop(losses)
        self._saves.upload_before_stop(self._stop_request)
        saved = self._checkpointer is not None and step > 0
        outcome = "; nothing was saved"
        hint = "the same command starts over"
        if saved:
            outcome = ", which is saved"
            hint = "the same command continues from there"
        last_save = self._saves.last_save
        raise Stopped(
            f"stopped by {_name(self._stop_request.requested)} after step {step}{outcome}",
            where=str(self._checkpointer.directory) if self._checkpointer else "",
            value=last_save.path.name if last_save else "",
            hint=hint,
        )

    def complete(self, last_step: StepResult | None) -> None:
        """Log the end of a complete run. Raises the failure of the last save if training continued after it."""
        # A failed save in the background must end the run before it is logged as done.
        self._saves.wait()
        loss = f"training loss {last_step.loss:.4f}" if last_step else "no step was made"
        log.info("done: step %d, %s", self._scheduler.step, loss)
        log.info("%s", self._scheduler.reason_of_end())
        self._saves.end(self._stop_request)

    def already_complete(self, losses: Mapping[str, Any]) -> None:
        """Log that the run was complete when it was started, and make exports that a kill or a signal prevented."""
        scheduler = self._scheduler
        log.info("already complete at step %d: %s", scheduler.step, scheduler.reason_of_end())
        if scheduler.unsaved:
            # Its checkpoint was in memory only, and the recipe now ends before the next one on disk.
            self._saves.save(losses, validated=False, started=time.monotonic(), last=True)
            self._saves.wait()
        self._saves.export_finished(self._stop_request)


def _name(number: int | None) -> str:
    """How messages name the signal *number*; 0 or None if another rank received it."""
    return signal.Signals(number).name if number else "a signal to another rank"
