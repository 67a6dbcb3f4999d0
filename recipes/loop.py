"""The training loop: epochs of global batches, the optimizer step of each, validation, and how a run ends."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from itertools import chain, islice
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.module_tensors import unwrap
from automodel_ckpt.checkpoint.run import timeline
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.data.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.distributed.agree import sum_over_ranks
from automodel_ckpt.distributed.mesh import RankLayout
from automodel_ckpt.distributed.parallelize import (
    clip_gradients,
    clip_gradients_on_device,
    reshard,
)
from automodel_ckpt.distributed.stop import StoppedWaiting, StopRequest
from automodel_ckpt.errors import DeviceMemoryError, Stopped, TrainingDiverged
from automodel_ckpt.models.harness import TaskMetric
from automodel_ckpt.models.vocabulary import check_token_ids, num_embeddings
from automodel_ckpt.recipes.benchmarks import Benchmarks
from automodel_ckpt.recipes.completions import Completions
from automodel_ckpt.recipes.evaluation import EvaluationTotals, sum_by_name
from automodel_ckpt.recipes.gradients import GradientAccumulation
from automodel_ckpt.recipes.hang_watch import HangWatch
from automodel_ckpt.recipes.objective import Objective
from automodel_ckpt.recipes.out_of_memory import Situation, reporting_out_of_memory
from automodel_ckpt.recipes.pending_steps import PendingSteps
from automodel_ckpt.recipes.readback import LaunchedStep, Mark, Number, Readback, runs_ahead
from automodel_ckpt.recipes.records import (
    BatchSize,
    Control,
    ReportedStep,
    StepPosition,
    StepResult,
    Validation,
)
from automodel_ckpt.recipes.run_log import RunLog, build_profiler
from automodel_ckpt.recipes.saves import Saves
from automodel_ckpt.recipes.validation_metrics import (
    BENCHMARK,
    LOSS,
    TRAIN_LOSS,
    measures_of,
    metric_name,
    metric_names,
)
from automodel_ckpt.recipes.weight_average import WeightAverage
from automodel_ckpt.training.lr import current_rate
from automodel_ckpt.training.optim import (
    check_sharding_support,
    skip_step_if,
    skips_by_flag,
)
from automodel_ckpt.training.rng import StatefulRNG
from automodel_ckpt.training.spikes import Spike
from automodel_ckpt.training.step_scheduler import (
    ClockReading,
    Due,
    StepScheduler,
    planned_end,
)
from automodel_ckpt.units import counted

log = logging.getLogger("automodel_ckpt")

_DIVERGED_HINT = (
    "lower optimizer.lr, add warmup_steps or clip_grad_norm, use bfloat16 instead of float16, or look at the samples "
    "of these steps (logging.sample_ids)"
)
_NO_BATCH = GlobalBatch(0, 0, 0, [], [], last_of_epoch=True)
_NOTHING = BatchSize(0, 0, 0)


class TrainingLoop:
    """Trains a model with the parts that a recipe built.

    The attributes are the recipe's objects of the same names. The loop has no state that a checkpoint stores: what has
    to be stored belongs to the recipe. To change a step or the validation, derive from this class and name the class in
    the recipe's ``loop_class``. Every method is called on all ranks.
    """

    last_step: StepResult | None
    """The newest step of this process whose numbers are known; None before there is one.

    With several ranks or on a GPU, that is the step before the newest one: :meth:`finish_pending` waits for the newest.
    """

    def __init__(
        self,
        *,
        config: RecipeConfig,
        layout: RankLayout,
        stop_request: StopRequest,
        objective: Objective,
        optimizer: Optimizer,
        lr_scheduler: LRScheduler | None,
        dataloader: GlobalBatchLoader,
        validation_batches: Callable[[], Iterator[GlobalBatch]] | None,
        validation_sets: Mapping[str, Callable[[], Iterator[GlobalBatch]]] | None = None,
        step_scheduler: StepScheduler,
        rng: StatefulRNG,
        checkpointer: Checkpointer | None,
        saves: Saves,
        run_log: RunLog,
        completions: Completions | None = None,
        weight_average: WeightAverage | None = None,
        benchmarks: Benchmarks | None = None,
    ) -> None:
        """*validation_batches* reads the validation set from its start; None if there is none. *validation_sets* reads
        the sets of ``validation_datasets`` by name. *completions* generates text after each validation.
        *weight_average* follows the weights (section ``ema``). *benchmarks* runs tasks (``evaluation.harness``)."""
        self.config = config
        self.layout = layout
        self.stop_request = stop_request
        self.objective = objective
        self.trainable = objective.trainable
        self.model: nn.Module = objective.trainable.model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.dataloader = dataloader
        self.validation_batches = validation_batches
        self.validation_sets = dict(validation_sets or {})
        self.step_scheduler = step_scheduler
        self.rng = rng
        self.checkpointer = checkpointer
        self.saves = saves
        self.run_log = run_log
        self.completions = completions
        self.weight_average = weight_average
        self.benchmarks = benchmarks
        self.measures = measures_of(type(objective), config.loss_fn)
        self.profiler = build_profiler(config, layout)
        self.runs_ahead = self.queues_work()
        self.gradients = GradientAccumulation(
            objective, layout, rng, keeps_on_device=self.runs_ahead
        )
        self.last_step = None
        self._pending = PendingSteps(
            runs_ahead=self.runs_ahead,
            # Tensor and context parallel ranks compute the same loss, which counts once.
            counts_loss=layout.reports_loss,
        )
        self._spike: Spike | None = None
        """The spike that was reported and has not been handled yet."""
        self._after_spike: list[ReportedStep] = []
        """The steps that the device had done by then, which count only if the run cannot go back."""
        self.hang_watch: HangWatch | None = None

    def queues_work(self) -> bool:
        """Whether the host continues while the device computes a step, and reads its numbers a step later."""
        return runs_ahead(self.layout.device.type)

    # ---------------------------------------------------------------- epochs

    def run(self) -> None:
        """Train from the present step to the end of the run. Raises :class:`Stopped` after a stop request."""
        scheduler = self.step_scheduler
        # Also for a finished run: a stop may have prevented the validation of its last step.
        self.make_up_validation()
        if scheduler.is_finished():
            self.already_complete()
            return
        if self.layout.rank == 0:
            self.stop_request.on_request = self.acknowledge_stop
        log.info("%s", planned_end(scheduler.cadence, steps_per_epoch(self.dataloader)))
        self.run_log.timeline.enter(timeline.STEPS)
        with self.profiler, self._hang_watch():
            while not scheduler.is_finished():
                with self.run_log.timeline.phase(timeline.OTHER):
                    self._skip_batches()
                self.run_epoch()
        self.run_log.timeline.enter(timeline.OTHER)
        self.stop_request.on_request = None
        if self.last_step is None and self.saves.resumed is not None:
            # The checkpoint was in the last epoch, of which no full batch is left.
            self.already_complete()
        else:
            self.end()

    def run_epoch(self) -> None:
        """Train on the rest of the current epoch, or until the run is over."""
        for batch in self.run_log.timeline.waiting_for(self.batches(self.dataloader)):
            if batch is not None and self.step_scheduler.is_beyond_last_epoch(batch.epoch):
                self.finish_pending()
                self._end_early()
                return
            control = self.agree_on(batch)
            due = self._due_by_clock(control)
            if self._went_back():
                # A stop that was requested is agreed on again.
                return
            if due is not None and due.anything and not due.stop:
                # By the clock: what is due by counters has been done after the step.
                self.finish_pending()
                if self._is_over_after(due):
                    return
                control = self.agree_on(batch)
            if control.save_failed or control.stop:
                self.finish_pending()
            # The flag is summed over the ranks, so that all enter wait(), a collective.
            if control.save_failed:
                self.saves.wait()
            # This batch was not counted as consumed: the resumed run trains on it.
            if control.stop or batch is None:
                self._went_back()
                self.stop()
            if self._step_and_save(batch, control):
                return

    def _step_and_save(self, batch: GlobalBatch, control: Control) -> bool:
        """Make a step, and what is due after it. Returns whether the run is over, or other batches follow."""
        due = self._step_with_reports(batch, control)
        if self.hang_watch is not None:
            self.hang_watch.note_step(self.step_scheduler.step)
        if self._is_over_after(due):
            return True
        memory = self.saves.memory
        if memory is not None and memory.is_due(self.step_scheduler):
            # The log must have the line of the step before its checkpoint is published.
            due_now = self.finish_pending()
            if due_now is not None and self._is_over_after(due_now):
                return True
            # A step that is not finite could replace the last good checkpoint.
            if self._spike is None and self._newest_is_finite():
                memory.save(self.step_scheduler.step, self._save_in_memory)
        return self._went_back() or self._skip_is_due()

    def _newest_is_finite(self) -> bool:
        """Whether the loss and the gradient norm of the newest step are finite."""
        newest = self.last_step
        if newest is None:
            return False
        return math.isfinite(newest.loss) and math.isfinite(newest.grad_norm)

    @contextmanager
    def _hang_watch(self) -> Iterator[None]:
        """Within the context, steps that do not end are reported (section ``hangs``). A collective."""
        settings = self.config.hangs
        if settings is None or self.checkpointer is None or self.layout.world_size == 1:
            yield
            return
        run = self.checkpointer.directory
        with HangWatch(settings, self.layout, self.run_log.timeline, run) as self.hang_watch:
            yield

    def _save_in_memory(self, checkpointer: Checkpointer) -> None:
        """Save the present step with the *checkpointer* of memory checkpoints. A collective."""
        self.saves.save_in_memory(checkpointer, self.losses(None))

    def _due_by_clock(self, control: Control) -> Due | None:
        """What is due after the newest step, now that its clock is known; None if it was known before."""
        if self.step_scheduler.clock_is_known:
            return None
        return self.step_scheduler.apply_clock(control.clock, stop=control.stop)

    def _is_over_after(self, due: Due) -> bool:
        """Do what is due after a step. Returns whether the run is over; raises :class:`Stopped` for a stop request.

        Nothing else is done after a spike, from which the run goes back. Returns True then.
        """
        went_back = self._went_back()
        if due.stop:
            self.stop()
        if went_back:
            return True
        if due.validate or due.benchmarks or due.save:
            save = due.save and not self._postpones_save(due)
            self.validate_and_save(validate=due.validate, save=save, last=due.last)
        return due.last or self.step_scheduler.has_stopped_improving

    # ---------------------------------------------------------------- spikes

    def _went_back(self) -> bool:
        """Go back if the newest reported step was a spike; returns whether the run did. A collective."""
        if self._spike is None:
            return False
        # The host may run ahead of the device by a step, which has to be reported before its state is replaced.
        self.finish_pending()
        spike, self._spike = self._spike, None
        spikes = self.step_scheduler.spikes
        assert spikes is not None
        target = spike.step - spikes.rule.rollback
        num_rollbacks = spikes.num_rollbacks + 1
        if num_rollbacks > spikes.rule.max_rollbacks:
            # A save in the background may still be writing the last good checkpoint.
            self.saves.wait()
            raise TrainingDiverged(
                f"step {spike.step} is a spike, after {spikes.num_rollbacks} rollbacks: {spike.reason}",
                where="step_scheduler.on_spike.max_rollbacks",
                value=str(spikes.rule.max_rollbacks),
                hint=_DIVERGED_HINT,
            )
        with self.run_log.timeline.phase(timeline.OTHER):
            resumed = self.saves.roll_back(target) if target >= 0 else None
        if resumed is None:
            log.warning(
                "step %d is a spike (%s), and no checkpoint is old enough to go back to step %d: training continues",
                spike.step,
                spike.reason,
                target,
            )
            self._note_finite(spike.step, spike.is_finite)
            steps, self._after_spike = self._after_spike, []
            for step in steps:
                self._judge(step)
            return self._went_back()
        self._after_spike = []
        spikes.num_rollbacks = num_rollbacks
        spikes.skip_after = target
        self.last_step = None
        self.run_log.roll_back(self.step_scheduler, spike, spikes.rule.skip)
        log.warning(
            "step %d is a spike: %s. Going back to step %d from the checkpoint of step %d, and leaving out %s",
            spike.step,
            spike.reason,
            target,
            resumed.step,
            counted(spikes.rule.skip, "global batch", "global batches"),
        )
        return True

    def _skip_is_due(self) -> bool:
        """Whether batches are left out after the present step."""
        spikes = self.step_scheduler.spikes
        return spikes is not None and spikes.skip_after == self.step_scheduler.step

    def _skip_batches(self) -> None:
        """Leave out the global batches of a spike, if the run is at the step that it went back to."""
        spikes = self.step_scheduler.spikes
        if spikes is None or not self._skip_is_due():
            return
        num_left = spikes.rule.skip
        while num_left:
            # Not interrupted by a signal, which only one rank may have: the next step is agreed on by all.
            with closing(iter(self.dataloader)) as batches:
                for batch in islice(batches, num_left):
                    self.dataloader.mark_consumed(batch)
                    num_left -= 1
        spikes.skip_after = None

    def _postpones_save(self, due: Due) -> bool:
        """Whether a save that is due waits for a finite step: it could replace the last good checkpoint."""
        scheduler = self.step_scheduler
        if scheduler.nonfinite_steps == 0 or due.last:
            return False
        log.warning(
            "step %d: not saved, because its loss or gradient norm is not finite", scheduler.step
        )
        return True

    def _step_with_reports(self, batch: GlobalBatch, control: Control) -> Due:
        """Make a step, and wait for it if something is due. Reports failures that its batch explains."""
        doing = (
            f"in the forward pass, backward pass or update of step {self.step_scheduler.step + 1}"
        )
        try:
            with self._reporting_memory(doing, batch):
                with self.profiler.step(self.step_scheduler.step + 1):
                    due = self.step(batch, control)
                if due.anything:
                    self.finish_pending()
        except (IndexError, RuntimeError) as error:
            self.explain(error, batch)
            raise
        except DeviceMemoryError:
            if self.layout.world_size == 1:
                # The record of the step before. With several ranks, it would need a reduction.
                with suppress(RuntimeError):
                    self.finish_pending()
            raise
        return due

    def _reporting_memory(self, doing: str, batch: GlobalBatch) -> AbstractContextManager[None]:
        situation = Situation(self.config, self.layout, self.model, self.optimizer)
        return reporting_out_of_memory(doing, situation, batch.micro_batches)

    def _end_early(self) -> None:
        """End a run whose stream of samples had fewer steps in its last epoch than planned."""
        self.step_scheduler.end_early()
        if self.step_scheduler.unsaved:
            has_validation = self.validation_batches is not None or bool(self.validation_sets)
            self.validate_and_save(validate=has_validation, save=True, last=True)

    def batches(self, source: Iterable[GlobalBatch]) -> Iterator[GlobalBatch | None]:
        """Yield the batches of *source*, then None if this rank receives a stop request while it waits for one."""
        with closing(iter(source)) as batches:  # type: ignore[type-var]
            while True:
                try:
                    # Nothing else: an exception within a collective would leave the others in it.
                    with self.stop_request.interrupting():
                        batch = next(batches, None)
                except StoppedWaiting:
                    yield None
                    return
                if batch is None:
                    return
                yield batch

    def agree_on(self, batch: GlobalBatch | None) -> Control:
        """Sum the sizes of *batch* over the ranks, with the flags to stop and of failed saves. One small reduction.

        It also sums the numbers of the oldest step that is done but not logged, and logs that step. None means that
        this rank received a stop request while it waited for the batch.
        """
        size = self._size_here(batch or _NO_BATCH)
        # Before the flag is read: a signal from here on may be too late to prevent this step, and is logged as such.
        self.step_scheduler.enter_step()
        return self._exchange(size, stop=batch is None)

    def _exchange(self, size: BatchSize, *, stop: bool, wait: bool = False) -> Control:
        """The exchange of all ranks between two steps, with the numbers of a step that is done, which is logged.

        *stop*: whether this rank stops for another reason than a request. *wait*: wait for a step that the device may
        still compute.
        """
        finished = self._pending.oldest(wait=wait)
        numbers = self._numbers_of(finished) if finished is not None else {}
        save_failed = self.checkpointer is not None and self.checkpointer.upload_failed
        # Only rank 0's clock counts, so that all ranks save and end at the same step.
        is_rank0 = self.layout.is_rank0
        here = Control(
            size.count,
            size.num_label_tokens,
            size.num_tokens,
            stop or self.stop_request.wanted,
            save_failed,
            size.flops,
            self.step_scheduler.read_clock() if is_rank0 else ClockReading(),
        )
        began = time.monotonic()
        control, sums = here.summed(
            self.layout.gloo_group, self._pending.sums_here(finished, numbers)
        )
        if self.hang_watch is not None:
            self.hang_watch.note_wait(time.monotonic() - began)
        if finished is not None:
            self._pending.remove_oldest()
            self._report(finished, numbers["grad_norm"], sums)
        return control

    def _numbers_of(self, step: LaunchedStep) -> dict[str, float]:
        """Wait for the numbers of *step* on this rank. Raises what the device reports of it only now."""
        try:
            return step.numbers.read()
        except (IndexError, RuntimeError) as error:
            self.explain(error, step.batch)
            raise

    def _size_here(self, batch: GlobalBatch) -> BatchSize:
        """The size of this rank's part of *batch*; zero if another rank reports the same rows.

        The ranks of a tensor or context parallel group, and all stages, have the same rows, which count once.
        """
        count, num_labels, num_tokens, flops = 0, 0, 0, 0.0
        if self.layout.reports:
            for micro_batch in batch.micro_batches:
                size = self.objective.size_of(micro_batch)
                count += size.count
                num_labels += size.num_label_tokens
                num_tokens += size.num_tokens
                if self.run_log.logs_mfu:
                    flops += self.objective.flops_of(micro_batch)
        return BatchSize(count, num_labels, num_tokens, flops)

    # ---------------------------------------------------------------- step

    def step(self, batch: GlobalBatch, control: Control) -> Due:
        """Train on one global batch and count it; returns what is due after it.

        With several ranks, what is due by the clock or because of a signal is known only before the next step.
        """
        start = Mark(self.layout.device)
        self.step_scheduler.start_step()
        # Read before the schedule moves on: the log has the rate that this step used.
        lr = current_rate(self.optimizer)
        loss_sum, grad_norm = self.train_step(batch, control)
        # Without labels, the step changed no weight.
        if self.weight_average is not None and control.count:
            self.weight_average.update(self.step_scheduler.step + 1, grad_norm)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return self.finish_step(batch, self._launch(batch, control, lr, start, loss_sum, grad_norm))

    def _launch(
        self,
        batch: GlobalBatch,
        control: Control,
        lr: float,
        start: Mark,
        loss_sum: Number,
        grad_norm: Number,
    ) -> LaunchedStep:
        """Start to copy the numbers of a step to the host, now that all its work is queued."""
        router_loss = self.trainable.router_loss
        numbers = {
            "loss": loss_sum,
            "aux_loss": router_loss.value_here if router_loss is not None else 0.0,
            "grad_norm": grad_norm,
        }
        # Sums are by position, and ranks may have added the names in different orders.
        metrics = sorted(self.gradients.metrics) if control.count else []
        for name in metrics:
            numbers[f"metric {name}"] = self.gradients.metrics[name]
        return LaunchedStep(
            position=StepPosition(self.step_scheduler.step + 1, batch.epoch),
            batch=batch,
            control=control,
            lr=lr,
            start=start,
            numbers=Readback(numbers, self.layout.device),
            metrics=metrics,
            may_be_skipped=isinstance(grad_norm, torch.Tensor),
        )

    def train_step(self, batch: GlobalBatch, control: Control) -> tuple[Number, Number]:
        """Forward, backward, clip, update. Returns this rank's summed loss and the global gradient norm.

        The gradient is that of the mean over the count of the global batch, by default its label tokens. A batch
        without labels, or with a gradient that is not finite, changes no weight. If the host runs ahead of the device,
        the results may be tensors, and an optimizer that reads a flag on the device leaves out the update by it.
        """
        step = self.step_scheduler.step + 1
        if self.trainable.fake_quantization is not None:
            self.trainable.fake_quantization.start(step)
        if self.trainable.router_loss is not None:
            self.trainable.router_loss.start_step(control.num_tokens)
        if control.count == 0:
            log.warning("step %d: no label in the whole global batch, no update", step)
            # Without gradients this changes nothing; a learning-rate schedule warns if it is left out.
            self.optimizer.step()
            return 0.0, 0.0
        # DDP and FSDP2 average gradients over the ranks; times this factor they are sums.
        scale = self.layout.sizes.token_parts / control.count
        loss_sum = self.gradients.accumulate(batch, scale)
        grad_norm = self.clip_gradients()
        # The norm is global, so all ranks skip the same update. The schedule advances nevertheless.
        if isinstance(grad_norm, torch.Tensor):
            skip_step_if(self.optimizer, ~torch.isfinite(grad_norm))
        elif not math.isfinite(grad_norm):
            self._warn_of_skipped_update(step, grad_norm)
            # step() below skips parameters without a gradient.
            self.optimizer.zero_grad(set_to_none=True)
        # The optimizer changes the weights now.
        self.saves.await_copies()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss_sum if self.runs_ahead else loss_sum.item(), grad_norm

    def _warn_of_skipped_update(self, step: int, grad_norm: float) -> None:
        log.warning("step %d: the gradient norm is %s, no update", step, grad_norm)

    def clip_gradients(self) -> Number:
        """Scale all gradients together to ``clip_grad_norm``; returns their 2-norm before that. A collective.

        An optimizer with ``divide_in_step`` scales them as it reads them. The norm is a tensor on the device if the
        host runs ahead and the optimizer can leave out an update by a flag; otherwise a number.
        """
        clip: Callable[..., Number] = clip_gradients
        if self.runs_ahead and skips_by_flag(self.optimizer):
            clip = clip_gradients_on_device
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        stage = self.trainable.stage
        counted_elsewhere = stage.counted_elsewhere if stage is not None else frozenset[int]()
        return clip(
            parameters,
            self.config.clip_grad_norm,
            in_step=getattr(self.optimizer, "divide_in_step", None),
            in_stages=self.layout.in_stages,
            counted_elsewhere=counted_elsewhere,
        )

    def finish_step(self, batch: GlobalBatch, launched: LaunchedStep) -> Due:
        """Count a step, and return what is due after it.

        If something is due by the counters, the ranks exchange their flags now: the next exchange is after what is due,
        which may be a long export. One rank always does, since its exchange costs nothing.
        """
        scheduler = self.step_scheduler
        self._pending.add(launched)
        # The loader's position counts finished steps only, not what its workers have prefetched.
        self.dataloader.mark_consumed(batch)
        due = scheduler.finish_step(
            epoch=batch.epoch,
            epochs_done=self.dataloader.epoch,
            num_samples=len(batch.sample_ids),
            num_tokens=launched.control.num_tokens,
        )
        if due.anything or self.layout.world_size == 1:
            control = self._exchange(_NOTHING, stop=False)
            due = scheduler.apply_clock(control.clock, stop=control.stop)
        return due

    def finish_pending(self) -> Due | None:
        """Wait until all steps are done, and log them. A collective if there is a step to wait for.

        The loop calls it before it validates, saves or ends, so that :attr:`last_step` and the logs are complete.
        Returns what is due by the clock, if that became known.
        """
        found = None
        while self._pending:
            due = self._due_by_clock(self._exchange(_NOTHING, stop=False, wait=True))
            found = due or found
        return found

    def _report(self, finished: LaunchedStep, grad_norm: float, sums: Sequence[float]) -> None:
        """Log a step. *sums* are those of :meth:`PendingSteps.sums_here`, over all ranks."""
        total, aux_loss, *metrics = sums
        count = finished.control.count
        means = {}
        for name, metric in zip(finished.metrics, metrics, strict=True):
            means[name] = metric / count
        if finished.may_be_skipped and not math.isfinite(grad_norm):
            self._warn_of_skipped_update(finished.position.step, grad_norm)
        has_router_loss = self.trainable.router_loss is not None
        self.last_step = StepResult(
            total / count if count else math.nan,
            grad_norm,
            finished.lr,
            aux_loss if has_router_loss else None,
            means,
        )
        self.run_log.log_step(
            finished.position,
            finished.batch.sample_ids,
            finished.control,
            self.last_step,
            finished.numbers.end.seconds_since(finished.start),
        )
        # The sum, not the mean: without labels, the mean of a batch is NaN.
        is_finite = math.isfinite(total) and math.isfinite(grad_norm)
        step = finished.position.step
        self._judge(ReportedStep(step, self.last_step.loss, grad_norm, count > 0, is_finite))

    def _judge(self, step: ReportedStep) -> None:
        """Find out whether *step* is a spike, or one too many that is not finite.

        Raises :class:`TrainingDiverged` in the second case, on all ranks.
        """
        if self._spike is not None:
            self._after_spike.append(step)
            return
        spikes = self.step_scheduler.spikes
        # Without labels, the loss is not a number and no weight changes.
        if spikes is not None and step.has_labels:
            self._spike = spikes.note(step.step, step.loss, step.grad_norm)
        if self._spike is None:
            self._note_finite(step.step, step.is_finite)

    def _note_finite(self, step: int, is_finite: bool) -> None:
        """Count *step* if it is not finite. Raises :class:`TrainingDiverged` after too many, on all ranks."""
        assert self.last_step is not None, "it was reported"
        if self.step_scheduler.note_finite(is_finite):
            self._stop_diverged(step, self.last_step)

    def _stop_diverged(self, step: int, result: StepResult) -> NoReturn:
        """Raise :class:`TrainingDiverged` after too many steps that were not finite. The same on all ranks.

        Nothing is saved.
        """
        # A save in the background may still be writing the last good checkpoint.
        self.saves.wait()
        count = self.step_scheduler.nonfinite_steps
        steps = "in 1 step" if count == 1 else f"in {count} consecutive steps"
        newest = self.saves.last_save or self.saves.resumed
        kept = f"the newest checkpoint is {newest.path.name}" if newest else "nothing was saved"
        raise TrainingDiverged(
            f"the loss or the gradient norm was not finite {steps}, the last of which is step {step}",
            where="step_scheduler.stop_after_nonfinite_steps",
            value=f"loss {result.loss}, gradient norm {result.grad_norm}, learning rate {result.lr:g}",
            hint=f"{_DIVERGED_HINT}; {kept}",
        )

    def explain(self, error: Exception, batch: GlobalBatch) -> None:
        """Raise :class:`RecipeError` if a step failed because *batch* has tokens that the model does not have, or
        because the optimizer does not support sharded parameters.

        torch reports only that an index is out of range, on a GPU not even that. Checking after the failure costs
        nothing in other steps.
        """
        check_sharding_support(self.optimizer, error)
        # A GPU reports the failure of a step while the host queues the next one.
        for each in [*self._pending.batches, batch]:
            where = f"the global batch of samples {each.sample_ids[:16]}"
            check_token_ids(each.micro_batches, num_embeddings(unwrap(self.model)), where)

    # ---------------------------------------------------------------- validation

    def validate(self) -> Validation | None:
        """Compute the mean loss over each validation set; None if a stop was requested meanwhile.

        It leaves no trace in the training: no gradients, and random states are restored.
        """
        totals: dict[str | None, EvaluationTotals] = {}
        if self.trainable.fake_quantization is not None:
            # A run that has just been resumed has made no step.
            self.trainable.fake_quantization.start(max(1, self.step_scheduler.step))
        self.model.eval()
        try:
            with torch.no_grad(), self.rng.preserved():
                for name, batches in self._all_validation_sets():
                    found = self._set_totals(batches())
                    if found is None:
                        return None
                    totals[name] = found
        finally:
            self.model.train()
            # With FSDP2, a forward pass without a backward pass leaves parameters gathered.
            reshard(self.model)
        assert totals, "without validation data, no validation is due"
        losses = {}
        for name, each in totals.items():
            if name is not None:
                losses[name] = each.mean_loss
        main_name, main = next(iter(totals.items()))
        further = self._further_metrics(main_name, totals)
        return Validation(main.mean_loss, main.num_label_tokens, main.count, losses, further)

    def _set_totals(self, batches: Iterable[GlobalBatch]) -> EvaluationTotals | None:
        """The totals of one validation set over all ranks; None if a stop was requested. A collective."""
        with self.objective.evaluating() as measured:
            totals = self.validation_totals(batches)
        if totals is None:
            return None
        # Context parallel ranks count different labels, as they sum the loss of different ones.
        here = measured.read() if self.layout.reports_loss else {}
        loss, count, num_labels = totals
        sums = sum_by_name(self.layout.gloo_group, here)
        return EvaluationTotals(loss, int(count), int(num_labels), sums)

    def _further_metrics(
        self, main: str | None, totals: Mapping[str | None, EvaluationTotals]
    ) -> dict[str, float]:
        """The metrics beside the losses by their names in logs. *main* is the set without a name in them."""
        values = {name: self.objective.summarize(each) for name, each in totals.items()}
        found: dict[str, float] = {}
        for measure in self.measures:
            if measure == LOSS:
                continue
            found[metric_name(measure, None)] = values[main][measure]
            for name, of_set in values.items():
                if name is not None:
                    found[metric_name(measure, name)] = of_set[measure]
        return found

    def _all_validation_sets(
        self,
    ) -> Iterator[tuple[str | None, Callable[[], Iterator[GlobalBatch]]]]:
        """Yield (name, function that reads it) for each validation set; the first one's loss is ``val_loss``.

        The name of ``validation_dataset`` is None.
        """
        if self.validation_batches is not None:
            yield None, self.validation_batches
        yield from self.validation_sets.items()

    def validation_totals(
        self, batches: Iterable[GlobalBatch]
    ) -> tuple[float, float, float] | None:
        """The summed loss, its count, and the label tokens of all batches and ranks; None if a stop was requested.

        The sums of a batch are reduced before the next forward pass, with the stop flags: if a rank is stopped while it
        waits for data, the others must learn of it before they enter a collective of the model without that rank.
        """
        loss, count, num_labels = 0.0, 0.0, 0.0
        mine: tuple[Number, int, int] = (0.0, 0, 0)
        # Each round reduces the sums of the batch before; the extra round those of the last.
        for batch in chain(self.batches(batches), [_NO_BATCH]):
            wants_stop = batch is None or self.stop_request.wanted
            loss_here, count_here, num_labels_here = mine
            sums = sum_over_ranks(
                self.layout.gloo_group,
                float(loss_here),
                count_here,
                num_labels_here,
                wants_stop,
            )
            if sums[3] > 0:
                return None
            loss += sums[0]
            count += sums[1]
            num_labels += sums[2]
            mine = self.validation_sums(batch or _NO_BATCH)
        return loss, count, num_labels

    def validation_sums(self, batch: GlobalBatch) -> tuple[Number, int, int]:
        """This rank's summed loss, its count, and the label tokens of *batch*; zeros if another rank reports them.

        If the host runs ahead of the device, the loss may be a tensor, which is read when the next batch is there.
        """
        doing = f"in the validation of step {self.step_scheduler.step}"
        try:
            with self._reporting_memory(doing, batch):
                loss: Number = 0.0
                self.objective.start_batch(batch.micro_batches)
                for each in self.objective.losses(batch.micro_batches):
                    # float64, as in the reduction over the ranks.
                    part = each.double()
                    loss += part if self.runs_ahead else part.item()
        except (IndexError, RuntimeError) as error:
            self.explain(error, batch)
            raise
        size = self._size_here(batch)
        return loss if self.layout.reports_loss else 0.0, size.count, size.num_label_tokens

    def validate_and_save(self, *, validate: bool, save: bool, last: bool = False) -> None:
        """Validate first, so that the checkpoint contains the validation of its step, then save.

        *last*: the run ends with this step. Raises :class:`Stopped` if a stop was requested during the validation.
        """
        started = time.monotonic()
        validation = self._validated() if validate else None
        if validate and validation is None:
            self.stop()
        found = self._run_benchmarks(validation)
        losses = {**self.losses(validation), **self._benchmark_values(found)}
        is_measured = validation is not None or bool(found)
        is_best = is_measured and self.saves.note_if_best(losses)
        if is_measured:
            self.step_scheduler.note_metrics(losses)
        if self.step_scheduler.has_stopped_improving:
            save = last = True
        if (save or is_best) and self.step_scheduler.unsaved:
            self.saves.save(losses, validated=is_measured, started=started, last=last)

    def _run_benchmarks(self, validation: Validation | None) -> Sequence[TaskMetric]:
        """Run the benchmarks if they are due. *validation* is that of the same step.

        Raises :class:`Stopped` if a stop was requested meanwhile. The next start then makes up for both.
        """
        scheduler = self.step_scheduler
        if self.benchmarks is None or not scheduler.benchmarks_are_missing:
            return ()
        with self.run_log.timeline.phase(timeline.VALIDATION), self.validated_weights():
            metrics = self.benchmarks.run()
        if metrics is None:
            if validation is not None:
                scheduler.repeat_validation()
            self.stop()
        scheduler.note_benchmarks()
        texts = [f"{each.task} {each.metric} {each.value:.4f}" for each in metrics]
        log.info("step %d: %s", scheduler.step, ", ".join(texts))
        self.run_log.log_benchmarks(scheduler, metrics)
        return metrics

    def _benchmark_values(self, metrics: Sequence[TaskMetric]) -> dict[str, float | None]:
        """The values of *metrics* by name. Without any, null for those that the recipe names."""
        values: dict[str, float | None] = {each.name: each.value for each in metrics}
        rule = self.step_scheduler.cadence.early_stopping
        named = [self.config.checkpoint.best_metric_key, rule.metric if rule is not None else ""]
        for name in named:
            if name.startswith(BENCHMARK) and not metrics:
                values[name] = None
        return values

    @contextmanager
    def validated_weights(self) -> Iterator[None]:
        """Within the context, the model has the weights that validations measure: with ``ema.validate`` the average."""
        section = self.config.ema
        if self.weight_average is None or section is None or not section.validate:
            yield
            return
        self.saves.await_copies()
        with self.weight_average.in_model():
            yield

    def _validated(self) -> Validation | None:
        scheduler = self.step_scheduler
        with self.run_log.timeline.phase(timeline.VALIDATION), self.validated_weights():
            validation = self.validate()
            if validation is None:
                return None
            self._log_validation(validation)
            if self.completions is not None:
                self.run_log.log_completions(scheduler, self.completions.at(scheduler.step))
        return validation

    def _log_validation(self, validation: Validation) -> None:
        scheduler = self.step_scheduler
        scheduler.note_validated()
        figures = self.run_log.figures(
            {"train_loss": self.last_step.loss if self.last_step else None}
        )
        of = " of the average" if self.config.ema is not None and self.config.ema.validate else ""
        measured = validation_text(validation, self.measures)
        text = f"step {scheduler.step}: validation loss{of} {measured}"
        log.info("%s", f"{text}; {figures}" if figures else text)
        self.run_log.log_validation(scheduler, validation)

    def make_up_validation(self) -> None:
        """Run the validation that a stop prevented before the present start; the step's checkpoint exists already.

        Afterwards the best value so far, and its checkpoint, are those of a run that was not stopped.
        """
        scheduler = self.step_scheduler
        if not (scheduler.validation_is_missing or scheduler.benchmarks_are_missing):
            return
        log.info("validating step %d, which a signal had prevented", scheduler.step)
        validation = None
        if scheduler.validation_is_missing:
            validation = self._validated()
            if validation is None:
                self.stop()
        found = self._run_benchmarks(validation)
        losses = {**self.losses(validation), **self._benchmark_values(found)}
        self.saves.note_late_validation(losses)
        scheduler.note_metrics(losses)

    def losses(self, validation: Validation | None) -> dict[str, Any]:
        """The content of ``losses.json`` at the present step; null for what was not measured at this step."""
        metrics: dict[str, float | None] = {}
        for name in metric_names(self.measures, self.validation_sets):
            metrics[name] = None
        if validation is not None:
            metrics.update(validation.metrics)
        return {
            "step": self.step_scheduler.step,
            "epoch": self.step_scheduler.epoch,
            TRAIN_LOSS: self.last_step.loss if self.last_step else None,
            **metrics,
        }

    # ---------------------------------------------------------------- the end

    def acknowledge_stop(self, number: int) -> None:
        """Log that a signal was received, and what follows; a thread calls it while the step continues.

        *number* is the number of the signal, 0 if another rank received it.
        """
        name = signal.Signals(number).name if number else "a signal to another rank"
        again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
        saves = "saving"
        if self.checkpointer is None:
            saves = "nothing is saved, checkpoint.enabled is false"
        code = self.stop_request.exit_code
        then = f"{saves}, then exit {code}" if code else f"{saves}, then exit"
        step = self.step_scheduler.stops_after
        self.run_log.progress.write_above(
            f"{name}: stopping after step {step} at the latest: {then}; {again} to stop now without saving"
        )

    def stop(self) -> NoReturn:
        """Save the last completed step unless it is saved. Raises :class:`Stopped`."""
        scheduler = self.step_scheduler
        self.saves.stop(self.losses(None))
        saved = self.checkpointer is not None and scheduler.step > 0
        number = self.stop_request.requested
        by = signal.Signals(number).name if number else "a signal to another rank"
        outcome = ", which is saved" if saved else "; nothing was saved"
        last_save = self.saves.last_save
        raise Stopped(
            f"stopped by {by} after step {scheduler.step}{outcome}",
            where=str(self.checkpointer.directory) if self.checkpointer else "",
            value=last_save.path.name if last_save else "",
            hint="the same command continues from there"
            if saved
            else "the same command starts over",
        )

    def end(self) -> None:
        """Log the end of a complete run. Raises the failure of the last save if training continued after it."""
        # A failed save in the background must end the run before it is logged as done.
        self.saves.wait()
        scheduler = self.step_scheduler
        loss = f"training loss {self.last_step.loss:.4f}" if self.last_step else "no step was made"
        log.info("done: step %d, %s", scheduler.step, loss)
        log.info("%s", scheduler.reason_of_end())
        self.saves.end()
        if self.layout.rank == 0:
            self.saves.note_finished()

    def already_complete(self) -> None:
        """Log that the run was complete when it was started, and make exports that a kill or a signal prevented."""
        scheduler = self.step_scheduler
        log.info("already complete at step %d: %s", scheduler.step, scheduler.reason_of_end())
        if scheduler.unsaved:
            # Its checkpoint was in memory only, and the recipe now ends before the next one on disk.
            self.saves.save(self.losses(None), validated=False, started=time.monotonic(), last=True)
            self.saves.wait()
        self.saves.export_finished()
        if self.layout.rank == 0:
            self.saves.note_finished()


def validation_text(validation: Validation, measures: Iterable[str]) -> str:
    """The metrics of a validation for the log: those of the main set, then those of each named one."""

    def text(loss: float, set_name: str | None) -> str:
        parts = [f"{loss:.4f}"]
        for measure in measures:
            value = validation.further.get(metric_name(measure, set_name))
            if value is not None:
                parts.append(f"{measure} {value:.4g}")
        return ", ".join(parts)

    sets = [text(validation.loss, None)]
    for name, loss in validation.losses.items():
        sets.append(f"{name} {text(loss, name)}")
    return "; ".join(sets)


def steps_per_epoch(loader: GlobalBatchLoader) -> int | None:
    """Optimizer steps of a complete epoch; None for a stream, whose length is unknown."""
    try:
        return len(loader)
    except TypeError:
        return None
