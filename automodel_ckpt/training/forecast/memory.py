"""The memory of a rank at the peak of a step: exact for parameters and optimizer, traced for activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from automodel_ckpt.checkpoint import discover
from automodel_ckpt.checkpoint.parts.discovery import classify
from automodel_ckpt.checkpoint.saving.forecast import forecast_bytes
from automodel_ckpt.logs.metrics import PeakMemory
from automodel_ckpt.models.pipeline_stage import parameters_of_stages
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.model_layers import layers_after_input, separate_ends
from automodel_ckpt.parallel.precision import compute_dtype
from automodel_ckpt.training.forecast.activations import (
    Activations,
    estimate_activations,
    has_buckets,
)
from automodel_ckpt.training.forecast.gathered import Gathered, defers, gathered_bytes
from automodel_ckpt.training.forecast.rank_parts import RankParts, nbytes, rank_parts
from automodel_ckpt.training.measure.weight_average import average_bytes
from automodel_ckpt.training.model.sections import is_fully_sharded, num_micro_batches

_RUNTIME_BYTES = 30 * 10**6
"""What a process on a CPU allocates for threads, kernels and data after its start."""
_CONTEXT_BYTES = 600 * 2**20
"""A process's share of a GPU before the first tensor: the CUDA context, and the workspace of matrix products."""
_COMMUNICATION_BYTES = 2**30
"""The buffers of NCCL on a rank that communicates with others."""
_NO_ACTIVATIONS = Activations(forward=0, loss=0, output=0, saved=0, backward=(), step=0)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at the peak of a step, by content.

    *gradients*, *gathered* and *activations* are those of the phase with the peak: before the first backward pass of a
    step, there are no gradients. *average* is that of the section ``ema``, *others* are the weights of models that are
    not trained. *process* is the memory of the process before the model exists. None: activations cannot be estimated.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int | None
    process: int
    average: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        state = self.weights + self.gradients + self.optimizer + self.average + self.others
        return state + self.gathered + (self.activations or 0) + self.process


def estimate_memory(recipe: Any, *, with_activations: bool = True) -> Memory:
    """Estimate the memory of one rank of a dry run's *recipe*, whose layout has the sizes of the mesh.

    The peak is in the backward pass or in the optimizer's step. With a pipeline, it is that of the rank with most.
    Without activations, the model is not traced, and the total is at most that with them.
    """
    # First: what this process has allocated before the model is traced is about what a rank has before its model.
    process = _process_bytes(recipe.layout)
    num_ranks = recipe.layout.sizes.pp
    parameters_by_rank: list[list[nn.Parameter]] = [list(recipe.model.parameters())]
    if num_ranks > 1:
        parameters_by_rank = list(parameters_of_stages(recipe.model, num_ranks))
    ranks = [
        _of_rank(
            recipe,
            parameters,
            process,
            estimate_activations(recipe, pipeline_rank) if with_activations else _NO_ACTIVATIONS,
        )
        for pipeline_rank, parameters in enumerate(parameters_by_rank)
    ]
    return max(ranks, key=lambda memory: memory.total)


def _of_rank(
    recipe: Any,
    parameters: list[nn.Parameter],
    process: int,
    activations: Activations | None,
) -> Memory:
    """The memory of a rank with the stages of *parameters*."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    parts = rank_parts(recipe)
    # What has the same size for each element of a parameter.
    share = parts.stored_bytes(trained) / max(nbytes(trained), 1)
    average = average_bytes(parameters) if recipe.weight_average is not None else 0
    others = sum(nbytes(model.parameters()) for model in recipe.other_models())
    state = Memory(
        weights=parts.stored_bytes(parameters),
        gradients=0,
        optimizer=int(_optimizer_bytes(recipe, trained) * share),
        gathered=0,
        activations=None,
        process=process,
        average=int(average * share),
        others=others // num_shards(recipe),
    )
    gathered = gathered_bytes(recipe, parameters, parts)
    temporary = int(_bytes_of_optimizer_step(recipe, trained) * share)
    phases = []
    for gradients, of_gathered, peak in _phases(
        recipe, trained, gathered, temporary, activations, parts
    ):
        phases.append(replace(state, gradients=gradients, gathered=of_gathered, activations=peak))
    memory = max(phases, key=lambda phase: phase.total)
    if recipe.config.distributed.cpu_offload:
        return replace(memory, weights=0, gradients=0, optimizer=0, average=0, others=0)
    return memory


def num_shards(recipe: Any) -> int:
    """The number of shards of each parameter of a stage."""
    sizes = recipe.layout.sizes
    is_sharded = is_fully_sharded(recipe.config, recipe.layout)
    return int(sizes.tp * (sizes.dp_shard * sizes.cp if is_sharded else 1))


def _process_bytes(layout: RankLayout) -> int:
    """What a rank has allocated before its model."""
    if layout.device.type == "cuda":
        return _CONTEXT_BYTES + (_COMMUNICATION_BYTES if layout.sizes.world > 1 else 0)
    return PeakMemory(torch.device("cpu")).nbytes + _RUNTIME_BYTES


def _gradient_bytes(recipe: Any, trained: list[nn.Parameter], parts: RankParts) -> int:
    """Bytes of the gradients of the *trained* parameters of a stage that a rank holds at one time.

    With ``defer_gradient_sync``, these are the gradients of complete parameters in the type that they are reduced in.
    Each is freed when its shard is made, in the last micro-batch of the step.
    """
    if not defers(recipe):
        stored = parts.stored_bytes(trained)
        accumulates = num_micro_batches(recipe.config, recipe.layout.sizes.dp) > 1
        # The sums of micro-batches before the last one of a step are not in the buckets.
        return 2 * stored if has_buckets(recipe) and accumulates else stored
    # Micro-batches are summed in the type that gradients are reduced in.
    reduced_in = torch.float32 if compute_dtype(recipe.config.distributed) else None
    return parts.computed_bytes(trained, reduced_in)


def _optimizer_bytes(recipe: Any, trained: list[nn.Parameter]) -> int:
    """Bytes of the optimizers' state of the *trained* parameters of a stage."""
    all_trained = [p for p in recipe.model.parameters() if p.requires_grad]
    share = nbytes(trained) / max(nbytes(all_trained), 1)
    state = classify(discover(recipe))
    optimizers = [item for item in state if item.kind == "optimizer"]
    # The difference, because a checkpoint without state has some files, too.
    without_optimizers = forecast_bytes([], world_size=1, save_optimizer=True)
    with_optimizers = forecast_bytes(optimizers, world_size=1, save_optimizer=True)
    return int((with_optimizers - without_optimizers) * share)


