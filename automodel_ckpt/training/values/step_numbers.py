"""The numbers of steps: copied from the device, added up over the ranks, then logged and judged.

A CPU computes while the host calls torch, so its numbers are known when a step returns. A GPU gets a queue of work. If
the host read a number of every step, such as the loss, the queue would be empty each time, and the GPU idle until the
host has added work. So the host reads the numbers of a step after it has queued the next one.

The ranks need a step's loss only for the log and for the rules that stop a run. So they add it up in the exchange that
precedes the next step, instead of in another one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from automodel_ckpt.base.device_copies import Mark, to_host
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.run.notes import OTHER
from automodel_ckpt.data.batches.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.errors import TrainingDiverged
from automodel_ckpt.parallel.ranks.agree import sum_over_ranks
from automodel_ckpt.training.counters.step_scheduler import Due, StepScheduler
from automodel_ckpt.training.values.records import (
    BatchSize,
    ClockReading,
    Control,
    Number,
)

if TYPE_CHECKING:
    from automodel_ckpt.training.counters.rules import Spike
    from automodel_ckpt.training.watch.stragglers import ForwardTime, StragglerWatch

log = logging.getLogger("automodel_ckpt")


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: the global batch's mean loss (NaN if its count is 0), gradient norm and learning rate.

    *aux_loss* is the load balancing loss of a mixture of experts, without its coefficient. None where there is none.
    *metrics* are the means of the objective's metrics over the *count* terms of the loss.
    """

    loss: float
    grad_norm: float
    lr: float
    aux_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int = 0
    count: int = 1

    @property
    def is_finite(self) -> bool:
        """Whether the sum of the losses and the gradient norm are finite, which they are without labels."""
        return math.isfinite(self.grad_norm) and (not self.count or math.isfinite(self.loss))


class Readback:
    """Copies numbers from the device to the host while the device continues."""

    def __init__(self, numbers: Mapping[str, Number], device: torch.device) -> None:
        """Queue the copies of *numbers*. Those that are not on *device* are on the host already."""
        self._known: dict[str, float] = {}
        copied: dict[str, Tensor] = {}
        for name, number in numbers.items():
            value = number.full_tensor() if isinstance(number, DTensor) else number
            if isinstance(value, Tensor) and value.device.type == device.type:
                # float64 holds every value of the smaller types.
                copied[name] = value.detach().double().reshape(())
            else:
                self._known[name] = float(value)
        self._names = list(copied)
        self._copies = to_host(torch.stack(list(copied.values()))) if copied else torch.empty(0)
        self.end = Mark(device)
        """The end of the step."""

    def read(self) -> dict[str, float]:
        """Wait for the copies, and return all numbers."""
        self.end.wait()
        return self._known | dict(zip(self._names, self._copies.tolist(), strict=True))


@dataclass(frozen=True)
class LaunchedStep:
    """A step with queued work: what is known of it on the host, and its numbers on their way from the device.

    *numbers* has this rank's sums ``loss`` and ``aux_loss``, the ``grad_norm``, and this rank's sums of the objective's
    *metrics*. *may_be_skipped*: the device decides whether the weights change. *forward* is the time of a forward pass
    on this rank, if it is measured.
    """

    step: int
    batch: GlobalBatch
    control: Control
    lr: float
    start: Mark
    numbers: Readback
    metrics: Sequence[str]
    may_be_skipped: bool
    forward: ForwardTime | None = None

    @property
    def seconds(self) -> float:
        """The duration of the step. Its numbers must have been read."""
        return self.numbers.end.seconds_since(self.start)


_HINT = (
    "lower optimizer.lr, add warmup_steps or clip_grad_norm, use bfloat16 instead of float16, or look at the samples "
    "of these steps (logging.sample_ids)"
)
_FIRST_STEPS = 10
"""So many steps without an update, from the start of a new run on, are an error."""


