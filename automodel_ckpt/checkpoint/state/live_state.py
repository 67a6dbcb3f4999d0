"""The live state of a save, read without state dicts, to reuse the plan of the previous save.

PyTorch makes a state dict in milliseconds per hundred tensors, and planning a save takes as long again. Both depend
only on names, shapes, dtypes and placements, which rarely change in a run. A save therefore inspects the live objects
first: where their signature (the signature) is unchanged, the plan of the previous save is valid for their present
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint.discovery import Item
from automodel_ckpt.checkpoint.module_tensors import (
    stored_layout,
    stored_names,
    stored_values,
    unwrap,
)
from automodel_ckpt.checkpoint.state.optimizer_names import trained_by_all

_SCALARS = (type(None), bool, int, float, complex, str)


@dataclass(slots=True)
class LiveState:
    """*trees*: by tree, every value under the flat name that it has in DCP's plan; *signature*: what a plan depends on,
    to be compared with ``==``."""

    trees: dict[str, dict[str, Any]] = field(default_factory=dict)
    signature: list[Any] = field(default_factory=list)

    def matches(self, trees: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether the live state equals *trees*, the planned flat state dicts, in names, values and memory."""
        if self.trees.keys() != trees.keys():
            return False
        pairs = [(self.trees[name], tree) for name, tree in trees.items()]
        return all(
            mine.keys() == theirs.keys()
            and all(_is_same(mine[name], theirs[name]) for name in mine)
            for mine, theirs in pairs
        )


@torch.no_grad()
def inspect_state(items: Iterable[Item], *, save_optimizer: bool) -> LiveState:
    """Inspect the present state of *items* without copying.

    Raises what their state dicts raise, and :class:`KeyError` where an optimizer trains parameters of no module in
    *items*.
    """
    found, names = LiveState(), dict[int, str]()
    items = list(items)
    for item in items:
        found.signature.append((item.name, item.kind, item.scope, item.aliases, item.owner))
        if item.kind == "module":
            state = unwrap(item.value).state_dict(keep_vars=True)
            layout = stored_layout(item.value)
            kept, tied = stored_names(item.value, state, state.items(), layout)
            found.trees[item.name] = stored_values(state, kept, layout)
            found.signature += (kept, tied, [_spec(value) for value in state.values()])
            for key, value in state.items():
                names.setdefault(id(value), f"{item.name.replace('.', '%')}.{key}")
    for item in items:
        if item.kind == "optimizer" and save_optimizer:
            tree = dict(_optimizer_tree(item, names)) | dict(_schedules(item, items))
            found.trees[item.name] = tree
            found.signature.append(
                [(name, _spec(value, nested=True)) for name, value in tree.items()]
            )
    return found


def _optimizer_tree(item: Item, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    for parameter, entry in item.value.state.items():
        path = f"{item.name}.state.{names[id(parameter)]}"
        for key, value in entry.items():
            yield f"{path}.{key}", value
    whole = trained_by_all(item.value)
    for index, group in enumerate(item.value.param_groups):
        mine = (names[id(parameter)] for parameter in group["params"])
        shown = {**group, "params": list(mine if whole is None else whole[index])}
        for key, value in shown.items():
            yield f"{item.name}.param_groups.{index}.{key}", value


def _schedules(item: Item, items: Iterable[Item]) -> Iterator[tuple[str, Any]]:
    return (
        (other.name, (other.value.state_dict(),)) for other in items if other.owner == item.name
    )


def _spec(value: Any, *, nested: bool = False) -> Any:
    """What a plan depends on; of a value that DCP would look into (*nested*), something that equals nothing."""
    if isinstance(value, DTensor):
        local = value.to_local()
        return (
            type(value),
            value.dtype,
            value.shape,
            local.shape,
            value.placements,
            value.device_mesh,
        )
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape
    if nested and isinstance(value, list) and all(isinstance(element, str) for element in value):
        return tuple(value)
    return type(value) if not nested or isinstance(value, (*_SCALARS, tuple)) else object()


def _is_same(mine: Any, theirs: Any) -> bool:
    if not isinstance(mine, torch.Tensor):
        return bool(mine == theirs)
    if not isinstance(theirs, torch.Tensor) or isinstance(mine, DTensor) != isinstance(
        theirs, DTensor
    ):
        return False
    one, other = (
        value.to_local() if isinstance(value, DTensor) else value for value in (mine, theirs)
    )
    same_memory = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return same_memory and one.dtype == other.dtype and one.shape == other.shape
