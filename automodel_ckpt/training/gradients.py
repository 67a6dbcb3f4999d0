"""The gradient of one global batch, accumulated over its micro-batches or over pipeline stages, and its errors.

Errors that torch raises while it computes a batch, such as out of memory, get their cause, and what to change.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.errors import DeviceMemoryError, Problem, RecipeError
from automodel_ckpt.loss.causal import MTP_LOSS, check_scalar
from automodel_ckpt.models.inspect.interface import (
    check_token_ids,
    in_all_layers,
    listed,
    num_embeddings,
)
from automodel_ckpt.optim.build import check_sharding_support
from automodel_ckpt.parallel.gradients import (
    RunningStatistics,
    UnusedGradients,
    check_call_order,
    gradient_sync,
)
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.values.records import AUX_LOSS, LossSum, Number
from automodel_ckpt.training.values.run_log import STEP_FIELDS

if TYPE_CHECKING:
    from automodel_ckpt.loss.router_loss import RouterLoss
    from automodel_ckpt.training.values.step_numbers import LaunchedStep
    from automodel_ckpt.training.watch.stragglers import ForwardTimer

log = logging.getLogger("automodel_ckpt")


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


def check_part(owner: object, method: str, part: object, kind: type) -> None:
    """Raise :class:`RecipeError` if the *part* that a *method* of a user's class returned is of another *kind*."""
    if not isinstance(part, kind):
        raise RecipeError(
            f"{method}() must return a {kind.__module__}.{kind.__name__}",
            where=f"{type(owner).__name__}.{method}",
            value=type(part).__name__,
            hint=f"return one, or the changed result of super().{method}()",
        )


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
                        from automodel_ckpt.parallel.fsdp_groups import check_gathered_types

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


_LESS_MEMORY = """add the first of these that you can accept and do not have, then run the same command:
          --step_scheduler.local_batch_size=N, a smaller one  (more micro-batches)
          --packed_sequence.size=N, a smaller one, for packed rows  (no sample may be longer)
          --model.activation_checkpointing=true  (about a third more time)
          --nproc-per-node=N --distributed.strategy=fsdp2, with more devices  (shards the state)
          --distributed.strategy=fsdp2 --distributed.cpu_offload=true  (the state in host memory: slow)
          --peft.r=16  (train LoRA adapters instead of all weights: a new run)"""


class BatchErrors:
    """Explains failures of the model and the optimizer of a run, also of steps that are not logged yet."""

    def __init__(
        self,
        config: RecipeConfig,
        layout: RankLayout,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        """*model* and *optimizer* are None while they are built."""
        self._config, self._layout = config, layout
        self._model, self._optimizer = model, optimizer
        self.pending: deque[LaunchedStep] = deque()
        """The steps that are not logged yet, oldest first."""

    @contextmanager
    def out_of_memory(self, doing: str, micro_batches: Sequence[Tensors] = ()) -> Iterator[None]:
        """Raise :class:`DeviceMemoryError` if the device runs out of memory inside the context.

        *doing* states when, such as ``in step 7``. *micro_batches* are computed there.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            layout = self._layout
            raise DeviceMemoryError(
                f"the device ran out of memory {doing}",
                where=f"rank {layout.rank}, {layout.device}",
                value="; ".join(self._values(error, micro_batches)),
                hint=_LESS_MEMORY,
            ) from error

    def _values(self, error: Exception, micro_batches: Sequence[Tensors]) -> Iterator[str]:
        """Yield the parts of the message about sizes."""
        if micro_batches:
            shapes = [micro_batch["labels"].shape for micro_batch in micro_batches]
            longest = max(shape[-1] for shape in shapes)
            largest = max(shape.numel() for shape in shapes)
            size = self._config.step_scheduler.local_batch_size
            yield f"longest row {longest:,} tokens, largest micro-batch {largest:,} tokens, local_batch_size {size}"
        lines = str(error).splitlines()
        if lines:
            # PyTorch's message continues with statistics and advice.
            sentences = lines[0].split(". ")
            yield f"PyTorch: {'. '.join(sentences[:2])[:200]}"

    @contextmanager
    def explained(self, doing: str, batch: GlobalBatch) -> Iterator[None]:
        """Within the context, *batch* is computed. Raises :class:`RecipeError` for a failure with a known cause.

        *doing* states when, such as ``in the validation of step 7``.
        """
        try:
            with self.out_of_memory(doing, batch.micro_batches):
                yield
        except (IndexError, RuntimeError) as error:
            self.explain(error, batch)
            raise

    def explain(self, error: Exception, batch: GlobalBatch) -> None:
        """Raise :class:`RecipeError` if *batch* has tokens that the model does not have, if the optimizer does not
        support sharded parameters, or if the model does not support its tensor parallel plan.

        torch reports only that an index is out of range, on a GPU not even that. Checking after the failure costs
        nothing in other steps.
        """
        assert self._model is not None and self._optimizer is not None
        from automodel_ckpt.parallel.tensor_parallel import check_plan_support

        check_sharding_support(self._optimizer, error)
        check_plan_support(error, self._layout.sizes.tp)
        num_rows = num_embeddings(unwrap(self._model))
        # A GPU reports the failure of a step while the host queues the next one.
        for each in [*(step.batch for step in self.pending), batch]:
            where = f"the global batch of samples {each.sample_ids[:16]}"
            check_token_ids(each.micro_batches, num_rows, where)


def check_all_trained(
    model: nn.Module, *, has_adapters: bool, is_error: bool, is_resumed: bool = False
) -> None:
    """Look for parameters of *model* that need a gradient and have none after the first step's backward passes.

    Raises :class:`RecipeError` with *is_error*, and with ddp, which waits for each gradient of a model if all
    its parameters are known to be used for each batch. Otherwise logs a warning: a later batch may use them.

    With *is_resumed*, it is an error only with ddp: the checkpoint, which another program may have written, has these
    parameters among those that are trained, and would not match a recipe that leaves them out.
    """
    waits_for_all = False
    if isinstance(model, DistributedDataParallel):
        waits_for_all = not model.find_unused_parameters
        model = model.module
    name_of = _adapted_module if has_adapters else str
    used: set[str] = set()
    unused: dict[str, None] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            unused[name_of(name)] = None
        elif parameter.requires_grad:
            used.add(name_of(name))
    if not unused:
        return
    names = list(unused)
    key, verb = "model.freeze", "freeze them"
    if has_adapters:
        key, verb = "peft.exclude_modules", "leave them out"
    # In all layers, where no layer uses them.
    globs = {in_all_layers(name): name for name in names}
    usable = [glob if not fnmatch.filter(used, glob) else name for glob, name in globs.items()]
    problem = Problem(
        "trained parameters got no gradient in the first step",
        key,
        f"{len(names)} of them: {listed(names)}",
        f"if no batch uses them, {verb}: {key}: {sorted(usable)}",
    )
    if waits_for_all:
        hint = f"{problem.hint}; if some do, set distributed.strategy fsdp2"
        raise RecipeError.all_of([replace(problem, hint=hint)])
    if is_resumed:
        hint = "the checkpoint has them among the trained ones, so they stay as they are"
        problem = replace(problem, hint=hint)
    elif is_error:
        raise RecipeError.all_of([problem])
    log.warning("%s: %s; %s", problem.what, problem.value, problem.hint)


def _adapted_module(name: str) -> str:
    """The name in the base of the module that the adapter's parameter *name* adapts."""
    module, _, _ = name.removeprefix("base_model.model.").partition(".lora_")
    return module
