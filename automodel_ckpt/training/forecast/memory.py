"""The memory of a rank at the peak of a step: exact for parameters and optimizer, traced for activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from automodel_ckpt.checkpoint import discover
from automodel_ckpt.checkpoint.parts.discovery import classify
from automodel_ckpt.checkpoint.saving.save import forecast_bytes
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.logs.metrics import PeakMemory
from automodel_ckpt.models.inspect.interface import model_without_adapters
from automodel_ckpt.models.loss import fused_distillation
from automodel_ckpt.models.loss.head_gradients import CHUNK_ELEMENTS, head_bytes, stores_errors
from automodel_ckpt.models.loss.loss_head import (
    LossHead,
    adds_bias_to_logits,
    class_of,
    output_layer,
)
from automodel_ckpt.models.loss.mtp import mtp_of
from automodel_ckpt.models.pipeline_stage import parameters_of_stages
from automodel_ckpt.parallel.mesh_sizes import Sizes
from automodel_ckpt.parallel.model_layers import layers_after_input, separate_ends
from automodel_ckpt.training.forecast.rank_parts import RankParts, micro_batch_shape, nbytes
from automodel_ckpt.training.forecast.step_trace import HeadMemory, Traces, image_bytes, trace_of
from automodel_ckpt.training.measure.weight_average import average_bytes
from automodel_ckpt.training.model.sections import num_micro_batches

_HEAP = 2.2
"""On a CPU, short-lived tensors leave holes in the heap between long-lived ones (measured)."""
_BLOCKS = 1.03
"""CUDA's caching allocator rounds sizes up, and keeps parts of blocks that no tensor fits in."""
_SMALL_LOGITS = 8
"""On a CPU, up to an eighth of a chunk of logits is computed without chunks."""
_LOSS_BYTES = 3 * 4
"""Bytes of a logit if autograd computes the loss: the log-probability, its gradient and the logit's gradient, in
float32."""
_RUNTIME_BYTES = 30 * 10**6
"""What a process on a CPU allocates for threads, kernels and data after its start."""
_CONTEXT_BYTES = 600 * 2**20
"""A process's share of a GPU before the first tensor: the CUDA context, and the workspace of matrix products."""
_COMMUNICATION_BYTES = 2**30
"""The buffers of NCCL on a rank that communicates with others."""

Phase = tuple[float, int]
"""A part of a micro-batch: the share of its gradients that were complete before, and its bytes without these and
without parameters."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step, by content.

    *gradients*, *gathered* and *activations* are the bytes in the phase with the peak: before the first backward pass
    of a step, there are no gradients. *average* belongs to the section ``ema``, *others* are the weights of models that
    are not trained. *process* is the memory of the process before the model exists. *activations* are None when they
    cannot be estimated.
    """

    weights: int
    optimizer: int
    process: int
    average: int = 0
    others: int = 0
    gradients: int = 0
    gathered: int = 0
    activations: int | None = None

    @property
    def total(self) -> int:
        """The sum of all parts."""
        state = self.weights + self.gradients + self.optimizer + self.average + self.others
        return state + self.gathered + (self.activations or 0) + self.process


def estimate_memory(recipe: Any, traces: Traces | None = None) -> Memory:
    """Estimate the memory of one rank of a dry run's *recipe*. The recipe's layout has the sizes of the mesh.

    The peak is in the backward pass or in the optimizer's step. With a pipeline, the result is for the rank with most.
    Without *traces*, which keep what was traced, activations count as nothing.
    """
    # First: what this process has allocated before the model is traced is about what a rank has before its model.
    on_gpu, sizes = recipe.layout.device.type == "cuda", recipe.layout.sizes
    process = PeakMemory(torch.device("cpu")).nbytes + _RUNTIME_BYTES
    if on_gpu:
        process = _CONTEXT_BYTES + (_COMMUNICATION_BYTES if sizes.world > 1 else 0)
    stages: list[list[nn.Parameter]] = [list(recipe.model.parameters())]
    if sizes.pp > 1:
        stages = list(parameters_of_stages(recipe.model, sizes.pp))
    rank = RankParts(recipe)
    found = []
    for number, parameters in enumerate(stages):
        phases: Sequence[Phase] | None = [(1.0, 0)]
        if traces is not None:
            phases = _traced_phases(rank, traces, number)
        found.append(_of_rank(rank, parameters, process, phases))
    return max(found, key=lambda memory: memory.total)


