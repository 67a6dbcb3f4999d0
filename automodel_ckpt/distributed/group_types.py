"""The data types of parameters that fsdp2 shards together."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from automodel_ckpt.errors import RecipeError

_SHOWN = 3


def check_group_types(module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> None:
    """Raise :class:`RecipeError` if trained parameters of the group that fsdp2 makes of *module* have different types.

    torch raises an error in the first forward pass only. If a probe catches it, the layers of the group get no
    gradients after it (torch 2.15). *ignored* parameters belong to no group.
    """
    by_type: dict[torch.dtype, list[str]] = defaultdict(list)
    for name, parameter in _parameters_of_group(module).items():
        if parameter.requires_grad and parameter not in ignored:
            by_type[parameter.dtype].append(name)
    if len(by_type) < 2:
        return
    usual = max(by_type, key=lambda dtype: len(by_type[dtype]))
    others = {dtype: names for dtype, names in by_type.items() if dtype != usual}
    parts = [f"{_name(usual)} for {len(by_type[usual])}"]
    patterns: list[str] = []
    for dtype, names in others.items():
        parts.append(f"{_name(dtype)} for {len(names)} ({', '.join(names[:_SHOWN])})")
        patterns += [f"*.{'.'.join(name.split('.')[-2:])}" for name in names[:_SHOWN]]
    raise RecipeError(
        "fsdp2 cannot shard trained parameters of different types together",
        where="model.dtype",
        value=f"{', '.join(parts)} of the parameters of {type(module).__name__}",
        hint="set model.dtype to float32 and distributed.mixed_precision to bfloat16, which computes in bfloat16, or "
        f"freeze the others: --model.freeze='{json.dumps(patterns)}'",
    )


def _parameters_of_group(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of *module* by name, without those of modules in it that are sharded already."""
    inner = {
        parameter
        for part in module.modules()
        if isinstance(part, FSDPModule)
        for parameter in part.parameters()
    }
    return {name: each for name, each in module.named_parameters() if each not in inner}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
