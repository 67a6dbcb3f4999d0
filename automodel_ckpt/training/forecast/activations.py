"""The memory of activations: those of a traced step, the loss, and images, for all micro-batches in progress."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.models.inspect.forward import model_without_adapters
from automodel_ckpt.models.loss import fused_distillation
from automodel_ckpt.models.loss.fused_cross_entropy import CHUNK_ELEMENTS
from automodel_ckpt.models.loss.head_gradients import stores_errors
from automodel_ckpt.models.loss.head_memory import HeadSizes
from automodel_ckpt.models.loss.loss_head import (
    LossHead,
    adds_bias_to_logits,
    class_of,
    output_layer,
)
from automodel_ckpt.models.loss.mtp import mtp_of
from automodel_ckpt.parallel.mesh_sizes import Sizes, choose_strategy
from automodel_ckpt.parallel.precision import compute_dtype
from automodel_ckpt.training.forecast.image_memory import image_bytes
from automodel_ckpt.training.forecast.micro_batch import micro_batch_shape
from automodel_ckpt.training.forecast.model_traces import trace_of, traced_dtype
from automodel_ckpt.training.forecast.rank_parts import rank_parts
from automodel_ckpt.training.forecast.step_trace import HeadMemory, StepTrace
from automodel_ckpt.training.model.sections import is_fully_sharded, num_micro_batches

# Measured: the heap keeps holes between long-lived tensors.
_HEAP = 2.2
_BLOCKS = 1.03
"""CUDA's caching allocator rounds sizes up, and keeps parts of blocks that no tensor fits in."""
_SMALL_LOGITS = 8
"""On a CPU, up to an eighth of a chunk of logits is computed without chunks."""
_LOSS_BYTES = 3 * 4
"""Of a logit, if autograd computes the loss: the logarithms of probabilities, their gradient, and that of logits, in
float32."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of the activations and temporary tensors of all micro-batches in progress, without gradients.

    They are the peaks in the phases of a micro-batch: the forward pass up to the output layer, the loss, the backward
    pass of the output layer, and that of the other layers. *saved* exist before the last one. *backward* has (share of
    the gradients of the model without its output layer that were complete before, peak) of each part of it: gradients
    take the place of activations. *step* is the peak of all phases beside the gradients that remain after the step.
    *others* are the activations of the other micro-batches of a pipeline, which exist in all phases. *last_other* are
    those of one of them that is complete when there are gradients of earlier micro-batches; 0 if none is.
    """

    forward: int
    loss: int
    output: int
    saved: int
    backward: tuple[tuple[float, int], ...]
    step: int
    others: int = 0
    last_other: int = 0


