"""The training loop: epochs of global batches, the optimizer step of each, validation, and how a run ends."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from automodel_ckpt.base.device_copies import Mark
from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.run.notes import OTHER, STEPS
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.data.batches.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.errors import DeviceMemoryError, Stopped
from automodel_ckpt.optim.build import current_rate, skip_step_if, skips_by_flag
from automodel_ckpt.parallel.gradients import clip_gradients
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.parallel.ranks.stop import StoppedWaiting, StopRequest
from automodel_ckpt.training.counters.step_scheduler import Due, StepScheduler, planned_end
from automodel_ckpt.training.gradients import (
    BatchErrors,
    GradientAccumulation,
    check_all_trained,
    check_part,
)
from automodel_ckpt.training.measure.measurements import (
    TRAIN_LOSS,
    Batches,
    Measurements,
    ValidationSets,
    measures_of,
    metric_names,
    steps_per_epoch,
)
from automodel_ckpt.training.model.sections import is_fully_sharded
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.saves.saves import Saves, again, signal_name
from automodel_ckpt.training.values.records import (
    Control,
    Number,
    Validation,
)
from automodel_ckpt.training.values.run_log import RunLog, build_profiler
from automodel_ckpt.training.values.step_numbers import (
    Divergence,
    StepNumbers,
    StepResult,
    warn_of_skipped_update,
)

if TYPE_CHECKING:
    from automodel_ckpt.training.measure.weight_average import WeightAverage
    from automodel_ckpt.training.watch.hang_watch import HangWatch
    from automodel_ckpt.training.watch.stragglers import ForwardTimer

log = logging.getLogger("automodel_ckpt")


class TrainingLoop:
    """Trains a model with the parts that a recipe built.

    The attributes are the recipe's objects of the same names. The loop has no state that a checkpoint stores: what has
    to be stored belongs to the recipe. To change a step or the validation, derive from this class and name the class in
    the recipe's ``loop_class``. Every method is called on all ranks.
    """

    rejects_unused_parameters: ClassVar[bool] = False
    """Whether trained parameters without a gradient in the first step are an error in any case, not only with ddp."""

    def __init__(self, recipe: Any) -> None:
        """*recipe* is the :class:`~automodel_ckpt.training.recipe.Recipe`. Its parts have been built."""
        self.config: RecipeConfig = recipe.config
        self.layout: RankLayout = recipe.layout
        self.stop_request: StopRequest = recipe.stop_request
        self.objective: Objective = recipe.objective
        self.trainable = self.objective.trainable
        self.model: nn.Module = self.trainable.model
        self.optimizer: Optimizer = recipe.optimizer
        self.lr_scheduler: LRScheduler | None = recipe.lr_scheduler
        self.dataloader: GlobalBatchLoader = recipe.dataloader
        self.validation_batches: Batches | None = recipe.validation_batches
        # A recipe with a build() that does not call build_training may not have it.
        self.validation_sets: dict[str, Batches] = dict(getattr(recipe, "validation_sets", {}))
        self.step_scheduler: StepScheduler = recipe.step_scheduler
        self.rng: StatefulRNG = recipe.rng
        self.checkpointer: Checkpointer | None = recipe.checkpointer
        self.saves: Saves = recipe.saves
        self.run_log: RunLog = recipe.run_log
        self.weight_average: WeightAverage | None = recipe.weight_average
        self.measures = measures_of(type(self.objective), self.config.loss_fn)
        self.profiler = build_profiler(self.config, self.layout)
        self.runs_ahead = self.queues_work()
        self.hang_watch: HangWatch | None = None
        self.forward_timer: ForwardTimer | None = None
        if self.watches_ranks:
            from automodel_ckpt.training.watch.stragglers import ForwardTimer

            # Hooks of fsdp2 modules would interrupt the graphs of compiled layers.
            if not (self.config.compile.enabled and is_fully_sharded(self.config, self.layout)):
                self.forward_timer = ForwardTimer(self.model, self.layout.device)
        self.gradients = GradientAccumulation(self)
        self._has_checked_gradients = False
        self._replicated_gradients = None
        if self.layout.sizes.tp > 1:
            from automodel_ckpt.training.watch.replicas import ReplicatedGradients

            self._replicated_gradients = ReplicatedGradients(self.model, self.config)
        self.errors = BatchErrors(self.config, self.layout, self.model, self.optimizer)
        self.divergence = Divergence(self)
        self._numbers = StepNumbers(self)
        self.validations = ValidationSets(self)
        self.measurements = Measurements(recipe, self)

    @property
    def last_step(self) -> StepResult | None:
        """The newest step of this process with known numbers. None before there is one.

        With several ranks or on a GPU, it is the step before the newest one: :meth:`finish_pending` waits for the
        newest.
        """
        return self._numbers.newest

    def queues_work(self) -> bool:
        """Whether the host continues while the device computes a step, and reads its numbers a step later."""
        return self.layout.device.type != "cpu"

    @property
    def watches_ranks(self) -> bool:
        """Whether steps that hang and slow ranks are looked for (section ``hangs``)."""
        has_directory = self.checkpointer is not None
        return has_directory and self.config.hangs is not None and self.layout.world_size > 1

    # ---------------------------------------------------------------- epochs

    def run(self) -> None:
        """Train from the present step to the end of the run. Raises :class:`Stopped` after a stop request."""
        scheduler = self.step_scheduler
        # Also for a finished run: a stop may have prevented the validation of its last step.
        self.measurements.make_up()
        if scheduler.is_finished():
            self._end_again()
            return
        if self.layout.rank == 0:
            self.stop_request.on_request = self._acknowledge
        log.info("%s", planned_end(scheduler.settings, steps_per_epoch(self.dataloader)))
        self.run_log.timeline.enter(STEPS)
        with ExitStack() as stack:
            if self.profiler is not None:
                stack.enter_context(self.profiler)
            if self.watches_ranks:
                from automodel_ckpt.training.watch.hang_watch import HangWatch
                from automodel_ckpt.training.watch.stragglers import StragglerWatch

                assert self.config.hangs is not None
                self.hang_watch = stack.enter_context(HangWatch(self))
                self._numbers.straggler_watch = StragglerWatch(
                    self.config.hangs,
                    self.layout,
                    self.run_log.timeline,
                    self.hang_watch.hosts,
                    self.run_log.log_event,
                )
            while not scheduler.is_finished():
                with self.run_log.timeline.phase(OTHER):
                    self.divergence.skip_batches(self.dataloader)
                self.run_epoch()
        self.run_log.timeline.enter(OTHER)
        self.stop_request.on_request = None
        if self.last_step is None and self.saves.resumed is not None:
            # The checkpoint was in the last epoch, of which no full batch is left.
            self._end_again()
        else:
            self.end()

    def run_epoch(self) -> None:
        """Train on the rest of the current epoch, or until the run is over."""
        scheduler = self.step_scheduler
        for batch in self.run_log.timeline.waiting_for(self.batches(self.dataloader)):
            last_epoch = scheduler.num_epochs
            if batch is not None and last_epoch is not None and batch.epoch >= last_epoch:
                # A stream of samples had fewer steps in its last epoch than planned.
                self.finish_pending()
                scheduler.end_early()
                if scheduler.unsaved:
                    self.validate_and_save(validate=scheduler.has_validation, save=True, last=True)
                return
            control = self._agree_before_step(batch)
            if control is None:
                return
            # This batch was not counted as consumed: the resumed run trains on it.
            if control.stop or batch is None:
                self._go_back_after_spike()
                self.stop()
            due = self._take_step(batch, control)
            if self.hang_watch is not None:
                self.hang_watch.note_step(scheduler.step)
            if self._numbers.straggler_watch is not None:
                self._numbers.straggler_watch.note_step()
            if self._do_what_is_due(due) or self._save_in_memory_if_due():
                return
            if self._go_back_after_spike() or self.divergence.skip_is_due():
                return

    def _agree_before_step(self, batch: GlobalBatch | None) -> Control | None:
        """Agree with all ranks on a step on *batch*, and do what is due after the newest step by its clock. Collective.

        Returns None when no step on *batch* follows: the run is over, or has gone back before a spike.
        """
        control = self.agree_on(batch)
        due = self.step_scheduler.apply_new_clock(control)
        if self._go_back_after_spike():
            # A stop that was requested is agreed on again.
            return None
        if due is not None and due.anything and not due.stop:
            # By the clock: what is due by counters has been done after the step.
            self.finish_pending()
            if self._do_what_is_due(due):
                return None
            control = self.agree_on(batch)
        if control.save_failed or control.stop:
            self.finish_pending()
        # The flag is summed over the ranks, so that all enter wait(), a collective.
        if control.save_failed:
            self.saves.wait()
        return control

    def _save_in_memory_if_due(self) -> bool:
        """Save the present step with ``checkpoint.memory`` if that is due.

        It waits for the step, after which something else can be due by the clock. Returns whether no step follows then,
        as :meth:`_do_what_is_due` does.
        """
        memory = self.saves.memory
        if memory is None or not memory.is_due(self.step_scheduler):
            return False
        # The log must have the line of the step before its checkpoint is published.
        due = self.finish_pending()
        if due is not None and self._do_what_is_due(due):
            return True
        # A step that is not finite could replace the last good checkpoint.
        is_good = self.last_step is not None and self.last_step.is_finite
        if self.divergence.spike is None and is_good:
            memory.save(
                self.step_scheduler.step,
                lambda checkpointer: self.saves.write(checkpointer, self.losses(None)),
            )
        return False

    def _do_what_is_due(self, due: Due) -> bool:
        """Validate, save or stop after a step. Raises :class:`Stopped` for a stop request.

        Returns whether no step follows in this pass over the batches: the run is over, or has gone back before a spike,
        and then nothing else is done.
        """
        went_back = self._go_back_after_spike()
        if due.stop:
            self.stop()
        if went_back:
            return True
        if due.validate or due.benchmark or due.save:
            save = due.save and not self.divergence.postpones_save(due)
            self.validate_and_save(validate=due.validate, save=save, last=due.last)
        return due.last or self.step_scheduler.has_stopped_improving

    def _go_back_after_spike(self) -> bool:
        """Go back to an earlier checkpoint if a reported step was a spike. Returns whether it did. A collective."""
        if self.divergence.spike is None:
            return False
        # The host may run ahead of the device by a step, which has to be reported before its state is replaced.
        self.finish_pending()
        if not self.divergence.go_back():
            return False
        self._numbers.newest = None
        return True

    def _take_step(self, batch: GlobalBatch, control: Control) -> Due:
        """Make a step, and wait for it if something is due after it. An error names what in the batch explains it."""
        step, profiler = self.step_scheduler.step + 1, self.profiler
        doing = f"in the forward pass, backward pass or update of step {step}"
        try:
            with self.errors.explained(doing, batch):
                with nullcontext() if profiler is None else profiler.step(step):
                    due = self.step(batch, control)
                check_part(self, "step", due, Due)
                if due.anything:
                    self.finish_pending()
        except DeviceMemoryError:
            if self.layout.world_size == 1:
                # The record of the step before. With several ranks, it would need a reduction.
                with suppress(RuntimeError):
                    self.finish_pending()
            raise
        return due

    def batches(self, source: Iterable[GlobalBatch]) -> Iterator[GlobalBatch | None]:
        """Yield the batches of *source*, and at last None when this rank is asked to stop while it waits for one."""
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
        size = None if batch is None else self.objective.size_here(batch.micro_batches)
        # Before the flag is read: a signal from here on may be too late to prevent this step, and is logged as such.
        self.step_scheduler.is_in_step = True
        return self._numbers.exchange(size, stop=batch is None)

    # ---------------------------------------------------------------- step

    def step(self, batch: GlobalBatch, control: Control) -> Due:
        """Train on one global batch and count it. Returns what is due after it.

        If something is due by the counters, the ranks exchange their flags now: the next exchange is after what is due,
        which may be a long export. One rank always does, since its exchange costs nothing. With several ranks, what is
        due by the clock or because of a signal is otherwise known only before the next step.
        """
        scheduler = self.step_scheduler
        start = Mark(self.layout.device)
        scheduler.start_step()
        # Read before the schedule moves on: the log has the rate that this step used.
        lr = current_rate(self.optimizer)
        trained = self.train_step(batch, control)
        check_part(self, "train_step", trained, tuple)
        loss_sum, grad_norm = trained
        # Without labels, the step changed no weight.
        if self.weight_average is not None and control.count:
            self.weight_average.update(scheduler.step + 1, grad_norm)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._numbers.launch(batch, control, lr, start, (loss_sum, grad_norm))
        # The loader's position counts finished steps only, not what its workers have prefetched.
        self.dataloader.mark_consumed(batch)
        due = scheduler.finish_step(
            epoch=batch.epoch,
            epochs_done=self.dataloader.epoch,
            num_samples=len(batch.sample_ids),
            num_tokens=control.num_tokens,
        )
        if due.anything or self.layout.world_size == 1:
            agreed = self._numbers.exchange(None, stop=False)
            due = scheduler.apply_clock(agreed.clock, stop=agreed.stop)
        return due

    def train_step(self, batch: GlobalBatch, control: Control) -> tuple[Number, Number]:
        """Forward, backward, clip, update. Returns this rank's summed loss and the global gradient norm.

        The gradient belongs to the mean over the count of the global batch, by default its label tokens. A batch
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
        if not self._has_checked_gradients and self.trainable.stage is None:
            # Gradients exist only between the backward pass and zero_grad().
            self._has_checked_gradients = True
            check_all_trained(
                self.model,
                has_adapters=self.config.peft is not None,
                is_error=self.rejects_unused_parameters,
                is_resumed=self.saves.resumed is not None,
            )
        if self._replicated_gradients is not None:
            self._replicated_gradients.check(self.layout.gloo_group)
        grad_norm = self.clip_gradients()
        # The norm is global, so all ranks skip the same update. The schedule advances nevertheless.
        if isinstance(grad_norm, torch.Tensor):
            skip_step_if(self.optimizer, ~torch.isfinite(grad_norm))
        elif not math.isfinite(grad_norm):
            warn_of_skipped_update(step, grad_norm)
            # step() below skips parameters without a gradient.
            self.optimizer.zero_grad(set_to_none=True)
        # The optimizer changes the weights now.
        self.saves.await_copies()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss_sum if self.runs_ahead else loss_sum.item(), grad_norm

    def clip_gradients(self) -> Number:
        """Scale all gradients together to ``clip_grad_norm``. Returns their 2-norm before that. A collective.

        An optimizer with ``divide_in_step`` scales them as it reads them. The norm is a tensor on the device if the
        host runs ahead and the optimizer can leave out an update by a flag; otherwise a number.
        """
        on_device = self.runs_ahead and skips_by_flag(self.optimizer)
        stage = self.trainable.stage
        norm: Number = clip_gradients(
            [p for group in self.optimizer.param_groups for p in group["params"]],
            self.config.clip_grad_norm,
            on_device=on_device,
            in_step=getattr(self.optimizer, "divide_in_step", None),
            in_stages=self.layout.in_stages,
            counted_elsewhere=stage.counted_elsewhere if stage is not None else frozenset(),
        )
        return norm

    def finish_pending(self) -> Due | None:
        """Wait until all steps are done, and log them. A collective if there is a step to wait for.

        The loop calls it before it validates, saves or ends, so that :attr:`last_step` and the logs are complete.
        Returns what is due by the clock, if that became known.
        """
        found = None
        while self._numbers.pending:
            control = self._numbers.exchange(None, stop=False, wait=True)
            found = self.step_scheduler.apply_new_clock(control) or found
        return found

    # ---------------------------------------------------------------- validation, and the end

    def validate(self) -> Validation | None:
        """Compute the mean loss over each validation set. Returns None when a stop was requested meanwhile."""
        return self.validations.measure(self.step_scheduler.step)

    def validate_and_save(self, *, validate: bool, save: bool, last: bool = False) -> None:
        """Validate first, so that the checkpoint contains the validation of its step, then save.

        *last*: the run ends with this step. Raises :class:`Stopped` if a stop was requested during the validation.
        """
        started = time.monotonic()
        losses, is_measured = self.measurements.take(validate=validate)
        is_best = is_measured and self.saves.note_if_best(losses)
        if is_measured:
            self.step_scheduler.note_metrics(losses)
        if self.step_scheduler.has_stopped_improving:
            save = last = True
        if (save or is_best) and self.step_scheduler.unsaved:
            self.saves.save(losses, validated=is_measured, started=started, last=last)

    def losses(self, validation: Validation | None) -> dict[str, Any]:
        """The content of ``losses.json`` at the present step; null for what was not measured at this step."""
        metrics: dict[str, float | None] = dict.fromkeys(
            metric_names(self.measures, self.validation_sets)
        )
        if validation is not None:
            metrics.update(validation.metrics)
        return {
            "step": self.step_scheduler.step,
            "epoch": self.step_scheduler.epoch,
            TRAIN_LOSS: self.last_step.loss if self.last_step else None,
            **metrics,
        }

    def _acknowledge(self, number: int) -> None:
        """Log a received signal and what follows. A thread calls it while the step continues."""
        saves = "saving" if self.checkpointer else "nothing is saved, checkpoint.enabled is false"
        code = self.stop_request.exit_code
        then = f"{saves}, then exit {code}" if code else f"{saves}, then exit"
        step = self.step_scheduler.step + self.step_scheduler.is_in_step
        self.run_log.progress.write_above(
            f"{signal_name(number)}: stopping after step {step} at the latest: {then}; {again(number)} to stop now "
            "without saving"
        )

    def stop(self) -> NoReturn:
        """Save the last completed step unless it is saved. Raises :class:`Stopped`. A collective."""
        step, request = self.step_scheduler.step, self.stop_request
        self.saves.stop(self.losses(None))
        self.saves.upload_before_stop(request)
        outcome, hint = "; nothing was saved", "the same command starts over"
        if self.checkpointer is not None and step > 0:
            outcome, hint = ", which is saved", "the same command continues from there"
        last_save = self.saves.last_save
        raise Stopped(
            f"stopped by {signal_name(request.requested)} after step {step}{outcome}",
            where=str(self.checkpointer.directory) if self.checkpointer else "",
            value=last_save.path.name if last_save else "",
            hint=hint,
        )

    def end(self) -> None:
        """Log the end of a complete run. Raises the failure of the last save if training continued after it."""
        # A failed save in the background must end the run before it is logged as done.
        self.saves.wait()
        last_step = self.last_step
        loss = f"training loss {last_step.loss:.4f}" if last_step else "no step was made"
        why = self.step_scheduler.reason_of_end()
        log.info("done: step %d, %s; %s", self.step_scheduler.step, loss, why)
        self.saves.end(self.stop_request)

    def _end_again(self) -> None:
        """Log that the run was complete when it was started, and make exports that a kill or a signal prevented."""
        scheduler = self.step_scheduler
        log.info("already complete at step %d: %s", scheduler.step, scheduler.reason_of_end())
        if scheduler.unsaved:
            # Its checkpoint was in memory only, and the recipe now ends before the next one on disk.
            self.saves.save(self.losses(None), validated=False, started=time.monotonic(), last=True)
            self.saves.wait()
        self.saves.export_finished(self.stop_request)