class Divergence:
    """Judges the steps of a run, and goes back to a checkpoint before a spike (``step_scheduler.on_spike``).

    What checkpoints store of this belongs to the step scheduler. Every method is called on all ranks, with the same
    values, and decides the same on all of them.
    """

    def __init__(self, loop: Any) -> None:
        """*loop* is the training loop, which has the parts of the run."""
        self._scheduler: StepScheduler = loop.step_scheduler
        self._saves = loop.saves
        self._run_log = loop.run_log
        self.spike: Spike | None = None
        """The spike that was found and has not been handled yet."""
        self._uncounted: list[StepResult] = []
        """The step of the spike, and those that the device had done by then. They count if the run cannot go back."""
        self._has_updated = False
        """Whether a step of this process had a finite gradient norm: others change no weight."""

    def judge(self, step: StepResult) -> None:
        """Find out whether *step* is a spike, or one too many that is not finite.

        Raises :class:`TrainingDiverged` in the second case.
        """
        if self.spike is not None:
            self._uncounted.append(step)
            return
        spikes = self._scheduler.spikes
        # Without labels, the loss is not a number and no weight changes.
        if spikes is not None and step.count:
            self.spike = spikes.note(step.step, step.loss, step.grad_norm)
        if self.spike is not None:
            self._uncounted = [step]
        else:
            self._note_finite(step)

    def go_back(self) -> bool:
        """Go back because of the spike that was found. Returns whether the run did. A collective.

        All steps that were made must have been judged. Without a checkpoint that is old enough, training continues.
        Raises :class:`TrainingDiverged` after too many spikes.
        """
        while self.spike is not None:
            spike, self.spike = self.spike, None
            if self._restore_before(spike):
                return True
            # The next spike may be among the steps after this one.
            first, *following = self._uncounted
            self._note_finite(first)
            for step in following:
                self.judge(step)
        return False

    def _restore_before(self, spike: Spike) -> bool:
        """Load the checkpoint of some steps before *spike*. Returns False if there is none."""
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
        left_out = list(spikes.left_out)
        with self._run_log.timeline.phase(OTHER):
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
        num_skipped = spikes.leave_out(target, left_out)
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

    @property
    def _has_no_update(self) -> bool:
        """Whether no step of a new run has changed a weight so far."""
        return not self._has_updated and self._saves.resumed is None

    def _note_finite(self, step: StepResult) -> None:
        """Count *step* if it is not finite. Raises :class:`TrainingDiverged` after too many."""
        self._has_updated = self._has_updated or math.isfinite(step.grad_norm)
        scheduler = self._scheduler
        if scheduler.note_finite(step.is_finite):
            self._stop(step)
        limit = min(_FIRST_STEPS, scheduler.planned_steps or _FIRST_STEPS)
        # The recipe's limit is used instead, if it has one.
        has_limit = scheduler.settings.stop_after_nonfinite_steps is not None
        if self._has_no_update and not has_limit and step.step >= limit:
            raise TrainingDiverged(
                "no step had a finite gradient norm, so that no weight has changed",
                where=f"the first {counted(step.step, 'step')}",
                value=_text(step),
                hint="look for NaN in the weights of the model; or use bfloat16 instead of float16; or look at the "
                "samples of these steps (logging.sample_ids), and at losses of your own code",
            )

    def _stop(self, step: StepResult) -> NoReturn:
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
            value=_text(step),
            hint=f"{_HINT}; {kept}",
        )


def _text(step: StepResult) -> str:
    return f"loss {step.loss}, gradient norm {step.grad_norm}, learning rate {step.lr:g}"


