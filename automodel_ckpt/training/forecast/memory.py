"""The memory of a rank at the peak of a step: exact for parameters and optimizer, traced for activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from automodel_ckpt.checkpoint import discover
from automodel_ckpt.checkpoint.parts.discovery import classify
from automodel_ckpt.checkpoint.saving.forecast import forecast_bytes
from automodel_ckpt.logs.metrics import PeakMemory
from automodel_ckpt.models.pipeline_stage import parameters_of_stages
from automodel_ckpt.parallel.model_layers import layers_after_input, separate_ends
from automodel_ckpt.training.forecast.activations import Activations, estimate_activations
from automodel_ckpt.training.forecast.model_traces import Traces
from automodel_ckpt.training.forecast.rank_parts import Parameters, RankParts, nbytes
from automodel_ckpt.training.measure.weight_average import average_bytes


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes that exist at one time, besides those that exist during the whole step."""

    gradients: int
    gathered: int
    activations: int


class _Group(NamedTuple):
    """Bytes of modules that are gathered together: parameters, gradients, and gradients while they are reduced."""

    parameters: int = 0
    gradients: int = 0
    reduced: int = 0


def phases_of(
    rank: RankParts, parameters: Sequence[nn.Parameter], activations: Activations, temporary: int
) -> list[Phase]:
    """The phases of a step of a rank that has *parameters*. *temporary* are the bytes of the optimizer's step."""
    trained = [each for each in parameters if each.requires_grad]
    gradients = _gradient_bytes(rank, trained)
    # The phases after the first one have the activations of all micro-batches that are in progress at one time.
    in_progress = max(gradients - activations.last_other, 0)
    # The optimizer's step has temporary tensors instead of activations and gathered parameters.
    phases = [Phase(gradients, 0, temporary)]
    if not rank.is_sharded:
        return [*phases, Phase(in_progress, 0, activations.step)]
    in_turn = _sharded(rank, parameters, activations, gradients, in_progress)
    if not rank.on_gpu:
        # The heap of a CPU keeps what was freed.
        gathered = max(phase.gathered for phase in in_turn)
        return [*phases, Phase(in_progress, gathered, activations.step)]
    return phases + in_turn


def _gradient_bytes(rank: RankParts, trained: Sequence[nn.Parameter]) -> int:
    """Bytes of the gradients of the *trained* parameters of a stage that a rank holds at one time.

    With ``defer_gradient_sync``, these are the gradients of complete parameters in the type that they are reduced in.
    Each is freed when its shard is made, in the last micro-batch of the step.
    """
    if rank.defers:
        return rank.computed_bytes(trained, torch.float32 if rank.dtype else None)
    # The sums of micro-batches before the last one of a step are not in the buckets of DDP.
    return rank.stored_bytes(trained) * (2 if rank.has_buckets and rank.accumulates else 1)


