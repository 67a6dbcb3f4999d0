"""The memory of activations: those of a traced step, the loss, and images, for all micro-batches in progress."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.distributed.mesh_sizes import Sizes
from automodel_ckpt.models.forward import model_without_adapters
from automodel_ckpt.models.fused_cross_entropy import CHUNK_ELEMENTS, peak_bytes
from automodel_ckpt.models.loss_head_probe import adds_bias_to_logits
from automodel_ckpt.models.mtp import mtp_of
from automodel_ckpt.recipes.forecast.image_memory import image_bytes
from automodel_ckpt.recipes.forecast.micro_batch import micro_batch_shape
from automodel_ckpt.recipes.forecast.model_traces import trace_of
from automodel_ckpt.recipes.forecast.step_trace import HeadMemory, StepTrace
from automodel_ckpt.recipes.forecast.tensor_bytes import nbytes
from automodel_ckpt.recipes.model.sections import is_fully_sharded, num_micro_batches
from automodel_ckpt.recipes.precision import compute_dtype
from automodel_ckpt.recipes.recipe import Recipe

# Measured by tools/bench_forecast.py: the heap keeps holes between long-lived tensors.
_HEAP = 2.2
_BLOCKS = 1.03
"""CUDA's caching allocator rounds sizes up, and keeps parts of blocks that no tensor fits in."""
_SMALL_LOGITS = 8
"""On a CPU, up to an eighth of a chunk of logits is computed without chunks."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of the activations and temporary tensors of all micro-batches in progress, without gradients.

    They are the peaks in three phases of a micro-batch: the forward pass up to the output layer, the loss, and the
    backward pass. *step* is the peak of all phases beside the gradients that remain after the step; it is lower where
    gradients take the place of activations in the course of a backward pass.
    """

    forward: int
    loss: int
    backward: int
    step: int


def estimate_activations(recipe: Recipe) -> Activations | None:
    """Estimate the activations of a dry run's *recipe*; None if they are unknown."""
    layout = recipe.layout
    batch = micro_batch_shape(recipe)
    if batch is None:
        return None
    is_sequence_parallel = recipe.config.distributed.sequence_parallel
    num_parts = layout.num_row_parts(sequence_parallel=is_sequence_parallel)
    tokens_per_row = -(-batch.tokens_per_row // num_parts)
    trace = trace_of(recipe, replace(batch, tokens_per_row=tokens_per_row))
    if trace is None:
        return None
    of_images = image_bytes(recipe.model, batch.images) if batch.images else 0
    if of_images is None:
        return None
    # A model with targets has no parts of rows.
    head = _head_memory(recipe, batch.rows * (batch.targets_per_row or tokens_per_row))
    num_batches = num_in_progress(recipe.config, layout.sizes)
    # On a CPU, short-lived tensors leave holes in the heap between long-lived ones (tools/bench_forecast.py).
    factor = _BLOCKS if layout.device.type == "cuda" else _HEAP

    def of_all(peak: int) -> int:
        total = (peak + of_images) * num_batches // layout.sizes.pp
        return int(total * factor)

    return Activations(
        forward=of_all(trace.forward),
        loss=of_all(trace.after_forward + head.peak_bytes),
        backward=of_all(trace.later_backward + head.gradient_bytes),
        step=of_all(_peak(recipe, trace, head)),
    )


def _peak(recipe: Recipe, trace: StepTrace, head: HeadMemory) -> int:
    """The largest number of bytes of a micro-batch at one time, without gradients."""
    sizes = recipe.layout.sizes
    if sizes.tp * sizes.pp > 1 or is_fully_sharded(recipe.config, recipe.layout):
        # Ranks keep their shards of gradients, which count elsewhere.
        return trace.later_peak(head)
    first = trace.peak(head) - trace.gradients - head.gradient_bytes
    if num_micro_batches(recipe.config, sizes.dp) == 1:
        return first
    return max(first, trace.later_peak(head))


def num_in_progress(config: RecipeConfig, sizes: Sizes) -> int:
    """The largest number of micro-batches whose activations a pipeline stage has at one time."""
    if sizes.pp == 1:
        return 1
    section = config.distributed
    num_batches = num_micro_batches(config, sizes.dp)
    if section.pp_schedule == "1f1b":
        return min(num_batches, sizes.pp)
    if section.pp_schedule == "interleaved1f1b":
        # The first rank starts this many forward passes of a stage before its first backward pass ends.
        per_rank = section.stages_per_rank
        num_passes = (per_rank - 1) * sizes.pp + 2 * (sizes.pp - 1) + 1
        return min(num_batches, -(-num_passes // per_rank))
    return num_batches


def _head_memory(recipe: Recipe, num_positions: int) -> HeadMemory:
    """The memory of the output layer and the loss for *num_positions* tokens with labels."""
    head = getattr(recipe.model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear):
        return HeadMemory(0)
    dtype = compute_dtype(recipe.config.distributed) or head.weight.dtype
    is_trained = head.weight.requires_grad
    gradient = 0
    if is_trained and not is_fully_sharded(recipe.config, recipe.layout):
        # With shards, it is among the gathered tensors.
        gradient = nbytes([head.weight])
    model = model_without_adapters(recipe.model)
    layers = mtp_of(model)
    if layers is not None:
        num_positions *= 1 + layers.num_depths
    num_logits = num_positions * head.out_features
    device_type = recipe.layout.device.type
    is_small = device_type == "cpu" and _SMALL_LOGITS * num_logits <= CHUNK_ELEMENTS["cpu"]
    if is_small or adds_bias_to_logits(model):
        # The logarithms of probabilities, their gradient, and that of the logits, in float32.
        return HeadMemory(3 * 4 * num_logits + gradient, gradient)
    chunks = peak_bytes(
        num_positions,
        head.out_features,
        head.in_features,
        dtype,
        device_type,
        trains_weight=is_trained,
    )
    return HeadMemory(chunks + gradient, gradient)
