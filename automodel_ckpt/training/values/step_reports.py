"""The results of steps: logged when their numbers are added up over the ranks, and judged."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from automodel_ckpt.training.values.readback import LaunchedStep
from automodel_ckpt.training.values.records import ReportedStep, StepResult
from automodel_ckpt.training.values.run_log import RunLog
from automodel_ckpt.training.values.throughput import Throughput
from automodel_ckpt.training.watch.divergence import Divergence

log = logging.getLogger("automodel_ckpt")


class StepReports:
    """Logs each step, and keeps the result of the newest one."""

    def __init__(
        self,
        run_log: RunLog,
        divergence: Divergence,
        throughput: Throughput,
        *,
        has_router_loss: bool,
    ) -> None:
        self._run_log = run_log
        self._divergence = divergence
        self._throughput = throughput
        self._has_router_loss = has_router_loss
        self.newest: StepResult | None = None
        """The newest reported step of this process; None before there is one, and after the run went back."""

    @property
    def newest_is_finite(self) -> bool:
        """Whether the loss and the gradient norm of the newest step are finite; false if there is none."""
        if self.newest is None:
            return False
        return math.isfinite(self.newest.loss) and math.isfinite(self.newest.grad_norm)

    def report(self, step: LaunchedStep, grad_norm: float, sums: Sequence[float]) -> None:
        """Log a *step* that is done. *sums* are those of :meth:`PendingSteps.sums_here`, over all ranks."""
        total, aux_loss, *metrics = sums
        count = step.control.count
        means = {}
        for name, metric in zip(step.metrics, metrics, strict=True):
            means[name] = metric / count
        if step.may_be_skipped and not math.isfinite(grad_norm):
            warn_of_skipped_update(step.position.step, grad_norm)
        self.newest = StepResult(
            total / count if count else math.nan,
            grad_norm,
            step.lr,
            aux_loss if self._has_router_loss else None,
            means,
        )
        self._run_log.log_step(
            step.position,
            step.batch.sample_ids,
            step.control,
            self.newest,
            step.numbers.end.seconds_since(step.start),
        )
        self._throughput.note(step)
        # The sum, not the mean: without labels, the mean of a batch is NaN.
        is_finite = math.isfinite(total) and math.isfinite(grad_norm)
        self._divergence.judge(
            ReportedStep(
                step.position.step,
                self.newest.loss,
                grad_norm,
                step.lr,
                has_labels=count > 0,
                is_finite=is_finite,
            )
        )


def warn_of_skipped_update(step: int, grad_norm: float) -> None:
    """Log that *step* changed no weight, because its gradient norm is not finite."""
    log.warning("step %d: the gradient norm is %s, no update", step, grad_norm)
