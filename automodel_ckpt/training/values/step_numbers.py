"""The numbers of steps: added up over the ranks in the exchange between two steps, then logged and judged.

The ranks need a step's loss only for the log and for the rules that stop a run. So they add it up in the exchange that
precedes the next step, instead of in another one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.run import timeline
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.errors import TrainingDiverged
from automodel_ckpt.training.counters.cadence import Due
from automodel_ckpt.training.counters.step_scheduler import ClockReading, StepScheduler
from automodel_ckpt.training.values.readback import LaunchedStep
from automodel_ckpt.training.values.records import BatchSize, Control, ReportedStep, StepResult
from automodel_ckpt.training.values.run_log import RunLog
from automodel_ckpt.training.watch.batch_errors import BatchErrors

if TYPE_CHECKING:
    from automodel_ckpt.training.counters.spikes import Spike
    from automodel_ckpt.training.watch.stragglers import StragglerWatch

log = logging.getLogger("automodel_ckpt")


_HINT = (
    "lower optimizer.lr, add warmup_steps or clip_grad_norm, use bfloat16 instead of float16, or look at the samples "
    "of these steps (logging.sample_ids)"
)
_FIRST_STEPS = 10
"""So many steps without an update, from the start of a new run on, are an error."""


class Divergence:
    """Judges the steps of a run, and goes back to a checkpoint before a spike (``step_scheduler.on_spike``).

    What checkpoints store of this belongs to the step scheduler. *saves* are the run's ``Saves``. Every method is
    called on all ranks, with the same values, and decides the same on all of them.
    """

    def __init__(self, scheduler: StepScheduler, saves: Any, run_log: RunLog) -> None:
        self._scheduler = scheduler
        self._saves = saves
        self._run_log = run_log
        self._spike: Spike | None = None
        """The spike that was found and has not been handled yet."""
        self._spike_step: ReportedStep | None = None
        """The step that was the newest spike."""
        self._after_spike: list[ReportedStep] = []
        """The steps that the device had done by then, which count only if the run cannot go back."""
        self._has_updated = False
        """Whether a step of this process had a finite gradient norm: others change no weight."""

    @property
    def found_spike(self) -> bool:
        """Whether a step was a spike, and :meth:`go_back` has not been called since."""
        return self._spike is not None

    def judge(self, step: ReportedStep) -> None:
        """Find out whether *step* is a spike, or one too many that is not finite.

        Raises :class:`TrainingDiverged` in the second case.
        """
        if self._spike is not None:
            self._after_spike.append(step)
            return
        spikes = self._scheduler.spikes
        # Without labels, the loss is not a number and no weight changes.
        if spikes is not None and step.has_labels:
            self._spike = spikes.note(step.step, step.loss, step.grad_norm)
        if self._spike is not None:
            self._spike_step = step
            return
        self._note_finite(step)

    def go_back(self) -> bool:
        """Go back because of the spike that was found; returns whether the run did. A collective.

        All steps that were made must have been judged. Without a checkpoint that is old enough, training continues.
        Raises :class:`TrainingDiverged` after too many spikes.
        """
        while self._spike is not None:
            spike, self._spike = self._spike, None
            if self._restore_before(spike):
                self._after_spike = []
                return True
            self._count_spike_and_following()
        return False

    def _restore_before(self, spike: Spike) -> bool:
        """Load the checkpoint of some steps before *spike*; returns False if there is none."""
        spikes = self._scheduler.spikes
        assert spikes is not None
        target = spike.step - spikes.rule.rollback
        num_rollbacks = spikes.num_rollbacks + 1
        if num_rollbacks > spikes.rule.max_rollbacks:
            # A save in the background may still be writing the last good checkpoint.
            self._saves.wait()
            raise TrainingDiverged(
                f"step {spike.step} is a spike, after {spikes.num_rollbacks} rollbacks: {spike.reason}",
                where="step_scheduler.on_spike.max_rollbacks",
                value=str(spikes.rule.max_rollbacks),
                hint=_HINT,
            )
        left_out = spikes.left_out()
        with self._run_log.timeline.phase(timeline.OTHER):
            resumed = self._saves.roll_back(target) if target >= 0 else None
        if resumed is None:
            log.warning(
                "step %d is a spike (%s), and no checkpoint is old enough to go back to step %d: training continues",
                spike.step,
                spike.reason,
                target,
            )
            return False
        spikes.num_rollbacks = num_rollbacks
        spikes.keep_left_out(left_out)
        num_skipped = spikes.num_to_skip_after_spike
        spikes.leave_out(target, num_skipped)
        self._run_log.roll_back(self._scheduler, spike, num_skipped)
        log.warning(
            "step %d is a spike: %s. Going back to step %d from the checkpoint of step %d, and leaving out %s",
            spike.step,
            spike.reason,
            target,
            resumed.step,
            counted(num_skipped, "global batch", "global batches"),
        )
        return True

    def _count_spike_and_following(self) -> None:
        """Count the step of the spike as any other, and judge the steps after it, the next spike among them."""
        assert self._spike_step is not None
        self._note_finite(self._spike_step)
        following, self._after_spike = self._after_spike, []
        for step in following:
            self.judge(step)

    def skip_is_due(self) -> bool:
        """Whether batches are left out after the present step."""
        spikes = self._scheduler.spikes
        return spikes is not None and spikes.num_to_skip(self._scheduler.step) > 0

    def skip_batches(self, dataloader: GlobalBatchLoader) -> None:
        """Leave out the global batches of spikes, if the next ones are such batches."""
        spikes = self._scheduler.spikes
        if spikes is None:
            return
        num_left = spikes.num_to_skip(self._scheduler.step)
        while num_left:
            # Not interrupted by a signal, which only one rank may have: the next step is agreed on by all.
            with closing(iter(dataloader)) as batches:
                for batch in islice(batches, num_left):
                    dataloader.mark_consumed(batch)
                    spikes.num_skipped += 1
                    num_left -= 1

    def postpones_save(self, due: Due) -> bool:
        """Whether a save that is due waits for a finite step: it could replace the last good checkpoint."""
        if due.last or (self._scheduler.nonfinite_steps == 0 and not self._has_no_update):
            return False
        log.warning(
            "step %d: not saved, because its loss or gradient norm is not finite",
            self._scheduler.step,
        )
        return True

    def _note_finite(self, step: ReportedStep) -> None:
        """Count *step* if it is not finite. Raises :class:`TrainingDiverged` after too many."""
        self._has_updated = self._has_updated or math.isfinite(step.grad_norm)
        if self._scheduler.note_finite(step.is_finite):
            self._stop(step)
        if self._cannot_train(step):
            raise TrainingDiverged(
                "no step had a finite gradient norm, so that no weight has changed",
                where=f"the first {counted(step.step, 'step')}",
                value=_numbers(step),
                hint="look for NaN in the weights of the model; or use bfloat16 instead of float16; or look at the "
                "samples of these steps (logging.sample_ids), and at losses of your own code",
            )

    @property
    def _has_no_update(self) -> bool:
        """Whether no step of a new run has changed a weight so far."""
        return not self._has_updated and self._saves.resumed is None

    def _cannot_train(self, step: ReportedStep) -> bool:
        """Whether none of the first steps of a new run, up to *step*, has changed a weight.

        The recipe's limit is used instead, if it has one.
        """
        if not self._has_no_update:
            return False
        if self._scheduler.cadence.stop_after_nonfinite_steps is not None:
            return False
        planned = self._scheduler.planned_steps
        limit = _FIRST_STEPS if planned is None else min(planned, _FIRST_STEPS)
        return step.step >= limit

    def _stop(self, step: ReportedStep) -> NoReturn:
        """Raise :class:`TrainingDiverged` after too many steps that were not finite. Nothing is saved."""
        # A save in the background may still be writing the last good checkpoint.
        self._saves.wait()
        count = self._scheduler.nonfinite_steps
        steps = "in 1 step" if count == 1 else f"in {count} consecutive steps"
        newest = self._saves.last_save or self._saves.resumed
        kept = f"the newest checkpoint is {newest.path.name}" if newest else "nothing was saved"
        raise TrainingDiverged(
            f"the loss or the gradient norm was not finite {steps}, the last of which is step {step.step}",
            where="step_scheduler.stop_after_nonfinite_steps",
            value=_numbers(step),
            hint=f"{_HINT}; {kept}",
        )


def _numbers(step: ReportedStep) -> str:
    return f"loss {step.loss}, gradient norm {step.grad_norm}, learning rate {step.lr:g}"


_NOTHING = BatchSize(0, 0, 0)


class StepNumbers:
    """Sums over the ranks what each knows between two steps, and reports a step whose numbers are then known."""

    def __init__(self, loop: Any) -> None:
        """*loop* is the training loop, which has the parts of the run."""
        self._layout = loop.layout
        self._stop_request = loop.stop_request
        self._checkpointer = loop.checkpointer
        self._scheduler = loop.step_scheduler
        self._run_log = loop.run_log
        self._has_router_loss = loop.trainable.router_loss is not None
        self._divergence: Divergence = loop.divergence
        self._errors: BatchErrors = loop.errors
        # The device may still compute the newest step.
        self._num_in_progress = 1 if loop.runs_ahead else 0
        self.pending = self._errors.pending
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
