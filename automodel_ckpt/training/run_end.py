"""The end of a run: after a stop request, after its last step, or because nothing was left to do.

Each function saves what a run that ends has not saved yet, and reports how it ended and how to continue. *loop* is the
training loop, which has the parts of the run.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from automodel_ckpt.errors import Stopped

log = logging.getLogger("automodel_ckpt")


def acknowledging(loop: Any) -> Callable[[int], None]:
    """Return a function that logs a received signal and what follows. A thread calls it while the step continues."""

    def acknowledge(number: int) -> None:
        saves = "saving" if loop.checkpointer else "nothing is saved, checkpoint.enabled is false"
        code = loop.stop_request.exit_code
        then = f"{saves}, then exit {code}" if code else f"{saves}, then exit"
        step = loop.step_scheduler.stops_after
        loop.run_log.progress.write_above(
            f"{signal_name(number)}: stopping after step {step} at the latest: {then}; {again(number)} to stop now "
            "without saving"
        )

    return acknowledge


def stop(loop: Any) -> NoReturn:
    """Save the last completed step unless it is saved. Raises :class:`Stopped`. A collective."""
    step, request = loop.step_scheduler.step, loop.stop_request
    loop.saves.stop(loop.losses(None))
    loop.saves.upload_before_stop(request)
    outcome, hint = "; nothing was saved", "the same command starts over"
    if loop.checkpointer is not None and step > 0:
        outcome, hint = ", which is saved", "the same command continues from there"
    last_save = loop.saves.last_save
    raise Stopped(
        f"stopped by {signal_name(request.requested)} after step {step}{outcome}",
        where=str(loop.checkpointer.directory) if loop.checkpointer else "",
        value=last_save.path.name if last_save else "",
        hint=hint,
    )


def complete(loop: Any) -> None:
    """Log the end of a complete run. Raises the failure of the last save if training continued after it."""
    # A failed save in the background must end the run before it is logged as done.
    loop.saves.wait()
    last_step = loop.last_step
    loss = f"training loss {last_step.loss:.4f}" if last_step else "no step was made"
    log.info("done: step %d, %s", loop.step_scheduler.step, loss)
    log.info("%s", loop.step_scheduler.reason_of_end())
    loop.saves.end(loop.stop_request)


def already_complete(loop: Any) -> None:
    """Log that the run was complete when it was started, and make exports that a kill or a signal prevented."""
    scheduler = loop.step_scheduler
    log.info("already complete at step %d: %s", scheduler.step, scheduler.reason_of_end())
    if scheduler.unsaved:
        # Its checkpoint was in memory only, and the recipe now ends before the next one on disk.
        loop.saves.save(loop.losses(None), validated=False, started=time.monotonic(), last=True)
        loop.saves.wait()
    loop.saves.export_finished(loop.stop_request)


def signal_name(number: int | None) -> str:
    """How messages name the signal *number*. It is 0 or None when another rank received the signal."""
    return signal.Signals(number).name if number else "a signal to another rank"


def again(number: int) -> str:
    """How messages say that the signal *number* can be repeated."""
    return "press Ctrl-C again" if number == signal.SIGINT else "send it again"