def _bytes_of_optimizer_step(recipe: Any, trained: list[nn.Parameter]) -> int:
    """Bytes of the tensors that exist during the optimizer's step only.

    On a GPU, torch's optimizers process all parameters in one operation, with a temporary tensor for each, unless they
    are fused.
    """
    is_ours = type(recipe.optimizer).__module__.startswith("automodel_ckpt")
    if recipe.layout.device.type != "cuda" or is_ours:
        return 0
    options = recipe.optimizer.defaults
    is_fused = bool(options.get("fused"))
    is_multi_tensor = "foreach" in options and options["foreach"] is not False
    return nbytes(trained) if is_multi_tensor and not is_fused else 0


_Phase = tuple[int, int, int | None]
"""Bytes that exist at one time, besides those that exist during the whole step: gradients, gathered parameters, and
activations (None: unknown)."""


def _phases(
    recipe: Any,
    trained: list[nn.Parameter],
    gathered: Gathered,
    temporary: int,
    activations: Activations | None,
    parts: RankParts,
) -> list[_Phase]:
    """The phases of a step. *temporary* are the bytes of the optimizer's step."""
    gradients = _gradient_bytes(recipe, trained, parts)
    has_phases = _has_separate_phases(recipe)
    if activations is None:
        at_once = max(gathered.forward, gathered.backward, gathered.last) + gathered.kept
        return [(gradients, at_once if has_phases else gathered.heap, None)]
    # The optimizer's step has temporary tensors instead of activations and gathered parameters.
    phases: list[_Phase] = [(gradients, 0, temporary)]
    # The phases below have the activations of all micro-batches that are in progress at one time.
    in_progress = max(gradients - activations.last_other, 0)
    if not has_phases:
        return [*phases, (in_progress, gathered.heap, activations.step)]
    # Those of the micro-batches before.
    accumulates = num_micro_batches(recipe.config, recipe.layout.sizes.dp) > 1
    at_first = in_progress if accumulates else 0
    before, after = (gathered.kept, 0) if gathered.is_deferred else (0, gathered.kept)
    phases += [
        (at_first, gathered.start + before, activations.others),
        (at_first, gathered.forward + after, activations.forward),
        (at_first, gathered.loss + after, activations.loss),
        (at_first, gathered.output + after, activations.output),
        (at_first, gathered.reduced_output + after, activations.saved),
        (in_progress, gathered.last + before, activations.others),
    ]
    of_output, of_root = _gradients_of_ends(recipe, trained, parts)
    of_backbone = gradients - of_output
    for share, peak in activations.backward:
        of_layers = int(share * of_backbone)
        is_first = of_layers < gathered.of_layer
        of_phase = gathered.first_backward if is_first else gathered.backward
        kept = int(share * before + (1 - share) * after)
        complete = of_output + min(of_layers, of_backbone - of_root)
        phases.append((in_progress if accumulates else complete, of_phase + kept, peak))
    return phases


def _gradients_of_ends(
    recipe: Any, trained: list[nn.Parameter], parts: RankParts
) -> tuple[int, int]:
    """Bytes of the gradients that fsdp2 reduces before those of all layers, and after them when activations are freed.

    The first ones are those of an output layer that is gathered separately. The others are those of *trained*
    parameters that are neither in a layer nor in such an end of the model, such as an embedding that is also the output
    layer.
    """
    embeddings, outputs = separate_ends(recipe.model)
    separate = [*layers_after_input(recipe.model), *embeddings, *outputs]
    elsewhere = {id(parameter) for part in separate for parameter in part.parameters()}
    of_outputs = {id(parameter) for part in outputs for parameter in part.parameters()}
    root = [parameter for parameter in trained if id(parameter) not in elsewhere]
    output = [parameter for parameter in trained if id(parameter) in of_outputs]
    return parts.stored_bytes(output), parts.stored_bytes(root)


def _has_separate_phases(recipe: Any) -> bool:
    """Whether the phases of a micro-batch follow each other, and memory that one has freed is used by the next one.

    The heap of a CPU keeps what was freed.
    """
    layout = recipe.layout
    return layout.device.type == "cuda" and is_fully_sharded(recipe.config, layout)
