"""What an optimizer stores: flat entries under names that every strategy and world size shares, some created late.

A checkpoint stores an optimizer's state flat, by text names. Containers of tensors within it are rejected, and values
that PyTorch would not load unchanged. Its LR schedulers use the same names.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts, ValueDict, Values
from automodel_ckpt.checkpoint.formats.description import DTYPES, is_sharded
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.parts.tree import Tree
from automodel_ckpt.checkpoint.state.module_tensors import has_plain_names, unwrap, without_memory
from automodel_ckpt.checkpoint.state.storable import check_safe
from automodel_ckpt.errors import RecipeError, unusable

log = logging.getLogger("automodel_ckpt")

_OF_ALL = ".state.*."

Location = tuple[dict[str, Any], str]
"""A mapping, and the key of a value in it."""


def locations(name: str, state: ValueDict) -> dict[str, Location]:
    """Return the position of each value in the state of the optimizer *name*, by the flat name that DCP gives it.

    The other entries of *state* belong to LR schedulers. The parameter lists of groups are left out.
    """
    found = {key: (state, key) for key in state if key != name}
    for prefix, entry in _entries(name, state[name]):
        for key in entry:
            if key != "params":
                found[f"{prefix}.{key}"] = (entry, key)
    return found


def check_flat(name: str, state: Values) -> None:
    """Raise :class:`RecipeError` for values in the state of the optimizer *name* that flat names cannot express."""
    for prefix, entry in _entries(name, state):
        for key, value in entry.items():
            if key == "params":
                continue
            if type(key) is not str or "." in key or _is_container(value):
                raise RecipeError(
                    "an optimizer's state cannot be stored: it is not flat",
                    where=f"{prefix}.{key}",
                    value=f"the key {key!r}, {type(value).__module__}.{type(value).__qualname__}",
                    hint="keep tensors, numbers, text and tuples under text keys without dots, or leave the state out "
                    "(checkpoint.save_optimizer: false)",
                )


def _entries(name: str, state: Values) -> Iterator[tuple[str, ValueDict]]:
    """Yield the entries of all parameters and groups, each with the prefix of its flat names."""
    for fqn, entry in state["state"].items():
        yield f"{name}.state.{fqn}", entry
    for number, group in enumerate(state["param_groups"]):
        yield f"{name}.param_groups.{number}", group


def _is_container(value: Any) -> bool:
    """Whether DCP flattens a value: a mapping, or a list with a tensor in it. It stores other values as one."""
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list):
        return False
    # Must agree with traverse_state_dict of torch.distributed.checkpoint (2.13), which flattens the
    # state: a different answer gives names that no saved value has.
    return any(isinstance(element, torch.Tensor) or _is_container(element) for element in value)


def digests_of_own(name: str, optimizer: Optimizer) -> TextDict:
    """Digests of what an optimizer stores unsharded for sharded parameters, by entry name, over all parameters.

    It is stored once, so it must be the same on all ranks (:func:`check_consistent`).
    """
    hashes = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if not is_sharded(parameter):
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if key == "step" or is_sharded(value):
                continue
            entry = f"{name}{_OF_ALL}{key}"
            if entry not in hashes:
                hashes[entry] = xxhash.xxh3_128()
            hashes[entry].update(check_safe(name, value).encode())
    return {entry: hashed.hexdigest() for entry, hashed in hashes.items()}


def check_consistent(digests: Sequence[Texts]) -> None:
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


def allocate_late_entries(
    name: str, tree: Tree, state: ValueDict, parameters: Mapping[str, torch.Tensor]
) -> None:
    """Add targets to *state* of the optimizer *name* for the entries of *tree* that it does not have yet.

    *parameters* are those that it trains, by FQN. Entries that the tree lacks are kept and reported by the later check.
    Raises :class:`CheckpointUnusable` where it is unknown how a value was sharded.
    """
    entries = {}
    for fqn, key in saved_entries(name, (*tree.tensors, *tree.objects)):
        if fqn not in parameters:
            continue
        if fqn not in entries:
            # A copy: the mapping may be the optimizer's own.
            entries[fqn] = dict(state["state"].get(fqn, {}))
        entry, stored = entries[fqn], tree.tensors.get(f"{name}.state.{fqn}.{key}")
        if stored is None:
            entry.setdefault(key, None)
        elif not isinstance(entry.get(key), torch.Tensor):
            entry[key] = _empty_leaf(stored, parameters[fqn])
    state["state"].update(entries)


def saved_entries(name: str, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (parameter, entry) of the flat *keys* that are in the state of the optimizer *name*."""
    prefix = f"{name}.state."
    for key in keys:
        if key.startswith(prefix):
            # The name of an entry has no dots.
            fqn, _, entry = key.removeprefix(prefix).rpartition(".")
            yield fqn, entry


