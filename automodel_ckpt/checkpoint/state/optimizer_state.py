"""What an optimizer stores: flat entries, some created late, and values that PyTorch would not load unchanged.

A checkpoint stores an optimizer's state flat, by text names. Containers of tensors within it are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts, ValueDict, Values
from automodel_ckpt.checkpoint.formats.description import DTYPES, is_sharded
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.parts.tree import Tree
from automodel_ckpt.checkpoint.state.storable import check_safe
from automodel_ckpt.errors import RecipeError, unusable

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
            "it is not known how to shard this state of an optimizer, whose shape is not that of the parameter",
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
