"""Gradients of parameters that only some ranks use in a step, such as experts that get no token elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from automodel_ckpt.parallel.ranks import agree
from automodel_ckpt.parallel.ranks.group_types import sharded_groups

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
"""The packages whose modules use the same parameters for each batch, apart from those that :func:`may_vary` names."""


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
                self._fill_one(number)
            _in_one_type([self._parameters[number] for number in numbers])
        reduce(*arguments)

    def _fill_one(self, number: int) -> None:
        parameter = self._parameters[number]
        # It is set when the ranks gather the parameters of the group for the first time.
        if not hasattr(parameter, "_unsharded_param"):
            return
        gathered = parameter.unsharded_param
        if gathered.grad is not None or parameter.unsharded_accumulated_grad is not None:
            self._is_used[number] = True
        else:
            gathered.grad = torch.zeros_like(gathered)

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

    True for experts that are modules each, for LongT5 with transient-global attention, whose global blocks need long
    rows, and for modules of packages that are not known.
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
    # fsdp2 and peft derive classes from those of the model.
    classes = {each for module in model.modules() for each in type(module).__mro__}
    packages = {each.__module__.partition(".")[0] for each in classes}
    return not packages <= _KNOWN_PACKAGES