def _of_rank(
    rank: RankParts,
    parameters: Sequence[nn.Parameter],
    process: int,
    phases: Sequence[Phase] | None,
) -> Memory:
    """The memory of a rank with the stage of *parameters*, and the *phases* of its micro-batches."""
    recipe = rank.recipe
    offloads = recipe.config.distributed.cpu_offload
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # What has the same size for each element of a parameter.
    share = rank.stored_bytes(trained) / max(nbytes(trained), 1)
    average = average_bytes(parameters) if recipe.weight_average is not None else 0
    others = sum(nbytes(model.parameters()) for model in recipe.other_models())
    state = Memory(
        rank.stored_bytes(parameters),
        int(_optimizer_bytes(recipe, trained) * share),
        process,
        int(average * share),
        others // (rank.sizes.tp * rank.num_shards),
    )
    gradients = _gradient_bytes(rank, trained)
    if offloads:
        state, gradients = Memory(0, 0, process), 0
    temporary = int(_bytes_of_optimizer_step(rank, trained) * share)
    gathered, at_end = _gathered_bytes(rank, parameters) if rank.is_sharded else (0, 0)
    gathered += rank.dequantized_bytes(parameters)
    # The optimizer's step has temporary tensors instead of activations and gathered parameters.
    peaks = [
        replace(state, gradients=gradients, activations=temporary),
        replace(state, gradients=gradients, gathered=at_end, activations=0),
    ]
    for complete, activations in phases or [(1.0, 0)]:
        # DDP's buckets exist during the whole step.
        present = gradients if rank.accumulates or rank.has_buckets else int(complete * gradients)
        peak = replace(state, gradients=present, gathered=gathered, activations=activations)
        peaks.append(peak)
    memory = max(peaks, key=lambda peak: peak.total)
    return memory if phases is not None else replace(memory, activations=None)


def _gradient_bytes(rank: RankParts, trained: Sequence[nn.Parameter]) -> int:
    """Bytes of the gradients of the *trained* parameters of a stage that a rank holds at one time.

    With ``defer_gradient_sync``, these are the gradients of complete parameters in the type that they are reduced in.
    """
    if rank.defers:
        return rank.computed_bytes(trained, torch.float32 if rank.dtype else None)
    # The sums of micro-batches before the last one of a step are not in the buckets of DDP.
    return rank.stored_bytes(trained) * (2 if rank.has_buckets and rank.accumulates else 1)


def _gathered_bytes(rank: RankParts, parameters: Sequence[nn.Parameter]) -> tuple[int, int]:
    """The largest number of bytes that fsdp2 has gathered at one time: parameters, and gradients to be reduced.

    Also returns the bytes at the end of the backward pass, when no activations are left: of the embedding's gradient.
    """
    section = rank.recipe.config.distributed
    here = {id(each) for each in parameters}
    if rank.num_shards == 1 and not section.cpu_offload and rank.dtype is not None:
        # On one rank, fsdp2 only casts.
        here = {id(each) for each in parameters if each.dtype != rank.dtype}
        here -= rank.itemsizes.keys()

    def group(modules: Sequence[nn.Module]) -> tuple[int, int]:
        """Bytes of the parameters and of the gradients of *modules*."""
        found = {id(each): each for module in modules for each in module.parameters()}
        own = [each for key, each in found.items() if key in here]
        trained = [each for each in own if each.requires_grad]
        return rank.computed_bytes(own, rank.dtype), rank.computed_bytes(trained, rank.dtype)

    embeddings, outputs = separate_ends(rank.recipe.model)
    layers = [group([layer]) for layer in layers_after_input(rank.recipe.model)]
    output = group(outputs)
    # What is in no layer and not alone at an end: it stays gathered, and a tied embedding is in it.
    embedding, whole = group(embeddings), group([rank.recipe.model])
    elsewhere = [*layers, embedding, output]
    root = whole[0] - sum(parameters for parameters, _ in elsewhere)
    root_gradients = whole[1] - sum(gradients for _, gradients in elsewhere)
    layer, layer_gradients = max(layers, default=(0, 0))
    # Several ranks: the copy of a group, and the buffer that it is gathered into.
    copies = 2 if rank.num_shards > 1 else 1
    widening = 0
    if copies > 1 or section.cpu_offload:
        # As in parallelize: gradients are summed over the ranks in float32.
        widening = torch.float32.itemsize // rank.dtype.itemsize if rank.dtype else 1
    reduced = max(layer_gradients, output[1]) * widening
    kept = 0
    if rank.defers or not section.reshard_after_forward:
        kept = sum(parameters for parameters, _ in layers) + output[0]
    of_output = max(copies * output[0], output[0] + output[1] + root_gradients)
    backward = root_gradients + copies * layer + layer_gradients + reduced
    forward = copies * layer + (copies - 1) * max(layer, output[0])
    shares = 1 + widening + widening / rank.num_shards
    last = max(int(embedding[1] * shares), root_gradients * (1 + widening))
    return root + kept + max(forward, of_output, backward), root + last


