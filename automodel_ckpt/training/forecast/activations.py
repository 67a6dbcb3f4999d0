"""The memory of activations: of a traced step, the loss, and images, for all micro-batches in progress."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.models.inspect.forward import model_without_adapters
from automodel_ckpt.models.loss import fused_distillation
from automodel_ckpt.models.loss.fused_cross_entropy import CHUNK_ELEMENTS
from automodel_ckpt.models.loss.head_gradients import stores_errors
from automodel_ckpt.models.loss.head_memory import head_bytes
from automodel_ckpt.models.loss.loss_head import (
    LossHead,
    adds_bias_to_logits,
    class_of,
    output_layer,
)
from automodel_ckpt.models.loss.mtp import mtp_of
from automodel_ckpt.parallel.mesh_sizes import Sizes
from automodel_ckpt.training.forecast.model_traces import Traces, image_bytes, trace_of
from automodel_ckpt.training.forecast.rank_parts import RankParts, micro_batch_shape
from automodel_ckpt.training.forecast.step_trace import HeadMemory, StepTrace
from automodel_ckpt.training.model.sections import num_micro_batches

# Measured: the heap keeps holes between long-lived tensors.
_HEAP = 2.2
_BLOCKS = 1.03
"""CUDA's caching allocator rounds sizes up, and keeps parts of blocks that no tensor fits in."""
_SMALL_LOGITS = 8
"""On a CPU, up to an eighth of a chunk of logits is computed without chunks."""
_LOSS_BYTES = 3 * 4
"""Bytes of a logit if autograd computes the loss: the log-probability, its gradient and the logit's gradient, in
float32."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of the activations and temporary tensors of all micro-batches in progress, without gradients.

    They are the peaks in the phases of a micro-batch: the forward pass up to the output layer, the loss, the backward
    pass of the output layer, and the backward pass of the other layers. *saved* exist before the last phase. *backward*
    has a pair for each part of the last phase: the share of the gradients of the model without its output layer that
    were complete before, and the peak. Gradients take the place of activations. *step* is the peak of all phases in
    addition to the gradients that remain after the step. *others* are the activations of the other micro-batches of a
    pipeline, which exist in all phases. *last_other* are the activations of one such micro-batch that is complete when
    there are gradients of earlier micro-batches. It is 0 if none is complete.
    """

    forward: int = 0
    loss: int = 0
    output: int = 0
    saved: int = 0
    backward: tuple[tuple[float, int], ...] = ()
    step: int = 0
    others: int = 0
    last_other: int = 0