class StepNumbers:
    """Sums over the ranks what each knows between two steps, and reports a step when its numbers are then known."""

    def __init__(self, loop: Any) -> None:
        """*loop* is the training loop, which has the parts of the run."""
        self._loop = loop
        self._layout = loop.layout
        # The device may still compute the newest step.
        self._num_in_progress = 1 if loop.runs_ahead else 0
        self.pending = loop.errors.pending
        """Steps that are counted but not logged, oldest first."""
        self.newest: StepResult | None = None
        """The newest reported step of this process. None before there is one, and after the run went back."""
        self.straggler_watch: StragglerWatch | None = None
        """Gets the times of this rank, and compares the times of all ranks."""

    def launch(
        self,
        batch: GlobalBatch,
        control: Control,
        lr: float,
        start: Mark,
        trained: tuple[Number, Number],
    ) -> None:
        """Start to copy the numbers of a step to the host, now that all its work is queued.

        *trained* is this rank's summed loss, and the gradient norm.
        """
        loss_sum, grad_norm = trained
        loop = self._loop
        router_loss, timer = loop.trainable.router_loss, loop.forward_timer
        numbers = {"loss": loss_sum, "aux_loss": 0.0, "grad_norm": grad_norm}
        if router_loss is not None:
            numbers["aux_loss"] = router_loss.value_here
        # Sums are by position, and ranks may have added the names in different orders.
        metrics = sorted(loop.gradients.metrics) if control.count else []
        for name in metrics:
            numbers[f"metric {name}"] = loop.gradients.metrics[name]
        self.pending.append(
            LaunchedStep(
                loop.step_scheduler.step + 1,
                batch,
                control,
                lr,
                start,
                Readback(numbers, self._layout.device),
                metrics,
                may_be_skipped=isinstance(grad_norm, Tensor),
                forward=timer.take() if timer is not None else None,
            )
        )

    def exchange(self, size: BatchSize | None, *, stop: bool, wait: bool = False) -> Control:
        """Exchange with all ranks, and report the oldest step that is done. One small reduction. A collective.

        *size* is the size of the next batch on this rank, or None when no step follows. *stop*: whether this rank stops
        for another reason than a request. *wait*: wait for a step that the device may still compute.
        """
        num_unfinished = 0 if wait else self._num_in_progress
        finished = self.pending[0] if len(self.pending) > num_unfinished else None
        numbers: dict[str, float] = {}
        if finished is not None:
            try:
                numbers = finished.numbers.read()
            except (IndexError, RuntimeError) as error:
                # What the device reports of the step only now.
                self._loop.errors.explain(error, finished.batch)
                raise
        # Tensor and context parallel ranks compute the same loss, which counts once.
        counts = self._layout.reports_loss
        sums_here = [numbers["loss"] if numbers and counts else 0.0, numbers.get("aux_loss", 0.0)]
        if finished is not None:
            sums_here += [numbers[f"metric {name}"] if counts else 0.0 for name in finished.metrics]
        watch = self.straggler_watch
        figures = [] if watch is None else watch.figures_here(finished and finished.forward)
        size_here = size or BatchSize(0, 0, 0)
        checkpointer, scheduler = self._loop.checkpointer, self._loop.step_scheduler
        # Only rank 0's clock counts, so that all ranks save and end at the same step.
        clock = scheduler.read_clock() if self._layout.is_rank0 else ClockReading()
        if not scheduler.clock_is_known and self._loop.saves.is_requested():
            clock = replace(clock, save_is_requested=True)
        here = Control(
            size_here.count,
            size_here.num_label_tokens,
            size_here.num_tokens,
            stop or self._loop.stop_request.wanted,
            checkpointer is not None and checkpointer.upload_failed,
            size_here.flops,
            clock,
        )
        began = time.monotonic()
        control, sums = _summed(self._layout.gloo_group, here, [*sums_here, *figures])
        num_sums = len(sums_here)
        if watch is not None:
            # Ranks come from another exchange together, so that its wait does not show who is late.
            if size is not None:
                watch.note_wait(time.monotonic() - began)
            watch.compare(scheduler.step, sums[num_sums:])
        if finished is not None:
            self.pending.popleft()
            self._report(finished, numbers["grad_norm"], sums[:num_sums])
        return control

    def _report(self, step: LaunchedStep, grad_norm: float, sums: Sequence[float]) -> None:
        """Log a *step* that is done, and judge it. *sums* are sums over all ranks."""
        loop, count = self._loop, step.control.count
        total, aux_loss, *metrics = sums
        if step.may_be_skipped and not math.isfinite(grad_norm):
            warn_of_skipped_update(step.step, grad_norm)
        self.newest = StepResult(
            total / count if count else math.nan,
            grad_norm,
            step.lr,
            aux_loss if loop.trainable.router_loss is not None else None,
            {name: metric / count for name, metric in zip(step.metrics, metrics, strict=True)},
            step=step.step,
            count=count,
        )
        scheduler = self._loop.step_scheduler
        is_saved = scheduler.save_was_due and loop.checkpointer is not None
        is_followed = step.step == scheduler.step and (is_saved or scheduler.validation_is_due)
        loop.run_log.log_step(step, self.newest, is_followed=is_followed)
        loop.divergence.judge(self.newest)


def warn_of_skipped_update(step: int, grad_norm: float) -> None:
    """Log that *step* changed no weight, because its gradient norm is not finite."""
    log.warning("step %d: the gradient norm is %s, no update", step, grad_norm)


def _summed(
    group: ProcessGroup | None, here: Control, further: Sequence[float]
) -> tuple[Control, list[float]]:
    """Combine what the ranks know: counts are summed, and a flag is set if any rank sets it. A collective.

    Only one rank may have seconds on its clock. Returns also the sums of the *further* numbers, equally many on all
    ranks.
    """
    clock = here.clock
    # The sums are float64, exact for counts below 2**53.
    count, num_label_tokens, num_tokens, stop, save_failed, flops, *sums = sum_over_ranks(
        group,
        here.count,
        here.num_label_tokens,
        here.num_tokens,
        here.stop,
        here.save_failed,
        here.flops,
        clock.elapsed_seconds,
        clock.save_is_wanted,
        clock.time_is_up,
        clock.save_is_requested,
        *further,
    )
    elapsed_seconds, save_is_wanted, time_is_up, save_is_requested, *further_sums = sums
    control = Control(
        int(count),
        int(num_label_tokens),
        int(num_tokens),
        stop > 0,
        save_failed > 0,
        flops,
        ClockReading(elapsed_seconds, save_is_wanted > 0, time_is_up > 0, save_is_requested > 0),
    )
    return control, further_sums