def _sharded(
    rank: RankParts,
    parameters: Sequence[nn.Parameter],
    activations: Activations,
    gradients: int,
    in_progress: int,
) -> list[Phase]:
    """The phases of a micro-batch with fsdp2, which follow each other and reuse memory."""
    section = rank.recipe.config.distributed
    modules = layers_after_input(rank.recipe.model)
    embeddings, outputs = separate_ends(rank.recipe.model)
    layers = [_group(rank, parameters, layer.parameters()) for layer in modules]
    embedding, output = (
        _group(rank, parameters, [each for module in end for each in module.parameters()])
        for end in (embeddings, outputs)
    )
    columns = zip(_group(rank, parameters, parameters), *layers, embedding, output, strict=True)
    root = _Group(*(total - sum(elsewhere) for total, *elsewhere in columns))
    layer = max(layers, key=lambda each: each.parameters, default=_Group())
    buffer = int(rank.num_shards > 1)
    reduces = buffer or section.cpu_offload
    reduced_layer, reduced_output = layer.reduced * reduces, output.reduced * reduces
    # Several groups of a forward pass: the copy of one, its buffer, and the buffer of the next one.
    forward = layer.parameters * (1 + buffer) + buffer * max(layer.parameters, output.parameters)
    # The gradient of a tied output layer exists until the end.
    of_output = output.parameters + root.gradients + output.gradients + buffer * layer.parameters
    backward = root.gradients + layer.parameters * (1 + buffer) + layer.gradients
    reduced_embedding = embedding.reduced + embedding.reduced * buffer // rank.num_shards
    last = embedding.gradients + max(reduced_layer, reduced_embedding * reduces)
    if any(type(module) is not nn.Embedding for module in embeddings):
        last += embedding.parameters
    # A tied embedding: its gradients as an output layer and as an embedding, which are added.
    last = max(last, root.gradients + max(root.gradients, root.reduced * reduces))
    # Layers that stay gathered: from their forward to their backward pass, or, with deferred gradients, from their
    # backward pass to the forward pass of the next micro-batch. They are freed one after another.
    before = after = 0
    if rank.defers:
        before = sum(each.parameters for each in layers) + output.parameters
    elif not section.reshard_after_forward:
        after = sum(each.parameters for each in layers) + embedding.parameters
    start = embedding.parameters * (1 + buffer) + buffer * layer.parameters
    at_first = in_progress if rank.accumulates else 0
    phases = [
        Phase(at_first, start + before, activations.others),
        Phase(at_first, forward + after, activations.forward),
        Phase(at_first, output.parameters * (1 + buffer) + after, activations.loss),
        Phase(at_first, of_output + after, activations.output),
        Phase(at_first, of_output - output.parameters + reduced_output + after, activations.saved),
        Phase(in_progress, last + before, activations.others),
    ]
    trained = [each for each in parameters if each.requires_grad]
    # fsdp2 reduces the gradients of the output layer first, and the root's gradients when activations are freed.
    complete = rank.stored_bytes(_those_in(trained, outputs))
    ends = {id(each) for each in _those_in(trained, [*modules, *embeddings, *outputs])}
    of_root = rank.stored_bytes(each for each in trained if id(each) not in ends)
    of_backbone = gradients - complete
    for share, peak in activations.backward:
        of_layers = int(share * of_backbone)
        is_first = of_layers < layer.reduced // rank.num_shards
        gathered = backward + (reduced_output if is_first else reduced_layer)
        kept = int(share * before + (1 - share) * after)
        present = complete + min(of_layers, of_backbone - of_root)
        phases.append(Phase(in_progress if rank.accumulates else present, gathered + kept, peak))
    return [replace(each, gathered=each.gathered + root.parameters) for each in phases]


def _those_in(parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> Parameters:
    inside = {id(parameter) for module in modules for parameter in module.parameters()}
    return [parameter for parameter in parameters if id(parameter) in inside]


def _group(rank: RankParts, parameters: Sequence[nn.Parameter], some: Parameters) -> _Group:
    """The bytes of a module with *some* of the *parameters* of a rank."""
    gathered = {id(each) for each in parameters}
    is_alone = rank.num_shards == 1 and not rank.recipe.config.distributed.cpu_offload
    if is_alone and rank.dtype is not None:
        # On one rank, fsdp2 only casts.
        gathered = {id(each) for each in parameters if each.dtype != rank.dtype}
    those = [each for each in some if id(each) in gathered]
    trained = [each for each in those if each.requires_grad]
    return _Group(
        rank.computed_bytes(those, rank.dtype),
        rank.computed_bytes(trained, rank.dtype),
        # As in parallelize: gradients are summed over the ranks in float32.
        rank.computed_bytes(trained, torch.float32 if rank.dtype else None),
    )


_RUNTIME_BYTES = 30 * 10**6
"""What a process on a CPU allocates for threads, kernels and data after its start."""
_CONTEXT_BYTES = 600 * 2**20
"""A process's share of a GPU before the first tensor: the CUDA context, and the workspace of matrix products."""
_COMMUNICATION_BYTES = 2**30
"""The buffers of NCCL on a rank that communicates with others."""


@dataclass(frozen=True, slots=True)
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
        activations: Activations | None = Activations()
        if traces is not None:
            activations = estimate_activations(rank, traces, number)
        found.append(_of_rank(rank, parameters, process, activations))
    return max(found, key=lambda memory: memory.total)


def _of_rank(
    rank: RankParts,
    parameters: Sequence[nn.Parameter],
    process: int,
    activations: Activations | None,
) -> Memory:
    """The memory of a rank with the stages of *parameters*."""
    recipe = rank.recipe
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
    if recipe.config.distributed.cpu_offload:
        state = Memory(0, 0, process)
    temporary = int(_bytes_of_optimizer_step(rank, trained) * share)
    phases = phases_of(rank, parameters, activations or Activations(), temporary)
    peaks = [replace(state, **asdict(phase)) for phase in phases]
    memory = max(peaks, key=lambda peak: peak.total)
    if recipe.config.distributed.cpu_offload:
        memory = replace(memory, gradients=0)
    return memory if activations is not None else replace(memory, activations=None)


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
