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
from torch.optim import Adam, AdamW, Optimizer

from automodel_ckpt.checkpoint.formats.planning import DTYPES
from automodel_ckpt.checkpoint.parts.manifest import Tree
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.state.storable import check_safe
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

FORMS = "forms"
"""The key beside ``state`` and ``param_groups``: forms by (one of these, FQN or number), in a tuple, which DCP keeps
whole."""
_MAPPINGS = (dict, OrderedDict, Counter)
# Values that Optimizer.load_state_dict loads unchanged, or only moves and casts.
_LOADED_BY_TORCH = (torch.Tensor, bool, int, float, complex, type(None))
_ABSENT = object()
_OF_ALL = ".state.*."

Forms = Mapping[tuple[str, Any], Any]
Location = tuple[Any, Any]
"""A container, and the key or index of a value in it."""


def locations(root: Any, prefix: str = "") -> dict[str, Location]:
    """The position of each value in a tree of containers, by the flat name that DCP's planner gives it.

    Raises :class:`RecipeError` where two values have the same name.
    """
    found: dict[str, Location] = {}
    for key, value in _items(root):
        name = f"{prefix}.{key}" if prefix else str(key)
        inner = {name: (root, key)}
        if _is_container(value):
            inner = locations(value, name)
        duplicates = inner.keys() & found.keys()
        if duplicates:
            raise RecipeError(
                "two values in the state of an optimizer have the same name",
                where=min(duplicates),
                value=f"the key {key!r}",
                hint="use keys that differ as text, without dots",
            )
        found |= inner
    return found


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, Mapping):
        return container.items()
    return enumerate(container)


def _is_container(value: Any) -> bool:
    """Whether DCP flattens a value: a mapping, or a list with a tensor in it. It stores other values as one."""
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list):
        return False
    # Must agree with traverse_state_dict of torch.distributed.checkpoint (2.13), which flattens the
    # state: a different answer gives names that no saved value has.
    return any(isinstance(element, torch.Tensor) or _is_container(element) for element in value)


# ---------------------------------------------------------------- save


def forms_of(state: Mapping[str, Any]) -> dict[tuple[str, Any], Any]:
    """The forms of ``state`` and ``param_groups`` that flat names cannot express.

    Raises :class:`RecipeError` where two values have the same flat name.
    """
    entries: dict[tuple[str, Any], Any] = {}
    for fqn, entry in state["state"].items():
        entries["state", fqn] = entry
    for index, group in enumerate(state["param_groups"]):
        entries["param_groups", index] = group
    forms: dict[tuple[str, Any], Any] = {}
    for path, entry in entries.items():
        if _needs_form(entry):
            locations(entry, ".".join(map(str, path)))  # raises for equal names
            forms[path] = _form(entry)
    return forms


def _needs_form(entry: Mapping[Any, Any]) -> bool:
    """Whether flat names cannot express an entry: it has keys that are not text, or containers."""
    return any(type(key) is not str or _is_container(value) for key, value in entry.items())


def _form(value: Any) -> Any:
    """The form of a value. A container of unknown type is kept, so that the check of unsafe values names it."""
    if not _is_container(value):
        return None
    if type(value) in _MAPPINGS:
        return type(value)({key: _form(inner) for key, inner in value.items()})
    if type(value) is list:
        return [_form(inner) for inner in value]
    return value


def digests_of_own(name: str, optimizer: Optimizer) -> dict[str, str]:
    """Digests of what an optimizer stores unsharded for sharded parameters, by entry name, over all parameters.

    It is stored once, so it must be the same on all ranks (:func:`check_consistent`).
    """
    hashes: dict[str, Any] = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if key == "step" or isinstance(value, DTensor):
                continue
            entry = f"{name}{_OF_ALL}{key}"
            if entry not in hashes:
                hashes[entry] = xxhash.xxh3_128()
            hashes[entry].update(_digest(name, value))
    return {entry: hashed.hexdigest() for entry, hashed in hashes.items()}


def _digest(name: str, value: Any) -> bytes:
    """The digest of a value; of a container the digests of all values in it that are not sharded."""
    if not _is_container(value):
        return check_safe(name, value).encode()
    digests: list[str] = []
    for container, key in locations(value).values():
        if not isinstance(container[key], DTensor):
            digests.append(check_safe(name, container[key]))
    return "".join(digests).encode()


