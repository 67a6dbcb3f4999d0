"""The loop of every fine-tuning recipe: an epoch's global batches, the step that each of them is, and validation."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedConfig

from automodel_ckpt.checkpoint.module_tensors import unwrap
from automodel_ckpt.data.loader import GlobalBatch
from automodel_ckpt.distributed.agree import sum_over_ranks
from automodel_ckpt.distributed.context_parallel import ContextParallel
from automodel_ckpt.distributed.parallelize import clip_gradients, gradient_sync, reshard
from automodel_ckpt.distributed.stop import StoppedWaiting
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.build import check_context
from automodel_ckpt.models.loss_head import LossOf
from automodel_ckpt.models.vocabulary import check_token_ids, num_embeddings
from automodel_ckpt.recipes.lifecycle import Lifecycle
from automodel_ckpt.recipes.objective import Objective
from automodel_ckpt.recipes.pipeline import Staged
from automodel_ckpt.recipes.records import AUX_LOSS, Control, LossSum, StepResult, Validation
from automodel_ckpt.recipes.trainable import Rows, Trainable
from automodel_ckpt.training.loss import LossFn
from automodel_ckpt.training.lr import current_rate
from automodel_ckpt.training.optim import check_sharding_support
from automodel_ckpt.training.router_loss import RouterLoss
from automodel_ckpt.training.step_scheduler import Due, planned_end

log = logging.getLogger("automodel_ckpt")


class Steps(Lifecycle):
    """Takes the steps of a run with the attributes that the subclasses build."""

    objective_class: type[Objective] = Objective
    """What computes the loss of a micro-batch."""
    objective: Objective
    loss_fn: LossFn
    """The loss of full logits, where the output layer does not compute it."""
    loss_of: LossOf | None
    """The model's output layer as one that computes the loss; None: the loss is computed from full logits."""
    all_up_to = 0
    """Places of a micro-batch up to which the loss head takes those without a label too."""
    row_layout: Rows | None
    """How samples share rows; None: each is padded to the longest."""
    forward_options: Mapping[str, Any]
    """What the model is called with besides the rows."""
    computing: Callable[[], AbstractContextManager[Any]]
    """The context of each forward pass: the type that all ranks compute in."""
    context: ContextParallel | None = None
    """The cut through rows that context parallel ranks share."""
    staged: Staged | None = None
    """This rank's stage of a pipeline; None: it has the whole model."""
    router_loss: RouterLoss | None = None
    """The load balancing loss of a mixture of experts; None: the model has none, or the recipe switches it off."""
    validation_batches: Callable[[], Iterator[GlobalBatch]] | None
    """Reads the validation set from its start; None: there is none."""
    model_config: PreTrainedConfig | None
    """The transformers configuration; None for a model by ``_target_``."""
    longest_checked = 0
    """Tokens of the longest sample that is known to fit into the model's context."""

    # ---------------------------------------------------------------- loop

    def run(self) -> None:
        """Train from where the run stands to its end. Raises :class:`Stopped` when a signal came in."""
        self.make_up_validation()
        if self.step_scheduler.is_finished():
            self.already_complete()
            return
        if self.layout.rank == 0:
            self.stop_request.on_request = self.acknowledge_stop
        log.info("%s", planned_end(self.step_scheduler.cadence, self._steps_per_epoch()))
        while not self.step_scheduler.is_finished():
            self.run_epoch()
        self.stop_request.on_request = None
        if self.last_step is None and self.saves.resumed is not None:
            self.already_complete()  # no full batch was left of the last epoch
        else:
            self.end()

    def run_epoch(self) -> None:
        """Train on the rest of the current epoch, or until the run is over."""
        for batch in self.batches(self.dataloader):
            if batch is not None and self.step_scheduler.is_beyond_last_epoch(batch.epoch):
                self.step_scheduler.end_early()
                if self.step_scheduler.unsaved:
                    self.validate_and_save(
                        validate=self.validation_batches is not None, save=True, last=True
                    )
                return
            control = self.agree_on(batch)
            if control.save_failed:
                self.saves.wait()
            if control.stop or batch is None:
                self.stop()
            try:
                due = self.step(batch, control)
            except (IndexError, RuntimeError) as error:
                self.explain(error, batch)
                raise
            if due.stop:
                self.stop()
            if due.validate or due.save:
                self.validate_and_save(validate=due.validate, save=due.save, last=due.last)
            if due.last:
                return

    def explain(self, error: Exception, batch: GlobalBatch) -> None:
        """Raises :class:`RecipeError` where a step failed because *batch* has tokens that the model does not have, or
        because the optimizer cannot take sharded parameters.

        torch says only that an index is out of range, on a GPU not even that. Looked for afterwards, so at no cost.
        """
        check_sharding_support(self.optimizer, error)
        where = f"the global batch of samples {batch.sample_ids[:16]}"
        check_token_ids(batch.micro_batches, num_embeddings(unwrap(self.model)), where)

    def batches(self, source: Iterable[GlobalBatch]) -> Iterator[GlobalBatch | None]:
        """The batches of *source*; a last None when this rank is asked to stop while it waits for one."""
        with closing(iter(source)) as batches:  # type: ignore[type-var]
            while True:
                try:
                    with self.stop_request.interrupting():
                        batch = next(batches, None)
                except StoppedWaiting:
                    yield None
                    return
                if batch is None:
                    return
                yield batch

    def agree_on(self, batch: GlobalBatch | None) -> Control:
        """The control vector: one small reduction tells every rank the batch's tokens and whether any has to stop.

        None stands for the batch that this rank was waiting for when it was asked to stop.
        """
        micro_batches = batch.micro_batches if batch is not None else []
        sizes = [self.objective.size_of(micro_batch) for micro_batch in micro_batches]
        count = sum(size.count for size in sizes)
        num_labels = sum(size.num_label_tokens for size in sizes)
        num_tokens = sum(size.num_tokens for size in sizes)
        if not self.layout.reports:
            count = num_labels = num_tokens = 0
        failed = self.checkpointer is not None and self.checkpointer.upload_failed
        self.step_scheduler.enter_step()
        stop = batch is None or self.stop_request.wanted
        return Control(count, num_labels, num_tokens, stop, failed).summed(self.layout.gloo_group)

    # ---------------------------------------------------------------- step

    def step(self, batch: GlobalBatch, control: Control) -> Due:
        """One global batch: train, count, log."""
        started = time.perf_counter()
        self.step_scheduler.start_step()
        lr = current_rate(self.optimizer)
        loss_sum, grad_norm = self.train_step(batch, control)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        total, aux_loss, due = self.finish_step(batch, control, loss_sum)
        loss = total / control.count if control.count else math.nan
        self.last_step = StepResult(
            loss, grad_norm, lr, aux_loss if self.router_loss is not None else None
        )
        seconds = time.perf_counter() - started
        self.run_log.log_step(
            self.step_scheduler, batch.sample_ids, control, self.last_step, seconds
        )
        return due

    def train_step(self, batch: GlobalBatch, control: Control) -> tuple[float, float]:
        """Forward, backward, clip, update. Returns this rank's summed loss and the global gradient norm.

        The gradient is that of the mean over the global batch's label tokens. A batch without labels, or with a
        gradient that is not finite, changes no weight: without gradients the optimizer's step does nothing.
        """
        if self.router_loss is not None:
            self.router_loss.start_step(control.num_tokens)
        if control.count == 0:
            log.warning(
                "step %d: no label in the whole global batch, no update",
                self.step_scheduler.step + 1,
            )
            self.optimizer.step()
            return 0.0, 0.0
        # The wrappers average over the ranks what has to be a sum.
        scale = self.layout.sizes.token_parts / control.count
        loss_sum = self.accumulate(batch, scale)
        grad_norm = self.clip_gradients()
        if not math.isfinite(grad_norm):
            log.warning(
                "step %d: the gradient norm is %s, no update",
                self.step_scheduler.step + 1,
                grad_norm,
            )
            self.optimizer.zero_grad(set_to_none=True)
        if self.checkpointer is not None:
            self.checkpointer.await_copies()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss_sum.item(), grad_norm

    def accumulate(self, batch: GlobalBatch, weight: float) -> torch.Tensor:
        """The gradient of the summed loss times *weight*; returns this rank's summed loss, 0-dim."""
        if self.staged is not None:
            rows = [self.objective.rows_of(micro_batch) for micro_batch in batch.micro_batches]
            return _sum_of(self.staged.train(rows, self.objective.stage_output, weight))
        if self.router_loss is not None and self.router_loss.needs_counts(len(batch.micro_batches)):
            self.count_routed(batch, self.router_loss)
        losses = []
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            with gradient_sync(self.model, enabled=number == len(batch.micro_batches)):
                result = self.objective.loss(micro_batch)
                self.backward(result, weight)
            losses.append(result.loss.detach())
        return _sum_of(losses)

    def backward(self, result: LossSum, weight: float) -> None:
        """Add the gradient of a micro-batch's summed loss times *weight*, and that of its share of the router's loss.

        Raises :class:`RecipeError` where the model has a router's loss, and the objective left it out.
        """
        loss = result.loss
        if self.router_loss is None:
            torch.autograd.backward(loss, torch.full_like(loss, weight))
            return
        share = result.metrics.get(AUX_LOSS)
        if share is None:
            raise RecipeError(
                "the objective leaves out the router's load balancing loss",
                where=f"{type(self.objective).__name__}.loss",
                value=f"metrics without {AUX_LOSS}",
                hint="return what super().loss(micro_batch) or with_aux_loss(loss) returns, or set "
                "model.router_aux_loss: false",
            )
        # The wrappers average over the ranks what has to be a sum.
        share_weight = self.layout.sizes.token_parts * self.router_loss.coefficient
        torch.autograd.backward(
            [loss, share], [torch.full_like(loss, weight), torch.full_like(share, share_weight)]
        )

    def count_routed(self, batch: GlobalBatch, router_loss: RouterLoss) -> None:
        """Route all micro-batches once without gradients, so that the choices of the global batch are known before the
        first backward pass. A collective. The training passes draw the same random numbers as these."""
        counted = []
        with torch.no_grad(), self.rng.preserved():
            for micro_batch in batch.micro_batches:
                self.objective.loss(micro_batch)
                counted.append(router_loss.take_noted())
        router_loss.count(counted)

    def check_length(self, num_tokens: int) -> None:
        """:class:`RecipeError` for a sample, padding included, that is longer than the model's context."""
        if self.model_config is not None and num_tokens > self.longest_checked:
            check_context(
                self.model_config, num_tokens, f"a sample of step {self.step_scheduler.step + 1}"
            )
            self.longest_checked = num_tokens

    def build_objective(self) -> Objective:
        """The object that computes the loss of a micro-batch."""
        trainable = Trainable(
            self.model,
            self.forward_options,
            self.computing,
            row_layout=self.row_layout,
            loss_of=self.loss_of,
            all_up_to=self.all_up_to,
            context=self.context,
            router_loss=self.router_loss,
        )
        return self.objective_class(
            trainable,
            self.layout,
            self.loss_fn,
            sequence_parallel=self.config.distributed.sequence_parallel,
            check_length=self.check_length,
        )

    def clip_gradients(self) -> float:
        """Have all gradients scaled together to ``clip_grad_norm``, now or by the optimizer as it reads them; returns
        their norm before that."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        counted_elsewhere = (
            self.staged.counted_elsewhere if self.staged is not None else frozenset[int]()
        )
        return clip_gradients(
            parameters,
            self.config.clip_grad_norm,
            in_step=getattr(self.optimizer, "divide_in_step", None),
            in_stages=self.layout.in_stages,
            counted_elsewhere=counted_elsewhere,
        )

    def finish_step(
        self, batch: GlobalBatch, control: Control, loss_sum: float
    ) -> tuple[float, float, Due]:
        """Count a step; returns the loss summed over the global batch, the router's loss, and what is due.

        The clock is the leader's, so that all ranks save and end at the same step with the same state. A signal is
        looked for here too: the next look is after what is due, which may be an export.
        """
        scheduler, leads = self.step_scheduler, self.layout.is_rank0
        total, aux_loss, elapsed, save, end, stop = sum_over_ranks(
            self.layout.gloo_group,
            loss_sum if self.layout.reports_loss else 0.0,
            self.router_loss.value_here if self.router_loss is not None else 0.0,
            scheduler.measured_seconds() if leads else 0.0,
            leads and scheduler.save_is_wanted(),
            leads and scheduler.time_is_up(),
            self.stop_request.wanted,
        )
        self.dataloader.mark_consumed(batch)
        due = scheduler.finish_step(
            epoch=batch.epoch,
            epochs_done=self.dataloader.epoch,
            num_samples=len(batch.sample_ids),
            num_tokens=control.num_tokens,
            elapsed_seconds=elapsed,
            save_is_wanted=save > 0,
            time_is_up=end > 0,
            stop=stop > 0,
        )
        return total, aux_loss, due

    # ---------------------------------------------------------------- validate

    def validate(self) -> Validation | None:
        """The mean loss over the validation set, without a trace in the training: no gradient, no random number.

        None when a stop was asked for: it is looked for at every batch.
        """
        assert self.validation_batches is not None
        self.model.eval()
        try:
            with torch.no_grad(), self.rng.preserved():
                totals = self.validation_totals(self.validation_batches())
        finally:
            self.model.train()
            reshard(self.model)
        if totals is None:
            return None
        loss, count, num_labels = totals
        return Validation(loss / count if count else math.nan, int(num_labels))

    def validation_totals(
        self, batches: Iterable[GlobalBatch]
    ) -> tuple[float, float, float] | None:
        """The summed loss, its count, and the label tokens of all batches and ranks; None when a stop was asked for.

        The sums of a batch are added over the ranks before the next forward pass, with the request to stop: a rank
        that is still waiting for its data has to be heard before the others enter a collective without it.
        """
        loss, count, num_labels = 0.0, 0.0, 0.0
        mine = (0.0, 0, 0)
        for batch in chain(self.batches(batches), [_END]):
            wants_stop = batch is None or self.stop_request.wanted
            sums = sum_over_ranks(self.layout.gloo_group, *mine, wants_stop)
            if sums[3] > 0:
                return None
            loss, count, num_labels = loss + sums[0], count + sums[1], num_labels + sums[2]
            mine = self.validation_sums(batch or _END)
        return loss, count, num_labels

    def validation_sums(self, batch: GlobalBatch) -> tuple[float, int, int]:
        """This rank's summed loss, its count, and the label tokens of *batch*; zeros where another rank reports."""
        try:
            loss = sum(loss.double().item() for loss in self.losses_of(batch))
        except (IndexError, RuntimeError) as error:
            self.explain(error, batch)
            raise
        count, num_labels = 0, 0
        if self.layout.reports:
            sizes = [self.objective.size_of(micro_batch) for micro_batch in batch.micro_batches]
            count = sum(size.count for size in sizes)
            num_labels = sum(size.num_label_tokens for size in sizes)
        return loss if self.layout.reports_loss else 0.0, count, num_labels

    def losses_of(self, batch: GlobalBatch) -> Iterable[torch.Tensor]:
        """The summed loss of each micro-batch, without gradients; on the last stage of a pipeline only."""
        if self.staged is None:
            return (self.objective.loss(micro_batch).loss for micro_batch in batch.micro_batches)
        rows = [self.objective.rows_of(micro_batch) for micro_batch in batch.micro_batches]
        return self.staged.evaluate(rows, self.objective.stage_output)


_END = GlobalBatch(0, 0, 0, [], [], last_of_epoch=True)


def _sum_of(losses: list[torch.Tensor]) -> torch.Tensor:
    """In float64, unless there is nothing to add; 0-dim."""
    zero = torch.zeros((), dtype=torch.float64)
    return losses[0] if len(losses) == 1 else sum((loss.double() for loss in losses), zero)
