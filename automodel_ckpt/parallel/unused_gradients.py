"""Gradients of parameters that only some ranks use in a step, such as experts that get no token elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import is_bw

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.ranks import agree

_ONE_EXPERT = re.compile(r"\bexperts\.(expert_)?\d+\.")
_KNOWN_PACKAGES = frozenset(
    {
        "abc",
        "automodel_ckpt",
        "bitsandbytes",
        "builtins",
        "collections",
        "peft",
        "torch",
        "torchao",
        "transformers",
        "typing",
    }
)
"""The packages with modules that use the same parameters for each batch, apart from what :func:`may_vary` names."""
_TAG = 7301


class UnusedGradients:
    """Gives the parameters of a model sharded by fsdp2 that a backward pass does not reach gradients of zeros.

    fsdp2 reduces the gradients that a rank has in one buffer, without their names. If ranks use different parameters,
    it adds gradients of different parameters, without an error where their sizes are equal. (torch 2.13 has
    ``set_reduce_scatter_unused_params`` for that. It does not show which parameters no rank has used.)
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, *, in_stages: bool = False
    ) -> None:
        """*group* are all ranks: one rank changes nothing. With *in_stages*, they have different parameters, and cannot
        agree on those that none has used: a model is changed only if :func:`may_vary`."""
        self._group = group
        self._must_agree = not in_stages
        self._may_vary = may_vary(model)
        self._parameters: list[Any] = []
        """fsdp2's descriptions of the trained parameters, in the same order on all ranks."""
        self._is_used: list[bool] = []
        """Whether a backward pass on this rank has reached each of them since :meth:`remove` was called."""
        if agree.size(group) == 1 or (in_stages and not self._may_vary):
            return
        from automodel_ckpt.parallel.ranks.group_types import sharded_groups

        for _module, sharded in sharded_groups(model):
            self._watch(sharded)

    def _watch(self, sharded: Any) -> None:
        first = len(self._parameters)
        for parameter in sharded.fsdp_params:
            if parameter.sharded_param.requires_grad:
                self._parameters.append(parameter)
                self._is_used.append(False)
        numbers = range(first, len(self._parameters))
        # fsdp2 calls it when the gradients of the group are complete.
        sharded.post_backward = partial(self._fill, sharded, numbers, sharded.post_backward)

    def _fill(
        self, sharded: Any, numbers: range, reduce: Callable[..., None], *arguments: Any
    ) -> None:
        if sharded.reduce_grads:
            for number in numbers:
                parameter = self._parameters[number]
                # It is set when the ranks gather the parameters of the group for the first time.
                if not hasattr(parameter, "_unsharded_param"):
                    continue
                gathered = parameter.unsharded_param
                if gathered.grad is not None or parameter.unsharded_accumulated_grad is not None:
                    self._is_used[number] = True
                else:
                    gathered.grad = torch.zeros_like(gathered)
            _in_one_type([self._parameters[number] for number in numbers])
        reduce(*arguments)

    def remove(self) -> None:
        """Remove the gradients of the parameters that no rank has used since the last call.

        The optimizer leaves these parameters unchanged, as on one rank. Called on all ranks after the backward passes
        of a step. It is a collective in the first step, and afterwards if a rank did not use a parameter in the first
        step, or if :func:`may_vary`.
        """
        is_used = self._is_used
        self._is_used = [False] * len(is_used)
        if not self._must_agree or not is_used:
            return
        is_unused = [not each for each in is_used]
        flags = agree.on_any_rank(self._group, [*is_used, *is_unused])
        used_somewhere, unused_somewhere = flags[: len(is_used)], flags[len(is_used) :]
        self._must_agree = self._may_vary or any(unused_somewhere)
        for parameter, keeps_gradient in zip(self._parameters, used_somewhere, strict=True):
            if not keeps_gradient:
                parameter.sharded_param.grad = None


def _in_one_type(parameters: list[Any]) -> None:
    """Give the gradients of the last micro-batch the type of those that fsdp2 has summed over earlier micro-batches.

    fsdp2 sums in the type of reductions, which is float32 where a model computes in bfloat16, and raises an error if
    it has sums of only some parameters of a group.
    """
    if all(each.unsharded_accumulated_grad is None for each in parameters):
        return
    for parameter in parameters:
        has_gathered = hasattr(parameter, "_unsharded_param")
        if has_gathered and parameter.unsharded_accumulated_grad is None:
            parameter.to_accumulated_grad_if_needed()


def may_vary(model: nn.Module) -> bool:
    """Whether it may depend on the batch which trained parameters of *model* have a gradient.

    True for experts that are modules each, for LongT5 with transient-global attention (its global blocks need long
    rows), and for modules of packages that are not known.
    """
    config = getattr(model, "config", None)
    if getattr(config, "encoder_attention_type", None) == "transient-global":
        return True
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and _ONE_EXPERT.search(name):
            return True
    return is_of_unknown_packages(model)


def is_of_unknown_packages(model: nn.Module) -> bool:
    """Whether *model* has modules of packages that are not known: of the user, or of a repository."""
    # fsdp2 and peft derive classes from the model's classes.
    classes = {each for module in model.modules() for each in type(module).__mro__}
    packages = {each.__module__.partition(".")[0] for each in classes}
    return not packages <= _KNOWN_PACKAGES


def check_call_order(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Let each forward pass for training compare the calls of the layers of *model* that fsdp2 shards with the calls of
    other ranks. A rank raises when its neighbor in *group* calls another layer: :class:`RecipeError`.

    fsdp2 gathers a layer when it is called. If a rank leaves it out (layer drop, branches, early exits), the next layer
    that it gathers is mixed with this one if their sizes are equal, without an error. If ranks gather different numbers
    of layers, they wait for each other forever. Only models with modules of packages that are not known are checked:
    each call sends a number to the next rank and receives one, which takes as long with many ranks.
    """
    if agree.size(group) == 1 or not isinstance(model, FSDPModule):
        return
    if not is_of_unknown_packages(model):
        return
    rank, size = dist.get_rank(group), agree.size(group)
    before, after = (rank - 1) % size, (rank + 1) % size

    def compare(name: str, number: int, *_: Any) -> None:
        # A backward pass calls layers again to recompute their activations.
        if not torch.is_grad_enabled() or is_bw():
            return
        theirs = torch.empty(1, dtype=torch.int64)
        sending = dist.isend(torch.tensor([number]), group=group, group_dst=after, tag=_TAG)
        dist.recv(theirs, group=group, group_src=before, tag=_TAG)
        if sending is not None:
            sending.wait()
        if int(theirs) == number:
            return
        other = names[int(theirs)]
        raise RecipeError(
            "ranks call different layers of the model in the same step, which fsdp2 does not support",
            where="distributed.strategy",
            value=f"rank {rank} calls {name}, and rank {before} calls {other}",
            hint="call each layer on each rank (also layers that the batch does not need), or set "
            "distributed.strategy to ddp",
        )

    names: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and name:
            hook: Any = torch.compiler.disable(partial(compare, name, len(names)))  # type: ignore[no-untyped-call]
            # Before fsdp2's hook, which gathers.
            module.register_forward_pre_hook(hook, prepend=True)  # type: ignore[attr-defined]
            names.append(name)
    names.append("no further layer")
    hook = torch.compiler.disable(partial(compare, names[-1], len(names) - 1))  # type: ignore[no-untyped-call]
    model.register_forward_hook(hook)
