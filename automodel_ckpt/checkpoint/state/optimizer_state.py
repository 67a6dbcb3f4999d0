"""Containers in an optimizer's state, entries created late, and values that PyTorch would not load unchanged.

A checkpoint stores an optimizer's state flat, by text names. What names cannot express about its containers (keys that
are not text, empty containers, lists) is stored in one more value, the *forms*: a copy of each entry with None in
place of its leaves.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.formats.planning import DTYPES
from automodel_ckpt.checkpoint.manifest import Tree
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.state.storable import check_safe
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

FORMS = "forms"
"""The key beside ``state`` and ``param_groups``: forms by (one of these, FQN or number), in a tuple, which DCP keeps
whole."""
_MAPPINGS = (dict, OrderedDict, Counter)
_HANDED_OVER = (torch.Tensor, bool, int, float, complex, type(None))
_ABSENT = object()
_OF_ALL = ".state.*."

Forms = Mapping[tuple[str, Any], Any]
Place = tuple[Any, Any]
"""A container, and the key or index of a value in it."""


def places(root: Any, prefix: str = "") -> dict[str, Place]:
    """The position of each value in a tree of containers, by the flat name that DCP's planner gives it.

    Raises :class:`RecipeError` where two values have the same name.
    """
    found: dict[str, Place] = {}
    for key, value in _items(root):
        name = f"{prefix}.{key}" if prefix else str(key)
        inner = places(value, name) if _is_container(value) else {name: (root, key)}
        if doubled := inner.keys() & found.keys():
            raise RecipeError(
                "two values in the state of an optimizer have the same name",
                where=min(doubled),
                value=f"the key {key!r}",
                hint="use keys that differ as text, without dots",
            )
        found |= inner
    return found


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    items: Iterable[tuple[Any, Any]] = (
        container.items() if isinstance(container, Mapping) else enumerate(container)
    )
    return items


def _is_container(value: Any) -> bool:
    """Whether DCP looks into a value; any other stays whole."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(
        isinstance(e, torch.Tensor) or _is_container(e) for e in value
    )


# ---------------------------------------------------------------- save


def forms_of(state: Mapping[str, Any]) -> dict[tuple[str, Any], Any]:
    """The forms of ``state`` and ``param_groups`` that flat names cannot express.

    Raises :class:`RecipeError` where two values have the same flat name.
    """
    entries = [(("state", fqn), entry) for fqn, entry in state["state"].items()]
    entries += [
        (("param_groups", index), group) for index, group in enumerate(state["param_groups"])
    ]
    odd = [(place, entry) for place, entry in entries if _is_odd(entry)]
    for place, entry in odd:
        places(entry, ".".join(map(str, place)))
    return {place: _form(entry) for place, entry in odd}


def _is_odd(entry: Mapping[Any, Any]) -> bool:
    return any(type(key) is not str or _is_container(value) for key, value in entry.items())


def _form(value: Any) -> Any:
    """The form of a value. A container of unknown type is kept, so that the check of unsafe values names it."""
    if not _is_container(value):
        return None
    if type(value) in _MAPPINGS:
        return type(value)({key: _form(inner) for key, inner in value.items()})
    return [_form(inner) for inner in value] if type(value) is list else value


def digests_of_own(name: str, optimizer: Optimizer) -> dict[str, str]:
    """Digests of what an optimizer stores unsharded for sharded parameters, by entry name, over all parameters.

    It is stored once, so it must be the same on all ranks (:func:`check_consistent`).
    """
    hashed: dict[str, Any] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if isinstance(parameter, DTensor):
            for key, value in optimizer.state.get(parameter, {}).items():
                if key != "step" and not isinstance(value, DTensor):
                    hashed.setdefault(f"{name}{_OF_ALL}{key}", xxhash.xxh3_128()).update(
                        _digest(name, value)
                    )
    return {key: digest.hexdigest() for key, digest in hashed.items()}


def _digest(name: str, value: Any) -> bytes:
    if not _is_container(value):
        return check_safe(name, value).encode()
    return b"".join(
        check_safe(name, container[key]).encode()
        for container, key in places(value).values()
        if not isinstance(container[key], DTensor)
    )


def check_consistent(digests: Sequence[Mapping[str, str]]) -> None:
    """Raise :class:`RecipeError` where the results of :func:`digests_of_own` differ between ranks."""
    for key, digest in digests[0].items():
        if _OF_ALL in key and any(theirs.get(key) != digest for theirs in digests):
            raise RecipeError(
                "an optimizer keeps different state on each rank for sharded parameters",
                where=key,
                value="it differs between the ranks",
                hint="compute it from the whole parameter (a DTensor), "
                "or do not shard it (distributed.strategy: ddp)",
            )


# ---------------------------------------------------------------- load


def forms_in(value: Any) -> Forms:
    """The forms from the value saved under :data:`FORMS`; empty for any other value."""
    forms = value[0] if type(value) is tuple and len(value) == 1 else None
    return (
        forms
        if isinstance(forms, dict) and all(isinstance(form, dict) for form in forms.values())
        else {}
    )