def _empty_leaf(stored: Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor for *stored*: like its parameter where the shapes are equal, else unsharded.

    Raises :class:`CheckpointUnusable` for a sharded parameter of another shape.
    """
    dtype = DTYPES[stored.dtype]
    if stored.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if is_sharded(parameter) and stored.shape:
        raise unusable(
            "it is not known how to shard this state of an optimizer, which does not have the parameter's shape",
            stored.fqn,
            f"{list(stored.shape)}, of a sharded parameter of {list(parameter.shape)}",
            "set distributed.strategy to ddp, which shards nothing (torch.optim.Adafactor needs that); an "
            "optimizer of your own can also create the state in its first step()",
        )
    return torch.zeros(stored.shape, dtype=dtype, device=parameter.device)


def load_read_state(
    optimizer: Optimizer,
    state: Values,
    parameters: Mapping[str, torch.Tensor],
    load: Callable[[Values], None],
) -> None:
    """Give *optimizer* its *state*; *load* calls its ``load_state_dict`` with such a state.

    ``Optimizer.load_state_dict`` damages text and arrays, and casts tensors to the dtype of their parameter. Therefore,
    it gets only the groups, and the entries are set as they were read. An optimizer with its own ``load_state_dict``,
    or with hooks of it, gets all values.
    """
    is_overridden = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    is_overridden = is_overridden or "load_state_dict" in vars(optimizer)
    # accelerate's class has its own method, and no hooks.
    if is_overridden or (
        optimizer._optimizer_load_state_dict_pre_hooks
        or optimizer._optimizer_load_state_dict_post_hooks
    ):
        load(state)
        return
    load({**state, "state": {}})
    for fqn, entry in state["state"].items():
        if fqn in parameters:
            optimizer.state[parameters[fqn]] = entry
    # As torch loads them: fused and capturable steps read the counters on the device of the parameters.
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") or group.get("capturable") else ():
            entry = optimizer.state.get(parameter, {})
            if isinstance(entry.get("step"), torch.Tensor):
                entry["step"] = entry["step"].to(parameter.device, torch.float32)
    # The end of a load by torch: it adds options of later versions, and makes tensors of steps that are numbers.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


# ---------------------------------------------------------------- names


Groups = list[dict[str, torch.Tensor]]
"""For each of an optimizer's parameter groups, {FQN: a tensor without memory} of what it trains."""


def trained_by_all(optimizer: Optimizer) -> Groups | None:
    """Return the parameters that all ranks train together, if their optimizers train different ones; else None.

    The names are as in :class:`Owners`. The recipe stores them in the optimizer's attribute ``whole``.
    """
    return getattr(optimizer, "whole", None)


class Owners:
    """The recipe's modules as children of one module, so that FQNs of an optimizer over several are unambiguous.

    ``model.layers.0.weight`` of the attribute ``model`` is ``model.model.layers.0.weight`` here.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self.root = nn.Module()
        for item in items:
            if item.kind == "module":
                # Names of submodules cannot contain dots.
                self.root.add_module(item.name.replace(".", "%"), item.value)

    def optimizer_state(self, item: Item) -> ValueDict:
        """``{"state": {fqn: {...}}, "param_groups": [...]}``; where there is no state at all, it is created first.

        The groups name what all ranks train, the state is this rank's.
        """
        self.check_parameters(item)
        state = self._state_dict(item.value)
        trained = trained_by_all(item.value)
        if trained is not None:
            for group, names in zip(state["param_groups"], trained, strict=False):
                group["params"] = list(names)
        return state

    def _state_dict(self, optimizer: Optimizer) -> ValueDict:
        """The result of PyTorch's ``get_optimizer_state_dict``, which is slow with thousands of parameters (see
        :func:`has_plain_names`)."""
        modules = {name: unwrap(module) for name, module in self.root.named_children()}
        if not optimizer.state or not all(map(has_plain_names, modules.values())):
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            return dict(get_optimizer_state_dict(self.root, optimizer))
        fqns: dict[int, str] = {}
        for prefix, module in modules.items():
            for name, parameter in module.named_parameters():
                # PyTorch also uses the first name of a tied parameter.
                fqns.setdefault(id(parameter), f"{prefix}.{name}")
        names = []
        for group in optimizer.param_groups:
            names += [fqns[id(parameter)] for parameter in group["params"]]
        with torch.no_grad():
            numbered = optimizer.state_dict()
        state = {names[number]: entry for number, entry in numbered["state"].items()}
        groups = []
        for group in numbered["param_groups"]:
            groups.append({**group, "params": [names[number] for number in group["params"]]})
        return {"state": state, "param_groups": groups}

    def groups(self, item: Item) -> Groups:
        """What each parameter group of this rank's optimizer trains."""
        fqns = {id(parameter): fqn for fqn, parameter in self.root.named_parameters()}
        return [
            {fqns[id(p)]: without_memory(p) for p in group["params"]}
            for group in item.value.param_groups
        ]

    def parameters(self, item: Item, state: Values) -> dict[str, torch.Tensor]:
        """The parameters of this rank's optimizer by FQN; *state* is the result of :meth:`optimizer_state`."""
        found: dict[str, torch.Tensor] = {}
        groups = item.value.param_groups
        for fqns, group in zip(self._names_here(item, state), groups, strict=True):
            found.update(zip(fqns, group["params"], strict=True))
        return found

    def set_optimizer_state(self, item: Item, state: Values) -> None:
        """Give the optimizer a *state* of the form that :meth:`optimizer_state` returns. A parameter without an entry
        has no state afterwards.

        PyTorch's ``set_optimizer_state_dict`` is not used: it allows at most one group without parameters, and a
        pipeline stage may have several.
        """
        groups = []
        trained_here = set()
        names_here = self._names_here(item, state)
        for options, names in zip(state["param_groups"], names_here, strict=True):
            groups.append({**options, "params": list(names)})
            trained_here.update(names)
        entries = {fqn: entry for fqn, entry in state["state"].items() if fqn in trained_here}
        item.value.load_state_dict({"state": entries, "param_groups": groups})

    def _names_here(self, item: Item, state: Values) -> list[list[str]]:
        """FQNs of what each group of this rank's optimizer trains; *state* is what :meth:`optimizer_state` gave."""
        if trained_by_all(item.value) is not None:
            return [list(names) for names in self.groups(item)]
        return [group["params"] for group in state["param_groups"]]

    def check_parameters(self, item: Item) -> None:
        """Raise :class:`RecipeError` where an optimizer trains a parameter that belongs to no module of the recipe."""
        in_modules = {id(parameter) for parameter in self.root.parameters()}
        shapes = []
        for group in item.value.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in in_modules:
                    shapes.append(tuple(parameter.shape))
        if shapes:
            raise RecipeError(
                "an optimizer trains parameters of a module that is not part of the saved state",
                where=f"attribute {item.name!r}",
                value=f"{len(shapes)} parameter(s), the first of shape {list(shapes[0])}",
                hint="add their module to the state (an attribute of a recipe), so that it is saved too",
            )


