"""The report about a device that is out of memory: what was computed, how large it was, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from automodel_ckpt.base.units import size_text
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import DeviceMemoryError
from automodel_ckpt.parallel.mesh import RankLayout

_NUM_HINTS = 3


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device: all, those of this process's tensors, those that its allocator keeps, and free ones."""

    total: int
    allocated: int
    reserved: int
    free: int

    def __str__(self) -> str:
        parts = [f"{size_text(self.total)} in total, {size_text(self.allocated)} in tensors"]
        if self.reserved > self.allocated:
            parts.append(f"{size_text(self.reserved - self.allocated)} kept by PyTorch")
        others = self.total - self.reserved - self.free
        # The CUDA context of this process is part of the rest.
        if others > 0:
            parts.append(f"{size_text(others)} in other processes and CUDA itself")
        return ", ".join(parts)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of *device*; None for a CPU, and if CUDA does not answer."""
    if device.type != "cuda":
        return None
    try:
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        return DeviceMemory(total, allocated, torch.cuda.memory_reserved(device), free)
    except RuntimeError:
        return None


@dataclass(frozen=True)
class Situation:
    """What the report needs of a run. *model* and *optimizer* are None while they are built."""

    config: RecipeConfig
    layout: RankLayout
    model: nn.Module | None = None
    optimizer: Optimizer | None = None


@contextmanager
def reporting_out_of_memory(
    doing: str, situation: Situation, micro_batches: Sequence[Mapping[str, torch.Tensor]] = ()
) -> Iterator[None]:
    """Raise :class:`DeviceMemoryError` if the device runs out of memory inside the context.

    *doing* states when, such as ``in step 7``; *micro_batches* are those that were computed.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        layout = situation.layout
        hints = [f"\n          {hint}" for hint in hints_for(situation.config, layout.world_size)]
        raise DeviceMemoryError(
            f"the device ran out of memory {doing}",
            where=f"rank {layout.rank}, {layout.device}",
            value="; ".join(_values(error, situation, micro_batches)),
            hint="add the first of these that you can accept, then run the same command:"
            + "".join(hints),
        ) from error


def _values(
    error: Exception, situation: Situation, micro_batches: Sequence[Mapping[str, torch.Tensor]]
) -> Iterator[str]:
    """Yield the parts of the message about sizes."""
    if micro_batches:
        shapes = [micro_batch["labels"].shape for micro_batch in micro_batches]
        longest = max(shape[-1] for shape in shapes)
        largest = max(shape.numel() for shape in shapes)
        size = situation.config.step_scheduler.local_batch_size
        yield f"longest row {longest:,} tokens, largest micro-batch {largest:,} tokens, local_batch_size {size}"
    if situation.model is not None:
        yield f"forecast without activations {_state_text(situation.model, situation.optimizer)}"
    memory = memory_of(situation.layout.device)
    if memory is not None:
        yield f"memory {memory}"
    lines = str(error).splitlines()
    if lines:
        # PyTorch's message continues with statistics and advice.
        sentences = lines[0].split(". ")
        yield f"PyTorch: {'. '.join(sentences[:2])[:200]}"


def _state_text(model: nn.Module, optimizer: Optimizer | None) -> str:
    """The bytes of this rank's weights, gradients and optimizer state."""
    weights = _nbytes(model.parameters())
    trained = _nbytes(p for p in model.parameters() if p.requires_grad)
    text = f"weights {size_text(weights)}, gradients {size_text(trained)}"
    if optimizer is None:
        return text
    state = _nbytes(value for entry in optimizer.state.values() for value in entry.values())
    if not state and "betas" in optimizer.defaults:
        # Adam and its relatives have two moments, which the first step creates.
        state = 2 * trained
    return f"{text}, optimizer {size_text(state)}"


def _nbytes(values: Any) -> int:
    """The bytes of this rank's shards of the tensors in *values*."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            total += local.numel() * local.element_size()
    return total


def hints_for(config: RecipeConfig, num_ranks: int) -> list[str]:
    """Three changes that need less memory, the least expensive first, as options to paste after ``ckpt-train``."""
    hints = [*_smaller_batches(config), *_recomputation(config), *_sharding(config, num_ranks)]
    if config.peft is None:
        hints.append("--peft.r=16  (train LoRA adapters instead of all weights: a new run)")
    hints.append("--dry-run  (trains nothing: forecasts the memory of a rank)")
    return hints[:_NUM_HINTS]


def _smaller_batches(config: RecipeConfig) -> Iterator[str]:
    size = config.step_scheduler.local_batch_size
    if size > 1:
        smaller = size // _smallest_factor(size)
        yield f"--step_scheduler.local_batch_size={smaller}  (the same global batches, in more micro-batches)"
    elif config.packed_sequence is not None:
        half = config.packed_sequence.size // 2
        yield f"--packed_sequence.size={half}  (shorter rows; no sample may be longer)"


def _smallest_factor(number: int) -> int:
    factor = 2
    while number % factor:
        factor += 1
    return factor


def _recomputation(config: RecipeConfig) -> Iterator[str]:
    if isinstance(config.model, Target):
        return
    if config.model.activation_checkpointing not in (True, "full"):
        yield "--model.activation_checkpointing=true  (computes activations again: about a third more time)"


def _sharding(config: RecipeConfig, num_ranks: int) -> Iterator[str]:
    section = config.distributed
    if num_ranks > 1 and section.strategy == "ddp":
        yield "--distributed.strategy=fsdp2  (shards weights, gradients and optimizer state)"
    elif num_ranks == 1 and torch.cuda.device_count() > 1:
        yield "--nproc-per-node=2 --distributed.strategy=fsdp2  (shards the model among more GPUs)"
    if not section.cpu_offload and section.strategy != "ddp":
        yield "--distributed.strategy=fsdp2 --distributed.cpu_offload=true  (keeps the state in host memory: slow)"