def _optimizer_bytes(recipe: Any, trained: Sequence[nn.Parameter]) -> int:
    """Bytes of the optimizers' state of the *trained* parameters of a stage."""
    share = nbytes(trained) / max(
        nbytes(p for p in recipe.model.parameters() if p.requires_grad), 1
    )
    optimizers = [item for item in classify(discover(recipe)) if item.kind == "optimizer"]
    # The difference, because a checkpoint without state has some files, too.
    with_optimizers, without = (
        forecast_bytes(items, world_size=1, save_optimizer=True) for items in (optimizers, [])
    )
    return int((with_optimizers - without) * share)


def _bytes_of_optimizer_step(rank: RankParts, trained: Sequence[nn.Parameter]) -> int:
    """Bytes of the tensors that exist during the optimizer's step only.

    On a GPU, torch's optimizers process all parameters in one operation, with a temporary tensor for each, unless they
    are fused.
    """
    optimizer = rank.recipe.optimizer
    is_ours = type(optimizer).__module__.startswith("automodel_ckpt")
    options = optimizer.defaults
    is_multi_tensor = options.get("foreach", False) is not False and not options.get("fused")
    return nbytes(trained) if rank.on_gpu and is_multi_tensor and not is_ours else 0


# ---------------------------------------------------------------- activations


def _traced_phases(rank: RankParts, traces: Traces, pipeline_rank: int) -> list[Phase] | None:
    """The phases of a micro-batch on a *rank* with one of the stages of a pipeline. Returns None when unknown."""
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
    of_other = trace.after_forward
    num_others = num_in_progress(recipe.config, sizes, pipeline_rank) - 1
    if recipe.config.distributed.pp_schedule == "gpipe" and num_others:
        # This schedule computes all losses before the first backward pass. When there are gradients, one is complete.
        of_other += head.waiting_bytes
        num_others -= 1
    fixed = num_others * of_other + of_images
    found = [(0.0, trace.forward), (0.0, trace.after_forward + head.peak_bytes)]
    of_all, _ = trace.course[-1]
    for done, peak in trace.course:
        found.append((done / max(of_all, 1), peak + head.gradient_bytes))
    factor = _BLOCKS if rank.on_gpu else _HEAP
    return [(complete, int((peak + fixed) * factor)) for complete, peak in found]


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
    chunks = found.peak
    if recipe.config.distill is not None:
        # The sum of the weight's gradient is as large as with labels alone.
        chunks -= head_bytes(*sizes, trains_weight=False, stores=stores).peak
        chunks += fused_distillation.peak_bytes(num_positions, num_columns, dtype, device_type)
    # Errors are where the gradient will be, which is among the gathered tensors in the backward pass only.
    of_errors = num_columns * head.in_features * dtype.itemsize if stores else 0
    peak = chunks + max(gradient, of_errors) + (num_losses - 1) * found.waiting
    return HeadMemory(peak, gradient, num_losses * found.waiting)
