"""What a run minimizes: the summed loss of a micro-batch, computed by a complete model or by pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from automodel_ckpt.base.device_copies import to_device
from automodel_ckpt.config.callables.plugins import build_function
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.batches.packing import IS_TOKEN
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.loss.causal import (
    MTP_LOSS,
    WHOLE,
    LossFn,
    check_is_sum,
    check_labels,
    cross_entropy_sum,
    in_numpy,
    labelled_positions,
    labels_of_depths,
    next_token_loss,
    num_label_tokens,
    shift_labels,
)
from automodel_ckpt.models.inspect.interface import check_context, logits_of
from automodel_ckpt.models.loss.fused_cross_entropy import widened
from automodel_ckpt.models.loss.loss_head import LossHead
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.model.trainable import Trainable
from automodel_ckpt.training.values.records import (
    ACCURACY,
    AUX_LOSS,
    HITS,
    LABEL_TOKENS,
    PERPLEXITY,
    Z_LOSS,
    BatchSize,
    EvaluationSums,
    EvaluationTotals,
    LossSum,
    perplexity,
)

if TYPE_CHECKING:
    from automodel_ckpt.models.loss.fused_cross_entropy import ZLoss
    from automodel_ckpt.models.loss.mtp import MultiTokenPrediction


class Objective:
    """The loss of predicting the next token wherever there is a label.

    Derive from it to minimize something else: override :meth:`loss`, and :meth:`size_of` and :attr:`terms` where the
    loss is not a sum over label tokens. The loop divides the sum over the global batch by the count of that batch.
    """

    terms: ClassVar[str] = LABEL_TOKENS
    """What :meth:`size_of` counts, in the plural: the logs have the count under this name."""
    measures: ClassVar[tuple[str, ...] | None] = None
    """What validations measure in addition to the loss: keys of the result of :meth:`summarize`. None: the accuracy and
    the perplexity of the next token, unless a subclass computes another loss."""
    sums_cross_entropy: ClassVar[bool] = True
    """Whether training minimizes the sum of cross-entropies. The output layer can keep such gradients in 16 bits."""
    limits: tuple[PreTrainedConfig, StepScheduler] | None = None
    """The configuration with the length of the model's context, and the counters for messages. None: no limit."""
    evaluation: EvaluationSums | None = None
    """Adds up what a validation set measures. None in training."""
    z_loss: ZLoss | None = None
    """A loss in addition to the cross-entropy in training passes. It has a gradient, and is its own metric in the log;
    the loss that :meth:`row_loss` returns has the gradient of both, and the value of the cross-entropy."""

    def __init__(
        self,
        trainable: Trainable,
        layout: RankLayout,
        loss_fn: LossFn,
        *,
        sequence_parallel: bool = False,
        section: Any = None,
    ) -> None:
        """*loss_fn* is the loss of full logits, if the output layer does not compute it.

        *section* is the section of the recipe's kind of training, such as ``dpo``. It is None when there is none.
        """
        self.section = section
        self.trainable, self.layout, self.loss_fn = trainable, layout, loss_fn
        self.model, self.router_loss = trainable.model, trainable.router_loss
        self._num_row_parts = layout.num_row_parts(sequence_parallel=sequence_parallel)
        self._z_loss_sum: Tensor | float = 0.0
        self._is_known_sum = loss_fn is cross_entropy_sum

    def size_of(self, micro_batch: Tensors) -> BatchSize:
        """Count the terms of the summed loss of *micro_batch*, its labels, and its tokens, before the forward pass.

        All ranks add up these counts before the first backward pass of a step, since they scale the gradient.
        """
        num_labels = self.num_labels_of(micro_batch)
        # A micro-batch without labels weighs nothing; among them are those that only keep a rank in step.
        num_tokens = self.num_tokens_of(micro_batch) if num_labels else 0
        return BatchSize(num_labels, num_labels, num_tokens)

    def num_labels_of(self, micro_batch: Tensors) -> int:
        """Count the labels of *micro_batch* that a position predicts: not the labels of the first positions of rows."""
        return num_label_tokens(micro_batch["labels"])

    def num_tokens_of(self, micro_batch: Tensors) -> int:
        """Count the tokens of *micro_batch*, without padding, for the log and the router's loss."""
        mask = micro_batch.get(IS_TOKEN, micro_batch.get("attention_mask"))
        return (
            micro_batch["labels"].numel() if mask is None else int(np.count_nonzero(in_numpy(mask)))
        )

    def flops_of(self, micro_batch: Tensors) -> float:
        """Count the floating-point operations of a training pass over *micro_batch*, for the log. 0 if unknown.

        They are unknown for an objective that overrides :meth:`loss`, which may call the model any number of times.
        """
        count = self.trainable.flop_count
        if count is None or type(self).loss is not Objective.loss:
            return 0.0
        num_labels = self.num_labels_of(micro_batch)
        # Such a micro-batch only keeps this rank in step with the others.
        return count.of(micro_batch, num_labels) if num_labels else 0.0

    def size_here(self, micro_batches: Sequence[Tensors]) -> BatchSize:
        """Add up the sizes of this rank's *micro_batches*. Zero if another rank reports the same rows.

        The ranks of a tensor or context parallel group, and all stages, have the same rows, which count once.
        """
        count, num_labels, num_tokens, flops = 0, 0, 0, 0.0
        if self.layout.reports:
            for micro_batch in micro_batches:
                size = self.size_of(micro_batch)
                count += size.count
                num_labels += size.num_label_tokens
                num_tokens += size.num_tokens
                flops += self.flops_of(micro_batch)
        return BatchSize(count, num_labels, num_tokens, flops)

    def start_batch(self, micro_batches: Sequence[Tensors]) -> None:
        """Prepare for a global batch, of which *micro_batches* are this rank's. Called on all ranks before its losses.

        Override it to compute what the loss of each micro-batch needs of the whole global batch. It may be a
        collective: all ranks have the same number of micro-batches.
        """

    def loss(self, micro_batch: Tensors) -> LossSum:
        """Compute the loss of *micro_batch*, summed over its :meth:`size_of` terms."""
        return self.with_aux_loss(self.row_loss(self.rows_of(micro_batch)))

    def with_aux_loss(self, loss: Tensor) -> LossSum:
        """Add the losses of the router and of further tokens and the z-loss to the metrics.

        They are added only in training passes with these losses.

        An objective that calls :meth:`row_loss` itself returns the value of this method.
        """
        z_loss, self._z_loss_sum = self._z_loss_sum, 0.0
        # The pass that only counts the routers' choices is in training mode, without gradients.
        if not self.model.training or not torch.is_grad_enabled():
            return LossSum(loss)
        metrics: dict[str, Tensor] = {}
        if self.router_loss is not None:
            metrics[AUX_LOSS] = self.router_loss.share()
        if self.trainable.mtp is not None:
            metrics[MTP_LOSS] = self.trainable.mtp.take_noted()
        if self.z_loss is not None:
            metrics[Z_LOSS] = torch.as_tensor(z_loss)
        return LossSum(loss, metrics)

    def losses(self, micro_batches: Sequence[Tensors]) -> Iterable[Tensor]:
        """Compute the summed loss of each micro-batch for validation, and add its metrics to the set's metrics.

        With stages, only the last one returns losses.
        """
        stage = self.trainable.stage
        if stage is not None:
            rows = [self.rows_of(micro_batch) for micro_batch in micro_batches]
            yield from stage.evaluate(rows, self.stage_output)
            return
        for micro_batch in micro_batches:
            result = self.loss(micro_batch)
            if self.evaluation is not None:
                for name, value in result.metrics.items():
                    self.evaluation.add(name, value)
            yield result.loss

    @contextmanager
    def evaluating(self) -> Iterator[EvaluationSums]:
        """Add up the metrics of the evaluation passes inside the context, which cover one validation set."""
        sums = self.evaluation = EvaluationSums(self.layout.device)
        try:
            yield sums
        finally:
            self.evaluation = None

    def summarize(self, totals: EvaluationTotals) -> dict[str, float]:
        """Compute the :attr:`measures` of a validation set from its totals over all ranks.

        They are the means of the metrics of :meth:`loss` over the terms. Override it for others, such as a ratio of
        two sums. In evaluation passes, metrics may also be 1-dim.
        """
        if self.measures is not None:
            return {name: totals.mean(name) for name in self.measures}
        num_labels = totals.num_label_tokens
        hits = totals.sums[HITS][0]
        return {
            ACCURACY: hits / num_labels if num_labels else math.nan,
            PERPLEXITY: perplexity(totals.mean_loss),
        }

    def check_length(self, num_tokens: int) -> None:
        """Raise :class:`RecipeError` if a sample of *num_tokens*, padding included, is longer than the model's context.

        Nothing is known about the context of some models.
        """
        if self.limits is not None:
            model_config, scheduler = self.limits
            check_context(model_config, num_tokens, f"a sample of step {scheduler.step + 1}")

    def rows_of(self, micro_batch: Tensors) -> Tensors:
        """The rows of *micro_batch* as the model sees them. Raises :class:`RecipeError` for samples that are too
        long."""
        self.check_length(longest_sample(micro_batch))
        row_layout = self.trainable.row_layout
        return row_layout(micro_batch) if row_layout is not None else micro_batch

    def stage_output(self, rows: Tensors, hidden: Tensor | None) -> Tensor:
        """Run this rank's current pipeline stage.

        Returns the hidden states [B, t, H] for the next stage, or on the last stage the summed loss. *hidden* are the
        hidden states of the previous stage, and None on the first stage. t is the length of a row, or of this rank's
        slice of it.
        """
        stage = self.trainable.stage
        assert stage is not None
        if stage.local.is_last:
            return self.row_loss(rows, hidden)
        # Other stages return hidden states in place of the logits.
        return logits_of(self.trainable.forward(self._inputs(rows, hidden)))

    def logits(self, rows: Tensors, trainable: Trainable | None = None) -> Tensor:
        """Compute the logits [B, T, V] of *rows*, of the trained model or of another one that *trainable* describes.

        Raises :class:`RecipeError` if context parallel ranks divide the rows.
        """
        trainable = trainable or self.trainable
        if trainable.context is not None:
            raise RecipeError(
                "this objective needs the logits of complete rows, and context parallel ranks divide them",
                where="distributed.cp_size",
                value=trainable.context.size,
                hint="remove the key",
            )
        return logits_of(trainable.forward(self._inputs(rows, None)))

    def row_loss(self, rows: Tensors, hidden: Tensor | None = None) -> Tensor:
        """Compute the loss of *rows*, summed over their labels; 0-dim, on the device.

        On the last stage of a pipeline, *hidden* are the hidden states [B, T, H] of the stage before.
        """
        trainable = self.trainable
        part = self._part_of_row(rows["labels"].shape[1])
        inputs = self._inputs(rows, hidden)
        if trainable.mtp is not None and self.model.training:
            return self._row_loss_of_depths(inputs, rows, part, trainable.mtp)
        z_loss = self.z_loss if self.model.training else None
        if trainable.loss_head is None:
            loss = self._loss_from_full_logits(inputs, rows, part, z_loss)
        else:
            loss = self._loss_from_loss_head(inputs, rows, part, trainable.loss_head, z_loss)
        if z_loss is None:
            return loss
        # The value of the z-loss is for the metrics. Without it, the gradient does not change.
        penalty = z_loss.take()
        self._z_loss_sum = self._z_loss_sum + penalty
        return loss - penalty

    def _loss_from_full_logits(
        self, inputs: Tensors, rows: Tensors, part: slice, z_loss: ZLoss | None
    ) -> Tensor:
        """Compute the summed loss of *rows* from the model's logits [B, t, V], with the *z_loss* added, if any."""
        with self.trainable.compute():
            output = self.model(**inputs, **self.trainable.forward_options)
            self._note_routing(output, rows, part)
        labels = self._on_device(rows["labels"])
        logits = logits_of(output)
        loss = self._loss_of_logits(logits, labels, part)
        predicted = shift_labels(labels)[:, part].flatten()
        if self.evaluation is not None:
            self.evaluation.hits.add(logits.flatten(0, 1), predicted)
        if z_loss is not None:
            penalty = z_loss.of(widened(logits.flatten(0, 1)), predicted)
            z_loss.note(penalty)
            loss = loss + penalty
        return loss

    def _loss_from_loss_head(
        self,
        inputs: Tensors,
        rows: Tensors,
        part: slice,
        loss_head: LossHead,
        z_loss: ZLoss | None,
    ) -> Tensor:
        """Compute the summed loss of *rows* in the output layer, chunk by chunk, with the *z_loss* added, if any."""
        positions, targets = labelled_positions(
            rows["labels"], part, all_up_to=self.trainable.all_up_to
        )
        if positions is not None:
            positions = self._on_device(positions)
        # The root module computes the loss: only its forward pass gathers the root's parameters and
        # sets the backward hooks of FSDP2, and prepares the reduction of DDP.
        hits = None if self.evaluation is None else self.evaluation.hits
        loss_pass = loss_head.computing_loss(
            positions, self._on_device(targets), hits=hits, z_loss=z_loss
        )
        with self.trainable.compute(), loss_pass:
            output = self.model(**inputs, **self.trainable.forward_options)
            self._note_routing(output, rows, part)
        return loss_pass.loss_in(output)

    def _loss_of_logits(self, logits: Tensor, labels: Tensor, part: slice) -> Tensor:
        """Compute :func:`next_token_loss`. The first call with labels checks that the user's loss is a sum."""
        loss = next_token_loss(logits, labels, self.loss_fn, part)
        if not self._is_known_sum:
            shifted = shift_labels(labels)[:, part].flatten()
            self._is_known_sum = check_is_sum(self.loss_fn, logits.flatten(0, 1), shifted)
        return loss

    def _row_loss_of_depths(
        self, inputs: Tensors, rows: Tensors, part: slice, mtp: MultiTokenPrediction
    ) -> Tensor:
        """Compute the loss of *rows* as :meth:`row_loss` does, and keep the losses of further tokens in *mtp*."""
        trainable = self.trainable
        labels = labels_of_depths(rows["labels"], mtp.num_depths, rows.get("position_ids"))
        # The output has the model's own rows first, and the rows of each depth after them.
        num_rows = len(rows["labels"])
        by_depth = torch.split(labels, num_rows)
        if trainable.loss_head is None:
            with mtp.computing(), trainable.compute():
                output = self.model(**inputs, **self.trainable.forward_options)
                self._note_routing(output, rows, part)
            depths = zip(torch.split(logits_of(output), num_rows), by_depth, strict=True)
            losses = torch.stack(
                [
                    self._loss_of_logits(logits, self._on_device(targets), part)
                    for logits, targets in depths
                ]
            )
        else:
            positions, targets = labelled_positions(labels, part)
            assert positions is not None
            sizes = [len(labelled_positions(each, part)[1]) for each in by_depth]
            loss_pass = trainable.loss_head.computing_loss(
                self._on_device(positions), self._on_device(targets), sizes
            )
            with mtp.computing(), trainable.compute(), loss_pass:
                output = self.model(**inputs, **self.trainable.forward_options)
                self._note_routing(output, rows, part)
            losses = loss_pass.loss_in(output)
        mtp.note(losses[1:])
        return losses[0]

    def _inputs(self, rows: Tensors, hidden: Tensor | None) -> dict[str, Tensor]:
        inputs = model_inputs(rows, self.layout.device)
        if self.trainable.embedding_noise is not None:
            self.trainable.embedding_noise.note_rows(inputs)
        stage = self.trainable.stage
        if stage is not None and hidden is not None:
            length = inputs.pop("input_ids").shape[1]
            inputs["inputs_embeds"] = stage.local.receive(hidden, length)
        return inputs

    def _note_routing(self, output: Any, rows: Tensors, part: slice) -> None:
        """Keep what the router's loss needs of a forward pass in training; *part* of each row is this rank's."""
        if self.router_loss is None or not self.model.training:
            return
        is_token = rows.get(IS_TOKEN, rows.get("attention_mask"))
        if num_label_tokens(rows["labels"]) == 0:
            # Such a micro-batch only keeps this rank in step with the others.
            is_token = torch.zeros_like(rows["labels"])
        self.router_loss.note(output, None if is_token is None else is_token[:, part])

    def _on_device(self, tensor: Tensor) -> Tensor:
        return to_device(tensor, self.layout.device)

    def _part_of_row(self, length: int) -> slice:
        """The positions in a row of *length* tokens for which this rank computes outputs.

        Raises :class:`RecipeError` for rows that cannot be divided evenly.
        """
        context, num_parts = self.trainable.context, self._num_row_parts
        if length % num_parts:
            key = "cp_size" if context is not None else "sequence_parallel"
            raise RecipeError(
                "a row cannot be divided evenly along the sequence",
                where=f"distributed.{key}",
                value=f"{length} tokens among {num_parts} ranks",
                hint=f"let your collate_fn pad to a multiple of {num_parts}, or leave {key} out",
            )
        return WHOLE if context is None else context.slice_of(length)