def estimate_activations(rank: RankParts, traces: Traces, pipeline_rank: int) -> Activations | None:
    """Estimate the activations of a *rank* with one of the stages of a pipeline. Returns None when they are unknown."""
    recipe, sizes = rank.recipe, rank.sizes
    batch = micro_batch_shape(recipe)
    if batch is None:
        return None
    # Along the sequence, tensor parallel ranks keep their part of the hidden states between layers, but all tokens of
    # what their matrices read. It counts as without such parts.
    tokens_per_row = -(-batch.tokens_per_row // sizes.cp)
    trace = trace_of(rank, replace(batch, tokens_per_row=tokens_per_row), traces)
    of_images = image_bytes(rank, batch.images) if batch.images else 0
    if trace is None or of_images is None:
        return None
    trace = trace.part(sizes.pp)
    head = HeadMemory(0)
    # Only the last stage computes the loss.
    if pipeline_rank == sizes.pp - 1:
        # A model with targets has no parts of rows.
        head = _head_memory(rank, batch.rows * (batch.targets_per_row or tokens_per_row))
    # Between their forward and backward passes, the other micro-batches of a pipeline keep what was saved.
    num_others = num_in_progress(recipe.config, sizes, pipeline_rank) - 1
    of_other, last_other = trace.after_forward, 0
    if recipe.config.distributed.pp_schedule == "gpipe" and num_others:
        # Other schedules begin the backward pass of a loss before they compute the next one. This one computes all
        # losses before there are gradients.
        of_other = last_other = of_other + head.waiting_bytes
    fixed = num_others * of_other + of_images
    # On a CPU, short-lived tensors leave holes in the heap between long-lived ones.
    factor = _BLOCKS if rank.on_gpu else _HEAP
    backward = []
    for done, peak in trace.course:
        at_peak = int((peak + head.gradient_bytes + fixed) * factor)
        backward.append((done / max(trace.gradients, 1), at_peak))
    return Activations(
        forward=int((trace.forward + fixed) * factor),
        loss=int((trace.after_forward + head.peak_bytes + fixed) * factor),
        saved=int((trace.after_forward + fixed) * factor),
        output=int((trace.after_forward + head.sum_bytes + fixed) * factor),
        backward=tuple(backward),
        step=int((_peak(rank, trace, head) + fixed) * factor),
        others=int(num_others * of_other * factor),
        last_other=int(last_other * factor),
    )


def _peak(rank: RankParts, trace: StepTrace, head: HeadMemory) -> int:
    """The largest number of bytes of a micro-batch at one time, without gradients."""
    later = trace.later_peak(head)
    if rank.sizes.tp * rank.sizes.pp > 1 or rank.is_sharded or rank.has_buckets:
        # Shards of gradients, and buckets, which exist during the whole step, count elsewhere.
        return later
    first = trace.peak(head) - trace.gradients - head.gradient_bytes
    return max(first, later) if rank.accumulates else first


def num_in_progress(config: RecipeConfig, sizes: Sizes, pipeline_rank: int = 0) -> int:
    """The largest number of micro-batches with activations on a rank of a pipeline at one time."""
    if sizes.pp == 1:
        return 1
    num_batches = num_micro_batches(config, sizes.dp)
    if config.distributed.pp_schedule == "1f1b":
        return min(num_batches, sizes.pp - pipeline_rank)
    return num_batches


def _head_memory(rank: RankParts, num_positions: int) -> HeadMemory:
    """The memory of the output layer and the loss for *num_positions* tokens with labels.

    Each depth of multi-token prediction has as many, and a separate loss.
    """
    recipe = rank.recipe
    head: Any = output_layer(recipe.model)
    if getattr(head, "out_features", None) is None:
        return HeadMemory(0)
    num_columns = rank.shape(head.weight)[0]
    dtype = rank.dtype or head.weight.dtype
    is_trained = head.weight.requires_grad
    # With shards, its gradient is among the gathered tensors.
    has_gradient = is_trained and not rank.is_sharded
    gradient = rank.computed_bytes([head.weight]) if has_gradient else 0
    model = model_without_adapters(recipe.model)
    layers = mtp_of(model)
    num_losses = 1 if layers is None else 1 + layers.num_depths
    num_logits = num_losses * num_positions * num_columns
    device_type = recipe.layout.device.type
    is_small = not rank.on_gpu and _SMALL_LOGITS * num_logits <= CHUNK_ELEMENTS["cpu"]
    # With adapters on it, or quantized, the loss is computed from full logits.
    is_plain = class_of(head) in (nn.Linear, LossHead)
    if is_small or not is_plain or adds_bias_to_logits(model):
        return HeadMemory(_LOSS_BYTES * num_logits + gradient, gradient)
    # Other losses than the cross-entropy do not store errors.
    stores = recipe.objective_class.sums_cross_entropy and stores_errors(
        device_type, dtype, num_positions, head.in_features, trains_weight=is_trained
    )
    sizes = (num_positions, num_columns, head.in_features, dtype, device_type)
    found = head_bytes(*sizes, trains_weight=is_trained, stores=stores)
    chunks, waiting = found.peak, found.waiting
    if recipe.config.distill is not None:
        # The sum of the weight's gradient is as large as with labels alone.
        chunks -= head_bytes(*sizes, trains_weight=False, stores=stores).peak
        chunks += fused_distillation.peak_bytes(num_positions, num_columns, dtype, device_type)
    of_other_losses = (num_losses - 1) * waiting
    # Errors are where the gradient will be, which is among the gathered tensors in the backward pass only.
    of_errors = num_columns * head.in_features * dtype.itemsize if stores else 0
    return HeadMemory(
        chunks + max(gradient, of_errors) + of_other_losses,
        gradient,
        found.kept + of_other_losses,
        num_losses * waiting,
    )
