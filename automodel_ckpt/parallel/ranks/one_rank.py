"""FSDP2 on a mesh of one rank, where it gathers and reduces nothing: it only casts parameters and gradients.

torch casts each parameter into new memory, and copies the result to where the gathered parameter is. It casts the
gradients of a group into a buffer, copies that instead of reducing it, and adds the copy to the gradients of earlier
micro-batches. Here, a parameter is cast with one copy, and the gradient of a first micro-batch, too. Those of later
ones are added without one. For an 8B model in bfloat16 with float32 weights, this saves 128 GB of memory traffic in a
first micro-batch and 192 GB in a later one: 30 and 45 ms of a GPU with 4.3 TB/s. All values stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from automodel_ckpt.parallel.ranks.group_types import sharded_groups


def cast_without_copies(model: nn.Module) -> None:
    """Let *model*, which fsdp2 has sharded over one rank, cast parameters and gradients with one copy each."""
    for _module, group in sharded_groups(model):
        for parameter in group.fsdp_params:
            if type(parameter) is FSDPParam:
                parameter.__class__ = _CastParameter
        # fsdp2 calls it when the gradients of the group are complete.
        group.post_backward = partial(_keep_gradients, group, group.post_backward)


@torch.no_grad()
def _keep_gradients(group: Any, reduce: Callable[..., None], *arguments: Any) -> None:
    """Turn the gradients of gathered parameters into the shards' gradients. *reduce* does this with all that remain.

    All of it runs on the stream of the backward pass, so memory needs no synchronization.
    """
    taken: list[tuple[_CastParameter, Tensor, bool]] = []
    # As by default.
    only_sums = group.gradient_divide_factor is None and group._all_reduce_hook is None
    if group.reduce_grads and only_sums:
        for parameter in group.fsdp_params:
            if isinstance(parameter, _CastParameter) and parameter.has_plain_gradient():
                taken.append((parameter, *parameter.take_gradient()))
    # It also frees the gathered parameters: gradients may reuse their memory.
    reduce(*arguments)
    taken.reverse()
    while taken:
        # The next copy may need the memory that this gradient frees.
        _keep_gradient(*taken.pop())


def _keep_gradient(parameter: _CastParameter, gradient: Tensor, is_owned: bool) -> None:
    shard = parameter.sharded_param
    if shard.grad is None:
        if not is_owned or gradient.dtype != shard.dtype:
            # Always a copy: what autograd gives may be the memory of a CUDA graph, which the next step overwrites.
            gradient = gradient.to(shard.dtype, copy=True, memory_format=torch.contiguous_format)
        shard.grad = parameter.to_sharded_dtensor(gradient)
        return
    if not _is_exact(gradient.dtype, shard.dtype):
        # As fsdp2 rounds it: the addition would be computed in the wider type.
        gradient = gradient.to(shard.dtype)
    total: Any = shard.grad
    total._local_tensor += gradient


def _is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether *target* can represent all values of *source*."""
    return torch.promote_types(source, target) == target


class _CastParameter(FSDPParam):
    """A parameter that is cast while it is copied into the memory of the gathered parameter, and its gradient."""

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """What fsdp2 copies into the gathered parameter, which has the dtype of computation from the first time on."""
        shard = self._sharded_local_tensor
        is_plain = not self.offload_to_cpu and not hasattr(shard, "fsdp_pre_all_gather")
        if is_plain and self.all_gather_outputs and self.sharded_state == ShardedState.SHARDED:
            return [self._sharded_param_data]
        return super().all_gather_inputs

    def has_plain_gradient(self) -> bool:
        """Whether there is a gradient that has only to be cast and added."""
        # It is set when the parameter is gathered for the first time.
        if not hasattr(self, "_unsharded_param"):
            return False
        if self.offload_to_cpu or self.sharded_param._post_accumulate_grad_hooks:
            return False
        gradient = self.unsharded_accumulated_grad
        if gradient is None:
            gradient = self.unsharded_param.grad
        if gradient is None:
            return False
        return self.reduce_dtype is None or _is_exact(gradient.dtype, self.reduce_dtype)

    def take_gradient(self) -> tuple[Tensor, bool]:
        """The gradient of the gathered parameter, which loses it, and whether its memory is only this parameter's."""
        self.accumulate_unsharded_grad_if_needed()
        accumulated = self.unsharded_accumulated_grad
        if accumulated is None:
            gradient = self.unsharded_grad_data
            self.unsharded_param.grad = None
            return gradient, False
        # The sum of micro-batches that fsdp2 has not reduced, in memory of the type of reductions.
        gradient = self.unsharded_accumulated_grad_data
        self.unsharded_accumulated_grad = None
        return gradient, type(gradient) is Tensor and gradient.is_contiguous()
