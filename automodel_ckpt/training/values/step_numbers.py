"""The numbers of steps: added up over the ranks in the exchange between two steps, then logged and judged.

The ranks need a step's loss only for the log and for the rules that stop a run. So they add it up in the exchange that
precedes the next step, instead of in another one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from automodel_ckpt.training.counters.step_scheduler import ClockReading
from automodel_ckpt.training.values.readback import LaunchedStep
from automodel_ckpt.training.values.records import BatchSize, Control, ReportedStep, StepResult
from automodel_ckpt.training.watch.batch_errors import BatchErrors
from automodel_ckpt.training.watch.divergence import Divergence

if TYPE_CHECKING:
    from automodel_ckpt.training.values.throughput import Throughput
    from automodel_ckpt.training.watch.stragglers import StragglerWatch

log = logging.getLogger("automodel_ckpt")

_NOTHING = BatchSize(0, 0, 0)


class StepNumbers:
    """Sums over the ranks what each knows between two steps, and reports a step whose numbers are then known."""

    def __init__(
        self,
        recipe: Any,
        divergence: Divergence,
        errors: BatchErrors,
        throughput: Throughput | None,
        *,
        runs_ahead: bool,
    ) -> None:
        """*recipe* has the parts of the run. *runs_ahead*: the device may still compute the newest step."""
        self._layout = recipe.layout
        self._stop_request = recipe.stop_request
        self._checkpointer = recipe.checkpointer
        self._scheduler = recipe.step_scheduler
        self._run_log = recipe.run_log
        self._has_router_loss = recipe.objective.trainable.router_loss is not None
        self._divergence = divergence
        self._errors = errors
        self._throughput = throughput
        self._num_in_progress = 1 if runs_ahead else 0
        self.pending = errors.pending
        """Steps that are counted but not logged, oldest first."""
        self.newest: StepResult | None = None
        """The newest reported step of this process; None before there is one, and after the run went back."""
        self.straggler_watch: StragglerWatch | None = None
        """Gets the times of this rank, and compares those of all ranks."""

    @property
    def newest_is_finite(self) -> bool:
        """Whether the loss and the gradient norm of the newest step are finite; false if there is none."""
        if self.newest is None:
            return False
        return math.isfinite(self.newest.loss) and math.isfinite(self.newest.grad_norm)

    def exchange(self, size: BatchSize | None, *, stop: bool, wait: bool = False) -> Control:
        """Exchange with all ranks, and report the oldest step that is done. One small reduction; a collective.

        *size* is that of the next batch on this rank; None if no step follows. *stop*: whether this rank stops for
        another reason than a request. *wait*: wait for a step that the device may still compute.
        """
        num_unfinished = 0 if wait else self._num_in_progress
        finished = self.pending[0] if len(self.pending) > num_unfinished else None
        numbers = self._numbers_of(finished) if finished is not None else {}
        here = self._control_here(size or _NOTHING, stop=stop)
        sums_here = self._sums_here(finished, numbers)
        figures_here = self._figures_here(finished)
        began = time.monotonic()
        control, sums = here.summed(self._layout.gloo_group, [*sums_here, *figures_here])
        wait_seconds = time.monotonic() - began
        num_sums = len(sums_here)
        if self.straggler_watch is not None:
            # Ranks come from another exchange together, so that its wait does not show who is late.
            if size is not None:
                self.straggler_watch.note_wait(wait_seconds)
            self.straggler_watch.compare(self._scheduler.step, sums[num_sums:])
        if finished is not None:
            self.pending.popleft()
            self._report(finished, numbers["grad_norm"], sums[:num_sums])
        return control

    def _control_here(self, size: BatchSize, *, stop: bool) -> Control:
        """What this rank adds to the agreement of all ranks."""
        save_failed = self._checkpointer is not None and self._checkpointer.upload_failed
        clock = ClockReading()
        # Only rank 0's clock counts, so that all ranks save and end at the same step.
        if self._layout.is_rank0:
            clock = self._scheduler.read_clock()
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

    def _sums_here(self, step: LaunchedStep | None, numbers: dict[str, float]) -> list[float]:
        """What this rank adds to the sums of *step*: loss, router's loss, and the objective's metrics."""
        if step is None:
            return [0.0, 0.0]
        # Tensor and context parallel ranks compute the same loss, which counts once.
        counts = self._layout.reports_loss
        metrics = [numbers[f"metric {name}"] if counts else 0.0 for name in step.metrics]
        return [numbers["loss"] if counts else 0.0, numbers["aux_loss"], *metrics]

    def _figures_here(self, finished: LaunchedStep | None) -> list[float]:
        """The times of this rank that are due for a comparison of the ranks; empty if none are."""
        watch = self.straggler_watch
        if watch is None:
            return []
        if finished is not None:
            watch.note_forward(finished.forward)
        return watch.figures_here()

    def _report(self, step: LaunchedStep, grad_norm: float, sums: Sequence[float]) -> None:
        """Log a *step* that is done, and judge it. *sums* are those of all ranks."""
        total, aux_loss, *metrics = sums
        count = step.control.count
        means = {name: metric / count for name, metric in zip(step.metrics, metrics, strict=True)}
        number = step.position.step
        if step.may_be_skipped and not math.isfinite(grad_norm):
            warn_of_skipped_update(number, grad_norm)
        loss = total / count if count else math.nan
        aux = aux_loss if self._has_router_loss else None
        self.newest = StepResult(loss, grad_norm, step.lr, aux, means)
        seconds = step.numbers.end.seconds_since(step.start)
        self._run_log.log_step(
            step.position, step.batch.sample_ids, step.control, self.newest, seconds
        )
        if self._throughput is not None:
            self._throughput.note(step)
        # The sum, not the mean: without labels, the mean of a batch is NaN.
        is_finite = math.isfinite(total) and math.isfinite(grad_norm)
        self._divergence.judge(
            ReportedStep(
                number, loss, grad_norm, step.lr, has_labels=count > 0, is_finite=is_finite
            )
        )


def warn_of_skipped_update(step: int, grad_norm: float) -> None:
    """Log that *step* changed no weight, because its gradient norm is not finite."""
    log.warning("step %d: the gradient norm is %s, no update", step, grad_norm)