def optimizer_tree(
    item: Item, items: Iterable[Item], owners: Owners, *, create: bool = False
) -> ValueDict:
    """The state of an optimizer and of its LR schedulers, by attribute name.

    The state of a scheduler is in a tuple, which DCP stores whole (it would turn the integer keys of a MultiStepLR into
    text). A parameter that was never updated has no state, unless *create* is true.
    """
    tree: ValueDict = {item.name: {}}
    for other in items:
        if other.owner == item.name:
            tree[other.name] = (other.value.state_dict(),)
    state = None
    if create:
        with _state_creation(item):
            state = owners.optimizer_state(item)
    if state is None:
        with _no_state_creation(item.value):
            state = owners.optimizer_state(item)
    if not create:
        check_flat(item.name, state)
    tree[item.name] = state
    return tree


@contextmanager
def _no_state_creation(optimizer: Optimizer) -> Iterator[None]:
    """Prevent PyTorch from creating missing optimizer state: it would do so by a step, which counts."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or not parameters:
        yield
        return
    # PyTorch creates state only for an optimizer without any.
    optimizer.state[parameters[0]] = {}
    try:
        yield
    finally:
        del optimizer.state[parameters[0]]


@contextmanager
def _state_creation(item: Item) -> Iterator[None]:
    """Let PyTorch create the state of all parameters in the block.

    It creates state for all parameters or for none, and for none where one has a gradient. A gradient would belong to
    weights other than those that are read. It creates state by a step with a closure, which not every optimizer
    accepts. A step that fails ends the block, and leaves the optimizer without state. The steps of LBFGS (needs losses)
    and SparseAdam (needs sparse gradients) fail.
    """
    optimizer = item.value
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if len(optimizer.state) < len(trained):
        optimizer.state.clear()
        for parameter in trained:
            parameter.grad = None
    rates = [{"lr": group["lr"]} if "lr" in group else {} for group in optimizer.param_groups]
    step = optimizer.step
    # LR schedulers replace step on the instance; what they have set must be restored.
    instance_step = vars(optimizer).get("step")
    arguments = inspect.signature(step).parameters.values()
    if not any(a.name == "closure" or a.kind is a.VAR_KEYWORD for a in arguments):
        # torch 2.13 calls step(closure=None) to create the state.
        optimizer.step = lambda closure: step()
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        log.debug("%s has no state before the load: %r", item.name, error)
        optimizer.state.clear()
        # PyTorch has set both before the step.
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group.update(rate)
        for parameter in trained:
            parameter.grad = None
    finally:
        vars(optimizer).pop("step", None)
        if instance_step is not None:
            optimizer.step = instance_step
