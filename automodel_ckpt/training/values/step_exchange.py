"""The exchange of all ranks between two steps: flags, sizes, the clock, and the numbers of a step that is done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.ranks.stop import StopRequest
from automodel_ckpt.training.counters.step_scheduler import ClockReading, StepScheduler
from automodel_ckpt.training.values.pending_steps import PendingSteps
from automodel_ckpt.training.values.readback import LaunchedStep
from automodel_ckpt.training.values.records import BatchSize, Control
from automodel_ckpt.training.values.step_reports import StepReports
from automodel_ckpt.training.watch.batch_errors import BatchErrors

if TYPE_CHECKING:
    from automodel_ckpt.training.watch.stragglers import StragglerWatch

_NOTHING = BatchSize(0, 0, 0)


class StepExchange:
    """Sums over the ranks what each knows between two steps, and reports a step whose numbers are then known."""

    def __init__(
        self,
        layout: RankLayout,
        stop_request: StopRequest,
        checkpointer: Checkpointer | None,
        step_scheduler: StepScheduler,
        pending: PendingSteps,
        errors: BatchErrors,
        reports: StepReports,
    ) -> None:
        self._layout = layout
        self._stop_request = stop_request
        self._checkpointer = checkpointer
        self._step_scheduler = step_scheduler
        self._pending = pending
        self._errors = errors
        self._reports = reports
        self.straggler_watch: StragglerWatch | None = None
        """Gets the times of this rank, and compares those of all ranks."""

    def run(self, size: BatchSize | None, *, stop: bool, wait: bool = False) -> Control:
        """Exchange with all ranks, and report the oldest step that is done. One small reduction; a collective.

        *size* is that of the next batch on this rank; None if no step follows. *stop*: whether this rank stops for
        another reason than a request. *wait*: wait for a step that the device may still compute.
        """
        finished = self._pending.oldest(wait=wait)
        numbers = self._numbers_of(finished) if finished is not None else {}
        here = self._control_here(size or _NOTHING, stop=stop)
        sums_here = self._pending.sums_here(finished, numbers)
        figures_here = self._figures_here(finished)
        began = time.monotonic()
        control, sums = here.summed(self._layout.gloo_group, [*sums_here, *figures_here])
        wait_seconds = time.monotonic() - began
        num_sums = len(sums_here)
        # Ranks come from another exchange together, so that its wait does not show who is late.
        self._compare_ranks(sums[num_sums:], None if size is None else wait_seconds)
        if finished is not None:
            self._pending.remove_oldest()
            self._reports.report(finished, numbers["grad_norm"], sums[:num_sums])
        return control

    def _control_here(self, size: BatchSize, *, stop: bool) -> Control:
        """What this rank adds to the agreement of all ranks."""
        save_failed = self._checkpointer is not None and self._checkpointer.upload_failed
        clock = ClockReading()
        # Only rank 0's clock counts, so that all ranks save and end at the same step.
        if self._layout.is_rank0:
            clock = self._step_scheduler.read_clock()
        return Control(
            size.count,
            size.num_label_tokens,
            size.num_tokens,
            stop or self._stop_request.wanted,
            save_failed,
            size.flops,
            clock,
        )

    def _numbers_of(self, step: LaunchedStep) -> dict[str, float]:
        """Wait for the numbers of *step* on this rank. Raises what the device reports of it only now."""
        try:
            return step.numbers.read()
        except (IndexError, RuntimeError) as error:
            self._errors.explain(error, step.batch)
            raise

    def _figures_here(self, finished: LaunchedStep | None) -> list[float]:
        """The times of this rank that are due for a comparison of the ranks; empty if none are."""
        watch = self.straggler_watch
        if watch is None:
            return []
        if finished is not None:
            watch.note_forward(finished.forward)
        return watch.figures_here()

    def _compare_ranks(self, figures: Sequence[float], wait_seconds: float | None) -> None:
        watch = self.straggler_watch
        if watch is None:
            return
        if wait_seconds is not None:
            watch.note_wait(wait_seconds)
        watch.compare(self._step_scheduler.step, figures)
