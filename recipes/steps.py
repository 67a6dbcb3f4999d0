"""The loop of every fine-tuning recipe: an epoch's global batches, the step that each of them is, and validation."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from automodel_ckpt.checkpoint.trees import unwrap
from automodel_ckpt.data.loader import GlobalBatch
from automodel_ckpt.data.packing import IS_TOKEN, longest_sample
from automodel_ckpt.distributed.agree import sum_over_ranks
from automodel_ckpt.distributed.context_parallel import ContextParallel
from automodel_ckpt.distributed.parallelize import clip_gradients, gradient_sync, reshard
from automodel_ckpt.distributed.stop import StoppedWaiting
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.build import check_context
from automodel_ckpt.models.loss_head import LossOf
from automodel_ckpt.models.probe import logits_of
from automodel_ckpt.models.vocabulary import num_embeddings, refuse_unknown_ids
from automodel_ckpt.recipes.lifecycle import Lifecycle
from automodel_ckpt.recipes.records import Control, StepResult, Validation
from automodel_ckpt.recipes.stages import Staged
from automodel_ckpt.training.loss import WHOLE, LossFn, in_numpy, labelled_positions, next_token_loss, num_label_tokens
from automodel_ckpt.training.lr import current_rate
from automodel_ckpt.training.optim import refuse_unsharded
from automodel_ckpt.training.router_loss import RouterLoss
from automodel_ckpt.training.step_scheduler import Due, planned_end

log = logging.getLogger("automodel_ckpt")

Rows = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""From a collated micro-batch to the rows that the model sees, with the same sum of losses over labels."""