def has_digests_of_own(name: str, digests: Mapping[str, str]) -> bool:
    """Whether there are any of :func:`digests_of_own` for the optimizer *name* among the *digests* of a rank."""
    return any(key.startswith(f"{name}{_OF_ALL}") for key in digests)


def check_consistent(digests: Sequence[Mapping[str, str]]) -> None:
    """Raise :class:`RecipeError` where the results of :func:`digests_of_own` differ between ranks."""
    for key, digest in digests[0].items():
        if _OF_ALL not in key:
            continue
        if any(of_rank.get(key) != digest for of_rank in digests):
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
    # The file is not trusted: any plain value may have this name.
    if type(value) is not tuple or len(value) != 1:
        return {}
    forms = value[0]
    if not isinstance(forms, dict):
        return {}
    return forms if all(isinstance(form, dict) for form in forms.values()) else {}


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
            form = self._forms.get(("param_groups", index))
            if form is not None:
                prefix = f"{self._name}.param_groups.{index}"
                group.update(self._rebuild(form, group, prefix, None))
        for fqn, names in self._names_by_parameter().items():
            entry = dict(state["state"].get(fqn, {}))
            state["state"][fqn] = entry
            prefix, parameter = f"{self._name}.state.{fqn}", self._parameters[fqn]
            form = self._forms.get(("state", fqn))
            if form is not None:
                entry.update(self._rebuild(form, entry, prefix, parameter))
                continue
            existing = locations(entry, prefix)
            for name in names:
                new_location = (entry, name.removeprefix(f"{prefix}."))
                container, key = existing.get(name, new_location)
                container[key] = self._leaf(_value_at(container, key), name, parameter)

    def _names_by_parameter(self) -> dict[str, list[str]]:
        """The names of the tree's values in the state of each parameter, by FQN."""
        found: dict[str, list[str]] = {}
        for fqn in self._parameters:
            if ("state", fqn) in self._forms:
                found[fqn] = []
        prefix = f"{self._name}.state."
        for name in (*self._tree.tensors, *self._tree.objects):
            if not name.startswith(prefix):
                continue
            fqn_here = self._parameter_of(name.removeprefix(prefix))
            if fqn_here is not None:
                found.setdefault(fqn_here, []).append(name)
        return found

    def _parameter_of(self, name: str) -> str | None:
        """The parameter whose FQN *name* begins with; both FQNs and the keys that follow may contain dots."""
        end = name.find(".")
        while end >= 0:
            if name[:end] in self._parameters:
                return name[:end]
            end = name.find(".", end + 1)
        return None

    def _rebuild(self, form: Any, existing: Any, name: str, parameter: torch.Tensor | None) -> Any:
        """The containers of *form* with targets in them: the *existing* values where there are any."""
        if isinstance(form, Mapping):
            kind: Callable[[Any], Any] = type(form)
            inner: dict[Any, Any] = {}
            for key, inner_form in form.items():
                value = _value_at(existing, key)
                inner[key] = self._rebuild(inner_form, value, f"{name}.{key}", parameter)
            return kind(inner)
        if isinstance(form, list):
            elements = []
            for index, inner_form in enumerate(form):
                value = _value_at(existing, index)
                elements.append(self._rebuild(inner_form, value, f"{name}.{index}", parameter))
            return elements
        return self._leaf(_ABSENT if _is_container(existing) else existing, name, parameter)

    def _leaf(self, existing: Any, name: str, parameter: torch.Tensor | None) -> Any:
        """The target that a value is read into; a placeholder for a value that is not a tensor."""
        stored = self._tree.tensors.get(name)
        if stored is None or isinstance(existing, torch.Tensor):
            return None if existing is _ABSENT else existing
        return _empty_leaf(stored, parameter)


def _value_at(container: Any, key: Any) -> Any:
    """The value at a key or index of a container; a marker where there is none."""
    if isinstance(container, Mapping):
        return container.get(key, _ABSENT)
    if isinstance(container, list) and key < len(container):
        return container[key]
    return _ABSENT


