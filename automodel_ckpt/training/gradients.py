"""The gradient of one global batch, accumulated over its micro-batches or over the stages of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.loss.causal import check_scalar
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.parallelize import gradient_sync
from automodel_ckpt.parallel.running_statistics import RunningStatistics
from automodel_ckpt.parallel.unused_gradients import UnusedGradients, check_call_order
from automodel_ckpt.training.parts.objective import Objective, Tensors
from automodel_ckpt.training.values.records import AUX_LOSS, LossSum, Number
from automodel_ckpt.training.values.run_log import STEP_FIELDS

if TYPE_CHECKING:
    from automodel_ckpt.loss.router_loss import RouterLoss
    from automodel_ckpt.training.watch.stragglers import ForwardTimer


def checked(result: object, objective: object) -> LossSum:
    """Return the *result* of an *objective*. Raises :class:`RecipeError` if it is not a loss with a gradient."""
    where = f"{type(objective).__name__}.loss"
    if getattr(type(objective), "loss", None) is Objective.loss:
        where = "loss_fn"
    if not isinstance(result, LossSum):
        raise RecipeError(
            "the loss of an objective must be a LossSum",
            where=where,
            value=type(result).__name__,
            hint="return LossSum(loss, metrics), or the changed result of super().loss()",
        )
    check_scalar(result.loss, where, "give LossSum the sum over the terms of the micro-batch")
    if not result.loss.requires_grad:
        raise RecipeError(
            "the loss has no gradient, so nothing would be trained",
            where=where,
            value="a tensor that does not require a gradient",
            hint="compute it from the logits, without detach(), item(), argmax() or torch.no_grad()",
        )
    return result


class GradientAccumulation:
    """Computes the gradient of the summed loss of a global batch, with one reduction over the ranks."""

    def __init__(self, loop: Any) -> None:
        """*loop* is the training loop, which has the parts of the run."""
        layout: RankLayout = loop.layout
        self._objective: Objective = loop.objective
        trainable = self._objective.trainable
        self._model: nn.Module = trainable.model
        self._stage = trainable.stage
        self._router_loss, self._mtp = trainable.router_loss, trainable.mtp
        self._timer: ForwardTimer | None = loop.forward_timer
        self._layout = layout
        self._rng: StatefulRNG = loop.rng
        # Then metrics stay tensors: the host does not wait for their values.
        self._keeps_on_device: bool = loop.runs_ahead
        in_stages = self._stage is not None
        self._unused = UnusedGradients(self._model, layout.gloo_group, in_stages=in_stages)
        self._statistics: RunningStatistics | None = None
        if not in_stages:
            check_call_order(self._model, layout.gloo_group)
            if layout.world_size > 1:
                self._statistics = RunningStatistics(self._model)
        self._overwrites_outputs = trainable.overwrites_outputs
        self._copied: dict[int, Tensor] = {}
        self._is_checked = False
        self.metrics: dict[str, Number] = {}
        """This rank's sums of the objective's metrics over the newest global batch. All ranks have the same names."""

    def accumulate(self, batch: GlobalBatch, weight: float) -> Tensor:
        """Add the gradient of the summed loss times *weight*. Returns this rank's summed loss, 0-dim.

        Called on all ranks.
        """
        micro_batches = batch.micro_batches
        self.metrics = {}
        self._objective.start_batch(micro_batches)
        if self._stage is not None:
            rows = [self._objective.rows_of(micro_batch) for micro_batch in micro_batches]
            with selected_activations():
                return sum_losses(self._stage.train(rows, self._stage_output, weight))
        if self._router_loss is not None and self._router_loss.needs_counts(len(micro_batches)):
            self._count_routed(batch, self._router_loss)
        results = []
        for number, micro_batch in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            with gradient_sync(self._model, enabled=is_last):
                with self._measuring(micro_batch):
                    result = checked(self._objective.loss(micro_batch), self._objective)
                if not self._is_checked:
                    # Before the backward pass, in which fsdp2 would report several types of gradients.
                    self._is_checked = True
                    if isinstance(self._model, FSDPModule):
                        from automodel_ckpt.parallel.ranks.group_types import check_gathered_types

                        check_gathered_types(self._model)
                self._backward(result, weight)
            if self._overwrites_outputs and not is_last:
                self._copy_gradients()
            results.append(result)
        # References would keep the gradients after the optimizer's step.
        self._copied = {}
        self._unused.remove()
        if self._statistics is not None:
            self._statistics.equalize()
        # After all backward passes: elsewhere than on a GPU, float() waits for the value.
        self._sum_metrics(results)
        return sum_losses([result.loss.detach() for result in results])

    def _measuring(self, rows: Tensors) -> AbstractContextManager[None]:
        return nullcontext() if self._timer is None else self._timer.measuring(rows)

    def _stage_output(self, rows: Tensors, hidden: Tensor | None) -> Tensor:
        with self._measuring(rows):
            return self._objective.stage_output(rows, hidden)

    def _copy_gradients(self) -> None:
        """Move gradients out of the memory of CUDA graphs, which the next micro-batch would overwrite.

        Autograd keeps the first gradient of a parameter where its graph wrote it, and adds later ones to it in place.
        """
        for parameter in self._model.parameters():
            gradient = parameter.grad
            # FSDP2 and DDP reduce gradients into their own memory.
            if gradient is None or isinstance(gradient, DTensor):
                continue
            if self._copied.get(id(parameter)) is not gradient:
                self._copied[id(parameter)] = parameter.grad = gradient.clone()

    def _sum_metrics(self, results: list[LossSum]) -> None:
        """Add up the metrics of micro-batches. Raises :class:`RecipeError` for the name of another field of the log."""
        for result in results:
            for name, value in result.metrics.items():
                if name == AUX_LOSS:
                    continue
                if name in STEP_FIELDS or name == self._objective.terms:
                    raise RecipeError(
                        "a metric of the objective has the name of another field of training.jsonl",
                        where=f"{type(self._objective).__name__}.loss",
                        value=name,
                        hint="give the metric another name",
                    )
                self.metrics[name] = self.metrics.get(name, 0.0) + self._number(value)

    def _number(self, value: Number) -> Number:
        if not isinstance(value, Tensor):
            return float(value)
        value = value.detach()
        # The precision of a Python number.
        return value.double().reshape(()) if self._keeps_on_device else float(value)

    def _backward(self, result: LossSum, weight: float) -> None:
        """Add the gradients of a micro-batch's summed loss times *weight*, and of its further losses.

        The further losses are its share of the router's loss, and the loss of further tokens. Raises
        :class:`RecipeError` where the objective left one out.
        """
        losses, weights = [result.loss], [weight]
        if self._router_loss is not None:
            losses.append(self._metric(result, AUX_LOSS, "set model.router_aux_loss: false"))
            # DDP and FSDP2 average gradients over the ranks, and this loss is a sum over the ranks.
            weights.append(self._layout.sizes.token_parts * self._router_loss.coefficient)
        if self._mtp is not None:
            from automodel_ckpt.loss.mtp_loss import MTP_LOSS

            losses.append(self._metric(result, MTP_LOSS, "remove model.mtp"))
            weights.append(weight * self._mtp.factor)
        scales = []
        for loss, scale in zip(losses, weights, strict=True):
            scales.append(torch.full_like(loss, scale))
        with selected_activations():
            torch.autograd.backward(losses, scales)

    def _metric(self, result: LossSum, name: str, otherwise: str) -> Tensor:
        """The metric of a micro-batch that has a gradient. Raises :class:`RecipeError` if the objective left it out.

        *otherwise* is a hint how to train without it.
        """
        found = result.metrics.get(name)
        if found is None:
            raise RecipeError(
                "the objective leaves out a loss that the model computes beside the main one",
                where=f"{type(self._objective).__name__}.loss",
                value=f"metrics without {name}",
                hint=f"return what super().loss(micro_batch) or with_aux_loss(loss) returns, or {otherwise}",
            )
        return found

    def _count_routed(self, batch: GlobalBatch, router_loss: RouterLoss) -> None:
        """Route all micro-batches once without gradients. A collective.

        The router's loss needs the choices of the complete global batch before the first backward pass.
        """
        counted = []
        # The training passes must draw the same random numbers as these, or dropout would change the routing.
        with torch.no_grad(), self._rng.preserved():
            for micro_batch in batch.micro_batches:
                self._objective.loss(micro_batch)
                counted.append(router_loss.take_noted())
        router_loss.count(counted)


def sum_losses(losses: list[Tensor]) -> Tensor:
    """Add up the losses of micro-batches in float64. A single loss keeps its dtype. 0-dim."""
    if len(losses) == 1:
        return losses[0]
    device = losses[0].device if losses else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for loss in losses:
        total = total + loss.double()
    return total


_UNSELECTABLE = re.compile(
    r"cached during selective activation checkpoint|encountered during backward but not found"
)


@contextmanager
def selected_activations() -> Iterator[None]:
    """Raise torch's errors about layers that selective checkpointing cannot recompute as :class:`RecipeError`.

    Some layers change a kept result in place (LED), or compute other operations in the recomputation (Llama 4).
    """
    try:
        yield
    except RuntimeError as error:
        if not _UNSELECTABLE.search(str(error)):
            raise
        raise RecipeError(
            "selected activations of this model cannot be recomputed",
            where="model.activation_checkpointing",
            value=f"selective: {error}",
            hint="set it to full",
        ) from error