class Steps(Lifecycle):
    """Takes the steps of a run with the attributes that the subclasses build."""

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
                    self.validate_and_save(validate=self.validation_batches is not None, save=True, last=True)
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
        refuse_unsharded(self.optimizer, error)
        where = f"the global batch of samples {batch.sample_ids[:16]}"
        refuse_unknown_ids(batch.micro_batches, num_embeddings(unwrap(self.model)), where)

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
        labels = [num_label_tokens(micro["labels"]) for micro in micro_batches]
        # A micro-batch without labels weighs nothing; among them are those that only keep a rank in step.
        tokens = [_num_tokens(micro) if count else 0 for micro, count in zip(micro_batches, labels, strict=True)]
        counts = (sum(labels), sum(tokens)) if self.layout.reports else (0, 0)
        failed = self.checkpointer is not None and self.checkpointer.upload_failed
        self.step_scheduler.enter_step()
        stop = batch is None or self.stop_request.wanted
        return Control(*counts, stop, failed).summed(self.layout.gloo_group)

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
        loss = total / control.num_label_tokens if control.num_label_tokens else math.nan
        self.last_step = StepResult(loss, grad_norm, lr, aux_loss if self.router_loss is not None else None)
        seconds = time.perf_counter() - started
        self.run_log.log_step(self.step_scheduler, batch.sample_ids, control, self.last_step, seconds)
        return due

    def train_step(self, batch: GlobalBatch, control: Control) -> tuple[float, float]:
        """Forward, backward, clip, update. Returns this rank's summed loss and the global gradient norm.

        The gradient is that of the mean over the global batch's label tokens. A batch without labels, or with a
        gradient that is not finite, changes no weight: without gradients the optimizer's step does nothing.
        """
        if self.router_loss is not None:
            self.router_loss.start_step(control.num_tokens)
        if control.num_label_tokens == 0:
            log.warning("step %d: no label in the whole global batch, no update", self.step_scheduler.step + 1)
            self.optimizer.step()
            return 0.0, 0.0
        # The wrappers average over the ranks what has to be a sum.
        scale = self.layout.sizes.token_parts / control.num_label_tokens
        loss_sum = self.accumulate(batch, scale)
        grad_norm = self.clip_gradients()
        if not math.isfinite(grad_norm):
            log.warning("step %d: the gradient norm is %s, no update", self.step_scheduler.step + 1, grad_norm)
            self.optimizer.zero_grad(set_to_none=True)
        if self.checkpointer is not None:
            self.checkpointer.await_copies()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss_sum.item(), grad_norm

    def accumulate(self, batch: GlobalBatch, weight: float) -> torch.Tensor:
        """The gradient of the summed loss times *weight*; returns this rank's summed loss, 0-dim."""
        if self.staged is not None:
            rows = [self.rows_of(micro_batch) for micro_batch in batch.micro_batches]
            return _sum_of(self.staged.train(rows, self.outcome, weight))
        if self.router_loss is not None and self.router_loss.needs_counts(len(batch.micro_batches)):
            self.count_routed(batch, self.router_loss)
        losses = []
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            with gradient_sync(self.model, enabled=number == len(batch.micro_batches)):
                loss = self.micro_batch_loss(micro_batch)
                self.backward(loss, weight)
            losses.append(loss.detach())
        return _sum_of(losses)

    def backward(self, loss: torch.Tensor, weight: float) -> None:
        """Add the gradient of a micro-batch's summed *loss* times *weight*, and that of its share of the router's."""
        if self.router_loss is None:
            torch.autograd.backward(loss, torch.full_like(loss, weight))
            return
        share = self.router_loss.share()
        # The wrappers average over the ranks what has to be a sum.
        share_weight = self.layout.sizes.token_parts * self.router_loss.coefficient
        torch.autograd.backward([loss, share], [torch.full_like(loss, weight), torch.full_like(share, share_weight)])

    def count_routed(self, batch: GlobalBatch, router_loss: RouterLoss) -> None:
        """Route all micro-batches once without gradients, so that the choices of the global batch are known before the
        first backward pass. A collective. The training passes draw the same random numbers as these."""
        counted = []
        with torch.no_grad(), self.rng.preserved():
            for micro_batch in batch.micro_batches:
                self.micro_batch_loss(micro_batch)
                counted.append(router_loss.take_noted())
        router_loss.count(counted)

    def micro_batch_loss(self, micro_batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of one micro-batch, summed over its labels; 0-dim, on the device."""
        return self.outcome(self.rows_of(micro_batch))

    def rows_of(self, micro_batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """What the model sees of a micro-batch."""
        self.check_length(longest_sample(micro_batch))
        return self.row_layout(micro_batch) if self.row_layout is not None else micro_batch

    def outcome(self, rows: Mapping[str, torch.Tensor], hidden: torch.Tensor | None = None) -> torch.Tensor:
        """The loss of *rows*, summed over their labels; 0-dim, on the device.

        On a later stage of a pipeline it goes on from the *hidden* states [B, T, H] of the stage before, and on all
        but the last it ends with those for the next.
        """
        part = self.part_of_row(rows["labels"].shape[1])
        inputs = {name: self.on_device(value) for name, value in rows.items() if name not in ("labels", IS_TOKEN)}
        if hidden is not None:
            inputs = {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": hidden}
        if not self.layout.is_last_stage:
            with self.computing():
                return logits_of(self.model(**inputs, **self.forward_options))
        if self.loss_of is None:
            with self.computing():
                output = self.model(**inputs, **self.forward_options)
                self.note_routing(output, rows, part)
            return next_token_loss(logits_of(output), self.on_device(rows["labels"]), self.loss_fn, part)
        positions, targets = labelled_positions(rows["labels"], part, all_up_to=self.all_up_to)
        places = self.on_device(positions) if positions is not None else None
        with self.computing(), self.loss_of(places, self.on_device(targets)):
            output = self.model(**inputs, **self.forward_options)
            self.note_routing(output, rows, part)
        return logits_of(output)

    def note_routing(self, output: Any, rows: Mapping[str, torch.Tensor], part: slice) -> None:
        """Keep what the router's loss needs of a forward pass in training; *part* of each row is this rank's."""
        if self.router_loss is None or not self.model.training:
            return
        is_token = rows.get(IS_TOKEN, rows.get("attention_mask"))
        if num_label_tokens(rows["labels"]) == 0:
            # Such a micro-batch only keeps this rank in step with the others.
            is_token = torch.zeros_like(rows["labels"])
        self.router_loss.note(output, None if is_token is None else is_token[:, part])

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """*tensor* where the model is."""
        return tensor.to(self.layout.device, non_blocking=True)

    def check_length(self, num_tokens: int) -> None:
        """:class:`RecipeError` for a sample, padding included, that is longer than the model's context."""
        if self.model_config is not None and num_tokens > self.longest_checked:
            check_context(self.model_config, num_tokens, f"a sample of step {self.step_scheduler.step + 1}")
            self.longest_checked = num_tokens

    def part_of_row(self, length: int) -> slice:
        """The places of a row of *length* tokens that this rank's outputs are of.

        Raises :class:`RecipeError` for rows that cannot be cut evenly.
        """
        num_parts = self.layout.num_row_parts(sequence_parallel=self.config.distributed.sequence_parallel)
        if length % num_parts:
            key = "cp_size" if self.context is not None else "sequence_parallel"
            raise RecipeError(
                "a row cannot be cut along the sequence",
                where=f"distributed.{key}",
                value=f"{length} tokens among {num_parts} ranks",
                remedy=f"let your collate_fn pad to a multiple of {num_parts}, or leave {key} out",
            )
        return WHOLE if self.context is None else self.context.slice_of(length)

    def clip_gradients(self) -> float:
        """Have all gradients scaled together to ``clip_grad_norm``, now or by the optimizer as it reads them; returns
        their norm before that."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        counted_elsewhere = self.staged.counted_elsewhere if self.staged is not None else frozenset[int]()
        return clip_gradients(
            parameters,
            self.config.clip_grad_norm,
            in_step=getattr(self.optimizer, "divide_in_step", None),
            in_stages=self.layout.in_stages,
            counted_elsewhere=counted_elsewhere,
        )

    def finish_step(self, batch: GlobalBatch, control: Control, loss_sum: float) -> tuple[float, float, Due]:
        """Count a step; returns the loss summed over the global batch, the router's loss, and what is due.

        The clock is the leader's, so that all ranks save and end at the same step with the same state. A signal is
        looked for here too: the next look is after what is due, which may be an export.
        """
        scheduler, leads = self.step_scheduler, self.layout.is_leader
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
        loss, num_label_tokens = totals
        return Validation(loss / num_label_tokens if num_label_tokens else math.nan, int(num_label_tokens))

    def validation_totals(self, batches: Iterable[GlobalBatch]) -> tuple[float, float] | None:
        """The summed loss and the label tokens of all batches and ranks; None when a stop was asked for.

        What a batch gave is summed over the ranks before the next forward pass, with the wish to stop: a rank that was
        still waiting for its data must be heard before the others enter a collective without it.
        """
        loss, num_label_tokens, mine = 0.0, 0.0, (0.0, 0)
        for batch in chain(self.batches(batches), [_END]):
            sums = sum_over_ranks(self.layout.gloo_group, *mine, batch is None or self.stop_request.wanted)
            if sums[2] > 0:
                return None
            loss, num_label_tokens = loss + sums[0], num_label_tokens + sums[1]
            mine = self.validation_sums(batch or _END)
        return loss, num_label_tokens

    def validation_sums(self, batch: GlobalBatch) -> tuple[float, int]:
        """This rank's summed loss and label tokens of one batch; zeros where another rank speaks for them."""
        try:
            loss = sum(loss.double().item() for loss in self.losses_of(batch))
        except (IndexError, RuntimeError) as error:
            self.explain(error, batch)
            raise
        num_labels = sum(num_label_tokens(micro_batch["labels"]) for micro_batch in batch.micro_batches)
        return loss if self.layout.reports_loss else 0.0, num_labels if self.layout.reports else 0

    def losses_of(self, batch: GlobalBatch) -> Iterable[torch.Tensor]:
        """The summed loss of each micro-batch, without gradients; on the last stage of a pipeline only."""
        if self.staged is None:
            return map(self.micro_batch_loss, batch.micro_batches)
        return self.staged.evaluate([self.rows_of(micro_batch) for micro_batch in batch.micro_batches], self.outcome)


_END = GlobalBatch(0, 0, 0, [], [], last_of_epoch=True)


def _sum_of(losses: list[torch.Tensor]) -> torch.Tensor:
    """In float64, unless there is nothing to add; 0-dim."""
    zero = torch.zeros((), dtype=torch.float64)
    return losses[0] if len(losses) == 1 else sum((loss.double() for loss in losses), zero)


def _num_tokens(micro_batch: Mapping[str, torch.Tensor]) -> int:
    mask = micro_batch.get("attention_mask")
    return micro_batch["labels"].numel() if mask is None else int(np.count_nonzero(in_numpy(mask)))
