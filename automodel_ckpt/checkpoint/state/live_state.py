"""The live state of a save, read without state dicts, to reuse the plan of the previous save.

PyTorch makes a state dict in milliseconds per hundred tensors, and planning a save takes as long again. Both depend
only on names, shapes, dtypes and placements, which rarely change in a run. A save therefore inspects the live objects
first: if their signature is unchanged, the plan of the previous save is valid for their present
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint.formats.description import local_tensor
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.state.module_tensors import (
    stored_layout,
    stored_names,
    stored_values,
    unwrap,
)
from automodel_ckpt.checkpoint.state.optimizer_names import trained_by_all

_SCALARS = (type(None), bool, int, float, complex, str)


@dataclass(slots=True)
class LiveState:
    """The values of a rank's state without copies.

    *trees* has, by tree, every value under the flat name that it has in DCP's plan. *signature* is what a plan depends
    on, to be compared with ``==``.
    """

    trees: dict[str, dict[str, Any]] = field(default_factory=dict)
    signature: list[Any] = field(default_factory=list)

    def matches(self, trees: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether the live state equals *trees*, the planned flat state dicts, in names, values and memory."""
        if self.trees.keys() != trees.keys():
            return False
        for name, planned in trees.items():
            live = self.trees[name]
            if live.keys() != planned.keys():
                return False
            if not all(_is_same(live[key], planned[key]) for key in live):
                return False
        return True


@torch.no_grad()
def inspect_state(items: Iterable[Item], *, save_optimizer: bool) -> LiveState:
    """Inspect the present state of *items* without copying.

    Raises what their state dicts raise, and :class:`KeyError` where an optimizer trains parameters of no module in
    *items*.
    """
    found = LiveState()
    fqns: dict[int, str] = {}
    items = list(items)
    for item in items:
        found.signature.append((item.name, item.kind, item.scope, item.aliases, item.owner))
        if item.kind == "module":
            # keep_vars: without it, the values are detached copies whose ids are not the
            # parameters'.
            state = unwrap(item.value).state_dict(keep_vars=True)
            layout = stored_layout(item.value)
            names, tied = stored_names(item.value, state, state.items(), layout)
            found.trees[item.name] = stored_values(state, names, layout)
            found.signature += (names, tied, [_spec(value) for value in state.values()])
            # As in Owners: module names may not contain dots.
            prefix = item.name.replace(".", "%")
            for key, value in state.items():
                # A tied parameter keeps its first name, which named_parameters gives it in Owners.
                fqns.setdefault(id(value), f"{prefix}.{key}")
    for item in items:
        if item.kind == "optimizer" and save_optimizer:
            tree = dict(_optimizer_tree(item, fqns))
            for other in items:
                if other.owner == item.name:
                    # In a tuple, as in `optimizer_tree`: the names and values are compared with
                    # that tree.
                    tree[other.name] = (other.value.state_dict(),)
            found.trees[item.name] = tree
            specs = [(name, _spec(value, nested=True)) for name, value in tree.items()]
            found.signature.append(specs)
    return found


def _optimizer_tree(item: Item, fqns: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """The values of an optimizer by flat name; *fqns* has the FQN of each parameter by its id."""
    for parameter, entry in item.value.state.items():
        path = f"{item.name}.state.{fqns[id(parameter)]}"
        for key, value in entry.items():
            yield f"{path}.{key}", value
    trained = trained_by_all(item.value)
    for index, group in enumerate(item.value.param_groups):
        names = [fqns[id(parameter)] for parameter in group["params"]]
        if trained is not None:
            names = list(trained[index])
        for key, value in {**group, "params": names}.items():
            yield f"{item.name}.param_groups.{index}.{key}", value


def _spec(value: Any, *, nested: bool = False) -> Any:
    """Return what a plan depends on; for a value that DCP would flatten (*nested*), an object that equals no other."""
    if isinstance(value, DTensor):
        return (
            type(value),
            value.dtype,
            value.shape,
            local_tensor(value).shape,
            value.placements,
            value.device_mesh,
            value.requires_grad,
        )
    if isinstance(value, torch.Tensor):
        # Frozen parameters are stored in other files.
        return type(value), value.dtype, value.shape, value.requires_grad
    if not nested:
        return type(value)
    if isinstance(value, list) and all(isinstance(element, str) for element in value):
        return tuple(value)
    if isinstance(value, (*_SCALARS, tuple)):
        return type(value)
    return object()


def _is_same(live: Any, planned: Any) -> bool:
    """Whether two values are equal; for tensors, whether they are the same memory."""
    if not isinstance(live, torch.Tensor):
        return bool(live == planned)
    if not isinstance(planned, torch.Tensor):
        return False
    if isinstance(live, DTensor) != isinstance(planned, DTensor):
        return False
    one, other = local_tensor(live), local_tensor(planned)
    same_memory = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return same_memory and one.dtype == other.dtype and one.shape == other.shape
