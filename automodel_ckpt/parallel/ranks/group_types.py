"""Parameters of several data types that fsdp2 shards together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from automodel_ckpt.errors import RecipeError


def divide_groups_by_type(model: nn.Module, kept: Collection[int] = ()) -> None:
    """Let the groups that fsdp2 has made of *model* contain parameters of several types.

    fsdp2 gathers a group in one type, and raises an error in the first forward pass if it contains trained parameters
    of several. Parameters with ids in *kept* are gathered in the type in which they are stored. Gradients are reduced
    once for each type. Nothing changes for a group of one type.
    """
    for _module, group in sharded_groups(model):
        by_type: dict[tuple[torch.dtype, bool], list[Any]] = defaultdict(list)
        for parameter in group.fsdp_params:
            sharded = parameter.sharded_param
            # Bytes of quantized weights are never cast.
            is_kept = id(sharded) in kept or not sharded.is_floating_point()
            by_type[sharded.dtype, is_kept].append(parameter)
        if len(by_type) > 1 or any(is_kept for _, is_kept in by_type):
            _DividedGroup(group, by_type)


def sharded_groups(model: nn.Module) -> Iterator[tuple[FSDPModule, Any]]:
    """(module, fsdp2's group of its parameters) of each module in *model* that has such a group."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group: Any = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            yield module, group


def check_gathered_types(model: nn.Module) -> None:
    """Raise :class:`RecipeError` if a forward pass of *model* has converted a parameter that fsdp2 gathers.

    A conversion gives the gathered parameter other memory. fsdp2 does not see that: it would gather later values into
    the former memory, and the model would compute with the first ones in all steps.
    """
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    for _module, group in sharded_groups(model):
        for parameter in group.fsdp_params:
            sharded = parameter.sharded_param
            # It is set when the parameter is gathered for the first time.
            gathered = getattr(parameter, "_unsharded_param", None)
            # Tensors of torchao are gathered in types that they choose.
            has_type = hasattr(sharded.to_local(), "fsdp_post_all_gather")
            if gathered is None or has_type or not sharded.is_floating_point():
                continue
            expected = parameter.param_dtype or sharded.dtype
            if gathered.dtype == expected:
                continue
            place = parameter._module_info
            name = f"{prefixes[id(place.module)]}{place.param_name}"
            raise RecipeError(
                "the model converts a parameter in its forward pass, which fsdp2 does not support",
                where="distributed.strategy",
                value=f"fsdp2, {name}: from {expected} to {gathered.dtype}",
                hint="convert the layer where the model is built, or set distributed.strategy to ddp",
            )


@dataclass(frozen=True)
class _Reduction:
    """Parameters with gradients that are reduced together, and the types that fsdp2 has for this."""

    parameters: list[Any]
    original: torch.dtype | None
    reduced: torch.dtype | None


class _DividedGroup:
    """A group of fsdp2 with parameters of several types. Replaces two methods of the group."""

    def __init__(self, group: Any, by_type: Mapping[tuple[torch.dtype, bool], list[Any]]) -> None:
        self._group = group
        self._parts: list[tuple[list[Any], MixedPrecisionPolicy]] = []
        for (_, is_kept), parameters in by_type.items():
            policy = MixedPrecisionPolicy() if is_kept else group.mp_policy
            self._parts.append((parameters, policy))
        self._reductions: list[_Reduction] = []
        self._init_types, self._reduce = group._init_mp_dtypes, group.post_backward
        group._init_mp_dtypes = self._init_types_of_parts
        group.post_backward = self._reduce_parts

    def _init_types_of_parts(self) -> None:
        group = self._group
        everything, policy = group.fsdp_params, group.mp_policy
        self._reductions = []
        frozen: list[Any] = []
        for parameters, part_policy in self._parts:
            group.fsdp_params, group.mp_policy = parameters, part_policy
            self._init_types()
            trained = [each for each in parameters if each.sharded_param.requires_grad]
            frozen += [each for each in parameters if not each.sharded_param.requires_grad]
            if trained:
                reduction = _Reduction(trained, group._orig_dtype, group._reduce_dtype)
                self._reductions.append(reduction)
        group.fsdp_params, group.mp_policy = everything, policy
        # A reduction waits for the one before, so the largest is last.
        self._reductions.sort(
            key=lambda reduction: sum(each.sharded_param.numel() for each in reduction.parameters)
        )
        if self._reductions:
            self._reductions[-1].parameters.extend(frozen)

    def _reduce_parts(self, *arguments: Any) -> None:
        group = self._group
        everything = group.fsdp_params
        before = group._sharded_state, group._training_state
        for reduction in self._reductions:
            group.fsdp_params = reduction.parameters
            group._orig_dtype, group._reduce_dtype = reduction.original, reduction.reduced
            # Each call frees the gathered parameters that it sees, and changes the state of the group.
            group._sharded_state, group._training_state = before
            self._reduce(*arguments)
        group.fsdp_params = everything
        if not self._reductions:
            self._reduce(*arguments)