def build_loss_fn(section: Target | None, device: torch.device) -> LossFn:
    """Build the ``loss_fn`` section (its contract: :data:`~automodel_ckpt.loss.causal.LossFn`), else cross-entropy.

    Raises :class:`RecipeError` for a loss that is not a sum, or that does not take class labels.
    """
    if section is None:
        return cross_entropy_sum
    loss_fn = build_function("loss_fn", section, reduction="sum")
    if getattr(loss_fn, "reduction", "sum") != "sum":
        raise RecipeError(
            "a loss has to be the sum over the labels: the recipe divides by the labels of the whole global batch",
            where="loss_fn.reduction",
            value=loss_fn.reduction,
            hint="remove the key",
        )
    check_labels(loss_fn)
    if isinstance(loss_fn, nn.Module):
        loss_fn = loss_fn.to(device)
        # A module without parameters has nothing to save, and would be state as an attribute; its method is not.
        return loss_fn if loss_fn.state_dict() else loss_fn.forward
    return loss_fn  # type: ignore[no-any-return]


def model_inputs(rows: Tensors, device: torch.device) -> dict[str, Tensor]:
    """The arguments of a forward pass that *rows* have, on *device*."""
    inputs = {}
    for name, value in rows.items():
        if name not in ("labels", IS_TOKEN):
            inputs[name] = to_device(value, device)
    if "position_ids" in inputs and device.type != "cpu":
        from automodel_ckpt.models.attention.positions import note_positions

        note_positions(inputs["position_ids"], rows["position_ids"])
    return inputs


def longest_sample(batch: Tensors) -> int:
    """Return the length of the longest sample of a micro-batch, including padding if it has one sample per row."""
    positions = batch.get("position_ids")
    if positions is None:
        return batch["labels"].shape[1]
    return int(positions.max()) + 1