def estimate_activations(recipe: Any, pipeline_rank: int = 0) -> Activations | None:
    """Estimate the activations of a rank of a dry run's *recipe*; None if they are unknown.

    *pipeline_rank* is the position of the rank among those of a pipeline: only the last one computes the loss.
    """
    layout = recipe.layout
    batch = micro_batch_shape(recipe)
    if batch is None:
        return None
    # Along the sequence, tensor parallel ranks keep their part of the hidden states between layers, but all tokens of
    # what their matrices read. It counts as without such parts.
    tokens_per_row = -(-batch.tokens_per_row // layout.sizes.cp)
    trace = trace_of(recipe, replace(batch, tokens_per_row=tokens_per_row))
    if trace is None:
        return None
    of_images: int | None = 0
    if batch.images:
        dtype, is_autocast = traced_dtype(recipe)
        of_images = image_bytes(recipe.model, batch.images, dtype, is_autocast=is_autocast)
    if of_images is None:
        return None
    num_stages = layout.sizes.pp
    trace = trace.part(num_stages)
    head = HeadMemory(0)
    if pipeline_rank == num_stages - 1:
        # A model with targets has no parts of rows.
        head = _head_memory(recipe, batch.rows * (batch.targets_per_row or tokens_per_row))
    # Between their forward and backward passes, the other micro-batches of a pipeline keep what was saved.
    num_others = num_in_progress(recipe.config, layout.sizes, pipeline_rank) - 1
    of_other, last_other = trace.after_forward, 0
    if recipe.config.distributed.pp_schedule == "gpipe" and num_others:
        # Other schedules begin the backward pass of a loss before they compute the next one. This one computes all
        # losses before there are gradients.
        of_other = last_other = of_other + head.waiting_bytes
    of_others = int(num_others * of_other)
    # On a CPU, short-lived tensors leave holes in the heap between long-lived ones.
    factor = _BLOCKS if layout.device.type == "cuda" else _HEAP

    def of_all(peak: int) -> int:
        return int((peak + of_others + of_images) * factor)

    return Activations(
        forward=of_all(trace.forward),
        loss=of_all(trace.after_forward + head.peak_bytes),
        saved=of_all(trace.after_forward),
        output=of_all(trace.after_forward + head.sum_bytes),
        backward=tuple(
            (done / max(trace.gradients, 1), of_all(peak + head.gradient_bytes))
            for done, peak in trace.course
        ),
        step=of_all(_peak(recipe, trace, head)),
        others=int(of_others * factor),
        last_other=int(last_other * factor),
    )


def _peak(recipe: Any, trace: StepTrace, head: HeadMemory) -> int:
    """The largest number of bytes of a micro-batch at one time, without gradients."""
    sizes = recipe.layout.sizes
    is_sharded = is_fully_sharded(recipe.config, recipe.layout)
    if sizes.tp * sizes.pp > 1 or is_sharded or has_buckets(recipe):
        # Shards of gradients, and buckets, which exist during the whole step, count elsewhere.
        return trace.later_peak(head)
    first = trace.peak(head) - trace.gradients - head.gradient_bytes
    if num_micro_batches(recipe.config, sizes.dp) == 1:
        return first
    return max(first, trace.later_peak(head))


def has_buckets(recipe: Any) -> bool:
    """Whether ranks sum up gradients in buckets, as DistributedDataParallel does."""
    strategy = choose_strategy(recipe.config.distributed.strategy, recipe.layout.sizes)
    return strategy == "ddp"


def num_in_progress(config: RecipeConfig, sizes: Sizes, pipeline_rank: int = 0) -> int:
    """The largest number of micro-batches whose activations a rank of a pipeline has at one time."""
    if sizes.pp == 1:
        return 1
    num_batches = num_micro_batches(config, sizes.dp)
    if config.distributed.pp_schedule == "1f1b":
        return min(num_batches, sizes.pp - pipeline_rank)
    return num_batches


def _head_memory(recipe: Any, num_positions: int) -> HeadMemory:
    """The memory of the output layer and the loss for *num_positions* tokens with labels.

    Each depth of multi-token prediction has as many, and a separate loss.
    """
    head: Any = output_layer(recipe.model)
    if getattr(head, "out_features", None) is None:
        return HeadMemory(0)
    parts = rank_parts(recipe)
    num_columns = parts.shape(head.weight)[0]
    dtype = compute_dtype(recipe.config.distributed) or head.weight.dtype
    is_trained = head.weight.requires_grad
    gradient = 0
    if is_trained and not is_fully_sharded(recipe.config, recipe.layout):
        # With shards, it is among the gathered tensors.
        gradient = parts.computed_bytes([head.weight])
    model = model_without_adapters(recipe.model)
    layers = mtp_of(model)
    num_losses = 1 if layers is None else 1 + layers.num_depths
    num_logits = num_losses * num_positions * num_columns
    device_type = recipe.layout.device.type
    is_small = device_type == "cpu" and _SMALL_LOGITS * num_logits <= CHUNK_ELEMENTS["cpu"]
    # With adapters on it, or quantized, the loss is computed from full logits.
    is_plain = class_of(head) in (nn.Linear, LossHead)
    if is_small or not is_plain or adds_bias_to_logits(model):
        return HeadMemory(_LOSS_BYTES * num_logits + gradient, gradient)
    # Other losses than the cross-entropy do not store errors.
    stores = recipe.objective_class.sums_cross_entropy and stores_errors(
        device_type, dtype, num_positions, head.in_features, trains_weight=is_trained
    )
    sizes = HeadSizes(
        num_positions, num_columns, head.in_features, dtype, device_type, is_trained, stores
    )
    chunks = sizes.peak_bytes
    if recipe.config.distill is not None:
        # The sum of the weight's gradient is as large as with labels alone.
        chunks -= replace(sizes, trains_weight=False).peak_bytes
        chunks += fused_distillation.peak_bytes(num_positions, num_columns, dtype, device_type)
    waiting = sizes.waiting_bytes
    of_other_losses = (num_losses - 1) * waiting
    # Errors are where the gradient will be, which is among the gathered tensors in the backward pass only.
    of_errors = num_columns * head.in_features * dtype.itemsize if stores else 0
    return HeadMemory(
        chunks + max(gradient, of_errors) + of_other_losses,
        gradient,
        sizes.kept_bytes + of_other_losses,
        num_losses * waiting,
    )
