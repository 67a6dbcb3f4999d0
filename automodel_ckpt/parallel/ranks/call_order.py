"""Whether all ranks call the same sharded layers in the same order, as fsdp2 needs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import is_bw

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.ranks import agree
from automodel_ckpt.parallel.unused_gradients import is_of_unknown_packages

_END = -1
_TAG = 7301


def check_call_order(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Let each forward pass for training compare the calls of the layers of *model* that fsdp2 shards with those of
    other ranks. A rank whose neighbor in *group* calls another layer raises :class:`RecipeError`.

    fsdp2 gathers a layer when it is called. If a rank leaves it out (layer drop, branches, early exits), the next layer
    that it gathers is mixed with this one if their sizes are equal, without an error. If ranks gather different numbers
    of layers, they wait for each other forever. Only models with modules of packages that are not known are checked:
    each call sends a number to the next rank and receives one, which takes as long with many ranks.
    """
    if agree.size(group) == 1 or not isinstance(model, FSDPModule):
        return
    if is_of_unknown_packages(model):
        _CallOrder(model, group)


class _CallOrder:
    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._group = group
        rank, size = dist.get_rank(group), agree.size(group)
        self._rank, self._before, self._next = rank, (rank - 1) % size, (rank + 1) % size
        self._names: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and name:
                self._watch(name, module)  # type: ignore[arg-type]
        model.register_forward_hook(self._hook(_END))

    def _watch(self, name: str, module: nn.Module) -> None:
        number = len(self._names)
        self._names.append(name)
        # Before fsdp2's hook, which gathers.
        module.register_forward_pre_hook(self._hook(number), prepend=True)

    def _hook(self, number: int) -> Any:
        def compare(*_: Any) -> None:
            # A backward pass calls layers again whose activations it recomputes.
            if torch.is_grad_enabled() and not is_bw():
                self._compare(number)

        return torch.compiler.disable(compare)  # type: ignore[no-untyped-call]

    def _compare(self, number: int) -> None:
        mine, theirs = torch.tensor([number]), torch.empty(1, dtype=torch.int64)
        sending = dist.isend(mine, group=self._group, group_dst=self._next, tag=_TAG)
        dist.recv(theirs, group=self._group, group_src=self._before, tag=_TAG)
        if sending is not None:
            sending.wait()
        other = int(theirs)
        if other == number:
            return
        raise RecipeError(
            "ranks call different layers of the model in the same step, which fsdp2 does not support",
            where="distributed.strategy",
            value=f"rank {self._rank} {self._what(number)}, and rank {self._before} {self._what(other)}",
            hint="call each layer on each rank (also layers that the batch does not need), or set "
            "distributed.strategy to ddp",
        )

    def _what(self, number: int) -> str:
        return "calls no further layer" if number == _END else f"calls {self._names[number]}"
