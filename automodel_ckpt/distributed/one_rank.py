"""FSDP2 on a mesh of one rank, where it gathers and reduces nothing: it only casts parameters and gradients.

torch casts each parameter into new memory and copies the result to where the gathered parameter is, and copies the
cast gradients of a group once more instead of reducing them. For an 8B model in bfloat16 with float32 weights, these
copies are 128 GB per micro-batch, about 30 ms of a GPU with 4.3 TB/s. They are left out here. All values stay the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from automodel_ckpt.distributed.group_types import sharded_groups


def cast_without_copies(model: nn.Module) -> None:
    """Let *model*, which fsdp2 has sharded over one rank, cast parameters and gradients with one copy each."""
    for module, group in sharded_groups(model):
        module.set_custom_reduce_scatter(_InPlace())
        for parameter in group.fsdp_params:
            if type(parameter) is FSDPParam:
                parameter.__class__ = _CastParameter


class _CastParameter(FSDPParam):
    """A parameter whose values are cast while they are copied into the memory of the gathered parameter."""

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        """What fsdp2 copies into the gathered parameter, which has the dtype of computation from the first time on."""
        shard = self._sharded_local_tensor
        is_plain = not self.offload_to_cpu and not hasattr(shard, "fsdp_pre_all_gather")
        if is_plain and self.all_gather_outputs and self.sharded_state == ShardedState.SHARDED:
            return [self._sharded_param_data]
        return super().all_gather_inputs


class _InPlace(ReduceScatter):
    """The reduction over one rank: its result is in the memory of its input."""

    def __init__(self) -> None:
        # Weak: a reduction that failed before its output was allocated has freed its input. If the next one took this
        # for its own, later ones would overwrite gradients.
        self._input: Callable[[], torch.Tensor | None] = _nothing

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Called twice for each reduction: for its input and, on the stream of the reduction, for its output."""
        given, self._input = self._input(), _nothing
        if given is None or (tuple(given.shape), given.dtype) != (tuple(size), dtype):
            memory = torch.empty(*size, dtype=dtype, device=device)
            self._input = weakref.ref(memory)
            return memory
        if given.is_cuda:
            # It belongs to the stream of the backward pass. If the gradient is added to an earlier one, its memory is
            # freed while this stream may still read it.
            given.record_stream(torch.cuda.current_stream(given.device))
        return given

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce nothing. torch does not call it for one rank (2.10 to 2.14)."""
        assert output_tensor is input_tensor


def _nothing() -> None:
    return None