def _empty_leaf(stored: Tensor, parameter: torch.Tensor | None) -> torch.Tensor:
    """A tensor for *stored*: like its parameter where the shapes are equal, else unsharded.

    Raises :class:`CheckpointUnusable` for a sharded parameter of another shape.
    """
    dtype = DTYPES[stored.dtype]
    if parameter is None:
        return torch.zeros(stored.shape, dtype=dtype, device="cpu")
    if stored.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and stored.shape:
        raise CheckpointUnusable(
            "it is not known how to shard this state of an optimizer, whose shape is not that of the parameter",
            where=stored.fqn,
            value=f"{list(stored.shape)}, of a sharded parameter of {list(parameter.shape)}",
            hint="set distributed.strategy to ddp, which shards nothing (torch.optim.Adafactor needs that); an "
            "optimizer of your own can also create the state in its first step()",
        )
    return torch.zeros(stored.shape, dtype=dtype, device=parameter.device)


def load_read_state(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    parameters: Mapping[str, torch.Tensor],
    load: Callable[[Mapping[str, Any]], None],
) -> None:
    """Call *load* with the state, then restore the values exactly as read.

    ``Optimizer.load_state_dict`` damages text and arrays, and casts tensors to the dtype of their parameter. An
    optimizer with its own ``load_state_dict`` gets all values.
    """
    is_overridden = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    if is_overridden or "load_state_dict" in vars(optimizer):
        load(state)
        return
    leaves_moments = _leaves_moments(optimizer)
    unchanged_steps: frozenset[str] = frozenset()
    # Others may require the step of every parameter (__setstate__).
    if leaves_moments and isinstance(optimizer, Adam | AdamW):
        unchanged_steps = _with_unchanged_steps(state)
    loadable: dict[str, dict[Any, Any]] = {}
    for fqn, entry in state["state"].items():
        of_parameter: dict[Any, Any] = {}
        for key, value in entry.items():
            is_left = leaves_moments and _is_moment(key, value, parameters.get(fqn))
            if isinstance(value, _LOADED_BY_TORCH) and not is_left:
                of_parameter[key] = value
        # Not beside other values: PyTorch expects a step where a parameter has any.
        if fqn in unchanged_steps and _is_only_a_step(of_parameter):
            of_parameter = {}
        loadable[fqn] = of_parameter
    load({**state, "state": loadable})
    for fqn, entry in state["state"].items():
        loaded = optimizer.state.get(parameters[fqn])
        if loaded is None:
            continue
        exact: dict[Any, Any] = {}
        for key, value in entry.items():
            exact[key] = value if _is_changed(key, value, loaded) else loaded[key]
        # The order of the entries is that of the checkpoint, then what the optimizer has added.
        for key, value in loaded.items():
            exact.setdefault(key, value)
        loaded.clear()
        loaded.update(exact)


def _leaves_moments(optimizer: Optimizer) -> bool:
    """Whether ``load_state_dict`` only casts the moments: the optimizer has no hooks, and no method of another library.

    With tens of thousands of tensors, the casts take longer than reading the values.
    """
    hooks = [
        *optimizer._optimizer_load_state_dict_pre_hooks,
        *optimizer._optimizer_load_state_dict_post_hooks,
    ]
    return not hooks and type(optimizer).__setstate__.__module__.startswith("torch.optim.")


def _with_unchanged_steps(state: Mapping[str, Any]) -> frozenset[str]:
    """The parameters whose steps PyTorch would load unchanged, if they are tensors: it casts only those of fused and
    capturable optimizers.

    For each step, it searches the parameters of all groups for its parameter. With 10,000 parameters, that takes longer
    than reading the values.
    """
    found: set[str] = set()
    for group in state["param_groups"]:
        if not group.get("fused") and not group.get("capturable"):
            found.update(group["params"])
    return frozenset(found)


def _is_only_a_step(entry: Mapping[Any, Any]) -> bool:
    return list(entry) == ["step"] and isinstance(entry["step"], torch.Tensor)


def _is_moment(key: Any, value: Any, parameter: torch.Tensor | None) -> bool:
    """Whether a value has the shape and the device of its *parameter*, so that a load could only cast it."""
    if key == "step" or not isinstance(value, torch.Tensor) or parameter is None:
        return False
    return (
        parameter.dim() > 0 and value.shape == parameter.shape and value.device == parameter.device
    )


def _is_changed(key: Any, value: Any, loaded: Mapping[Any, Any]) -> bool:
    """Whether *loaded* has not the value that was read. A step is cast by PyTorch to what its optimizers need."""
    if key not in loaded:
        return True
    if key == "step" or not isinstance(value, torch.Tensor):
        return False
    return bool(loaded[key].dtype != value.dtype)