class StateAllocator:
    """Allocates a target in *state* of the optimizer *name* for each value of *tree*.

    *parameters* are those that it trains, by FQN. Entries that the tree lacks are kept and reported by the later
    check.
    """

    def __init__(
        self, name: str, tree: Tree, forms: Forms, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._name, self._tree, self._forms, self._parameters = name, tree, forms, parameters

    def allocate_in(self, state: dict[str, Any]) -> None:
        """Add the targets. Raises :class:`CheckpointUnusable` where it is unknown how a value was sharded."""
        for index, group in enumerate(state["param_groups"]):
            if (form := self._forms.get(("param_groups", index))) is not None:
                group.update(self._rebuilt(form, group, f"{self._name}.param_groups.{index}", None))
        for fqn, names in self._names().items():
            entry = state["state"][fqn] = dict(state["state"].get(fqn, {}))
            place, parameter = f"{self._name}.state.{fqn}", self._parameters[fqn]
            if (form := self._forms.get(("state", fqn))) is not None:
                entry.update(self._rebuilt(form, entry, place, parameter))
                continue
            here = places(entry, place)
            for name in names:
                container, key = here.get(name) or (entry, name.removeprefix(f"{place}."))
                container[key] = self._leaf(_at(container, key), name, parameter)

    def _names(self) -> dict[str, list[str]]:
        """The names of the tree's values in the state of each parameter, by FQN."""
        found: dict[str, list[str]] = {
            fqn: [] for fqn in self._parameters if ("state", fqn) in self._forms
        }
        start = f"{self._name}.state."
        for name in (*self._tree.tensors, *self._tree.objects):
            rest = name.removeprefix(start) if name.startswith(start) else ""
            ends = (
                end
                for end, letter in enumerate(rest)
                if letter == "." and rest[:end] in self._parameters
            )
            if (end := next(ends, None)) is not None:
                found.setdefault(rest[:end], []).append(name)
        return found

    def _rebuilt(self, form: Any, made: Any, name: str, parameter: torch.Tensor | None) -> Any:
        if isinstance(form, Mapping):
            inner = {
                key: self._rebuilt(f, _at(made, key), f"{name}.{key}", parameter)
                for key, f in form.items()
            }
            kind: Callable[[Any], Any] = type(form)
            return kind(inner)
        if isinstance(form, list):
            return [
                self._rebuilt(f, _at(made, i), f"{name}.{i}", parameter) for i, f in enumerate(form)
            ]
        return self._leaf(_ABSENT if _is_container(made) else made, name, parameter)

    def _leaf(self, made: Any, name: str, parameter: torch.Tensor | None) -> Any:
        """The target that a value is read into; a placeholder for a value that is not a tensor."""
        stored = self._tree.tensors.get(name)
        if stored is None or isinstance(made, torch.Tensor):
            return None if made is _ABSENT else made
        return _empty_leaf(stored, parameter)


def _at(container: Any, key: Any) -> Any:
    if isinstance(container, Mapping):
        return container.get(key, _ABSENT)
    return container[key] if isinstance(container, list) and key < len(container) else _ABSENT


def _empty_leaf(stored: Tensor, parameter: torch.Tensor | None) -> torch.Tensor:
    """A tensor for *stored*: like its parameter where the shapes are equal, else unsharded.

    Raises :class:`CheckpointUnusable` for a sharded parameter of another shape.
    """
    dtype = DTYPES[stored.dtype]
    if parameter is None:
        return torch.zeros(stored.shape, dtype=dtype)
    if stored.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and stored.shape:
        raise CheckpointUnusable(
            "an optimizer creates state of a different shape than the parameter's after its first step",
            where=stored.fqn,
            value=f"{list(stored.shape)}, of a sharded parameter of {list(parameter.shape)}",
            hint="create it in the first step(), so that a resume knows how it is sharded",
        )
    return torch.zeros(stored.shape, dtype=dtype, device=parameter.device)


def load_read_state(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    parameters: Mapping[str, torch.Tensor],
    load: Callable[[Mapping[str, Any]], None],
) -> None:
    """Call *load* with the state, then restore the values exactly as read.

    PyTorch's own ``load_state_dict`` damages text and arrays, and casts tensors to the dtype of their parameter.
    """
    if (
        "load_state_dict" in vars(optimizer)
        or type(optimizer).load_state_dict is not Optimizer.load_state_dict
    ):
        load(state)
        return
    given = {
        fqn: {k: v for k, v in entry.items() if isinstance(v, _HANDED_OVER)}
        for fqn, entry in state["state"].items()
    }
    load({**state, "state": given})
    for fqn, entry in state["state"].items():
        if (held := optimizer.state.get(parameters[fqn])) is not None:
            read = {
                key: value if _is_changed(key, value, held) else held[key]
                for key, value in entry.items()
            }
            made = {key: value for key, value in held.items() if key not in read}
            held.clear()
            held.update(read | made)


def _is_changed(key: Any, value: Any, held: Mapping[Any, Any]) -> bool:
    """Whether an entry is not what was read; of a step PyTorch knows which type its own optimizers want."""
    return key not in held or (
        isinstance(value, torch.Tensor) and key != "step" and held[key].dtype != value.dtype
    )
