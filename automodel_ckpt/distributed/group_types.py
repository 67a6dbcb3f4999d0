"""The data types of parameters that fsdp2 shards together."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from automodel_ckpt.distributed.model_layers import separate_ends, untied_layers
from automodel_ckpt.errors import RecipeError

_SHOWN = 3


def check_group_types(model: nn.Module, ignored: Collection[torch.dtype] = ()) -> None:
    """Raise :class:`RecipeError` if trained parameters of a group that fsdp2 will make of *model* have different types.

    The groups are those of :mod:`.parallelize`, which does not check this, since it also shards models that are only
    saved and loaded. torch raises an error in the first forward pass. If a probe catches it, the layers of the group
    get no gradients after it (torch 2.15). Parameters of the types *ignored* belong to no group.
    """
    embeddings, heads = separate_ends(model)
    grouped: set[nn.Parameter] = set()
    for module in (*untied_layers(model), *embeddings, *heads, model):
        group = {name: each for name, each in module.named_parameters() if each not in grouped}
        grouped.update(group.values())
        by_type: dict[torch.dtype, list[str]] = defaultdict(list)
        for name, parameter in group.items():
            if parameter.requires_grad and parameter.dtype not in ignored:
                by_type[parameter.dtype].append(name)
        if len(by_type) > 1:
            raise _error(type(module).__name__, by_type)


def _error(name: str, by_type: Mapping[torch.dtype, Sequence[str]]) -> RecipeError:
    usual = max(by_type, key=lambda dtype: len(by_type[dtype]))
    parts = [f"{_name(usual)} for {len(by_type[usual])}"]
    patterns: list[str] = []
    for dtype, names in by_type.items():
        if dtype != usual:
            parts.append(f"{_name(dtype)} for {len(names)} ({', '.join(names[:_SHOWN])})")
            patterns += [f"*.{'.'.join(name.split('.')[-2:])}" for name in names[:_SHOWN]]
    return RecipeError(
        "fsdp2 cannot shard trained parameters of different types together",
        where="model.dtype",
        value=f"{', '.join(parts)} of the parameters of {name}",
        hint="set model.dtype to float32 and distributed.mixed_precision to bfloat16, which computes in bfloat16, or "
        f"freeze the others: --model.freeze='{json.dumps(patterns)}'",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
