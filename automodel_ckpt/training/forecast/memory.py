"""The memory of a rank at the peak of a step: exact for parameters and optimizer, traced for activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from automodel_ckpt.checkpoint import discover
from automodel_ckpt.checkpoint.parts.discovery import classify
from automodel_ckpt.checkpoint.saving.forecast import forecast_bytes
from automodel_ckpt.logs.metrics import PeakMemory
from automodel_ckpt.models.pipeline_stage import parameters_of_stages
from automodel_ckpt.training.forecast.activations import Activations, estimate_activations
from automodel_ckpt.training.forecast.model_traces import Traces
from automodel_ckpt.training.forecast.phases import phases_of
from automodel_ckpt.training.forecast.rank_parts import RankParts, nbytes
from automodel_ckpt.training.measure.weight_average import average_bytes

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
