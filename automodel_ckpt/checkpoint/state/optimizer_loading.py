"""Load the saved state of optimizers and their LR schedulers, without what only the checkpoint or only the run has.

Parameter groups are matched to the saved ones by the names of their parameters, never by position. A recipe may split
its parameters into more groups than the run that wrote the checkpoint: each group then takes the options of the saved
group that its parameters were in. Every parameter keeps the options that it was trained with, so the resumed run
continues exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.files.type_aliases import Texts, ValueDict, Values
from automodel_ckpt.checkpoint.formats.reading import read_object, read_tree
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.parts.tree import Tree
from automodel_ckpt.checkpoint.state.mismatch import DIVIDED, check_differences, first_lines
from automodel_ckpt.checkpoint.state.module_tensors import (
    Owners,
    entries_of,
    trained_by_all,
)
from automodel_ckpt.checkpoint.state.storable import DTYPES, is_sharded
from automodel_ckpt.checkpoint.store.ranges import VerifiedRanges
from automodel_ckpt.errors import CheckpointUnusable, unusable

log = logging.getLogger("automodel_ckpt")

_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums"}
)
"""Entries of the LR schedulers of torch that hold one value for each parameter group."""
_PARTS = "_schedulers"
"""The schedulers that SequentialLR and ChainedScheduler contain."""
_OF_ALL_SCHEDULES = frozenset({"base_lrs", "last_epoch", "verbose"})


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """*sources* has, for each parameter group of the optimizer *name*, the number of the saved group that it takes the
    options from; None for a new one without parameters. *mismatched* names the groups that cannot be matched."""

    name: str
    sources: tuple[int | None, ...]
    num_saved: int
    mismatched: tuple[str, ...]

    def renumbered(self, tree: Tree) -> Tree:
        """The saved *tree* with each group's options under the number that the group has here.

        The lists of parameters are omitted: the optimizer's own lists are right.
        """
        renumbered = _select(tree, lambda key: not key.startswith(f"{self.name}.param_groups."))
        tensors, objects = dict(renumbered.tensors), dict(renumbered.objects)
        # One saved group may be the source of several groups.
        for number, source in enumerate(self.sources):
            if source is None:
                continue
            saved, here = _prefix(self.name, source), _prefix(self.name, number)
            for name, tensor in tree.tensors.items():
                if name.startswith(saved):
                    new_name = here + name.removeprefix(saved)
                    tensors[new_name] = tensor.renamed(new_name)
            for name, blob in tree.objects.items():
                if name.startswith(saved) and name != f"{saved}params":
                    objects[here + name.removeprefix(saved)] = blob
        return replace(tree, tensors=tensors, objects=objects)

    def schedule_state(self, saved: Values, scheduler: object) -> ValueDict:
        """The *saved* state of an LR scheduler with its values per parameter group in the order of the groups here.

        A new group without parameters keeps what *scheduler* has for it.
        """
        state = dict(saved)
        for key, value in saved.items():
            here: Any = getattr(scheduler, key, None)
            if key in _PER_GROUP:
                if _has_length(value, self.num_saved) and _has_length(here, len(self.sources)):
                    per_group = []
                    for number, source in enumerate(self.sources):
                        per_group.append(here[number] if source is None else value[source])
                    state[key] = type(value)(per_group)
            elif key == _PARTS and _has_length(here, len(value)):
                # SequentialLR and ChainedScheduler contain other schedulers.
                pairs = zip(value, here, strict=True)
                state[key] = [self.schedule_state(inner, scheduler) for inner, scheduler in pairs]
        return state


def other_kind(saved: Values, scheduler: Any) -> str | None:
    """Describe what shows that the *saved* state is from another kind of LR scheduler. Returns None when nothing does.

    The classes of torch differ in their settings. The state of an imported run has no settings. A class of the
    user may have gained or lost some since it was saved.
    """
    before = _settings_of(saved)
    now = _settings_of(scheduler.state_dict())
    is_of_torch = type(scheduler).__module__.startswith("torch.optim.")
    has_other = before - now and now - before
    if not before or before == now or not (is_of_torch or has_other):
        return None
    name = type(scheduler).__name__
    return f"~ saved with {', '.join(sorted(before))}; {name} has {', '.join(sorted(now)) or 'none of these'}"


def _settings_of(state: Values) -> set[str]:
    """The names in the *state* of an LR scheduler that its own class has."""
    own = {key for key in state if not key.startswith("_") and key not in _OF_ALL_SCHEDULES}
    return own | ({_PARTS} & state.keys())


def match_groups(
    name: str, saved: Sequence[Sequence[str]], here: Sequence[Sequence[str]], tree: Tree
) -> GroupMatch:
    """Match the groups of the optimizer *name*: FQNs of the *saved* ones in *tree*, and of those that are *here*.

    Saved parameters that are not trained here do not count if they have no state, while others have: they had no
    gradient, so nothing is lost. Programs that give an optimizer all parameters save frozen ones so.
    """
    group_of = {fqn: number for number, group in enumerate(saved) for fqn in group}
    sources = []
    mismatched = []
    for number, group in enumerate(here):
        if not group:
            is_empty = number < len(saved) and not saved[number]
            sources.append(number if is_empty else None)
            continue
        untrained = [fqn for fqn in group if fqn not in group_of]
        found = sorted({group_of[fqn] for fqn in group if fqn in group_of})
        if untrained:
            reason = f"trains {untrained[0]}, which was not trained"
            mismatched.append(f"+ {name}.param_groups.{number}: {reason}")
        elif any(_options(name, tree, other) != _options(name, tree, found[0]) for other in found):
            numbers = " and ".join(map(str, found))
            mismatched.append(
                f"~ {name}.param_groups.{number}: saved as groups {numbers} {DIVIDED}"
            )
        # If none was found, the group is in *mismatched*, which is raised before values are read:
        # any number does.
        sources.append(found[0] if found else 0)
    left_out = set(group_of) - {fqn for group in here for fqn in group}
    with_tensors = {fqn for fqn, _ in saved_entries(name, tree.tensors)}
    if with_tensors:
        left_out &= with_tensors
    for number, group in enumerate(saved):
        not_trained = [fqn for fqn in group if fqn in left_out]
        if not_trained:
            reason = f"trained {not_trained[0]}, which is not trained here"
            mismatched.append(f"- {name}.param_groups.{number}: {reason}")
    return GroupMatch(name, tuple(sources), len(saved), tuple(mismatched))


def _options(name: str, tree: Tree, number: int) -> dict[str, object]:
    """What shows whether two saved groups have the same options, as far as their stored digests do."""
    prefix = _prefix(name, number)
    found: dict[str, object] = {
        key: tensor for key, tensor in tree.tensors.items() if key.startswith(prefix)
    }
    for key, blob in tree.objects.items():
        if key.startswith(prefix) and key != f"{prefix}params":
            # Some sources have no digests: without one, nothing shows that two values are equal.
            found[key.removeprefix(prefix)] = blob.digest or blob
    return found


def _prefix(name: str, number: int) -> str:
    # With the last dot: group 1 must not match the names of group 10.
    return f"{name}.param_groups.{number}."


def _has_length(value: object, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


# ---------------------------------------------------------------- entries


Location = tuple[dict[str, Any], str]
"""A mapping, and the key of a value in it."""


def locations(name: str, state: ValueDict) -> dict[str, Location]:
    """Return the position of each value in the state of the optimizer *name*, by the flat name that DCP gives it.

    The other entries of *state* belong to LR schedulers. The parameter lists of groups are left out.
    """
    found = {key: (state, key) for key in state if key != name}
    for prefix, entry in entries_of(name, state[name]):
        for key in entry:
            if key != "params":
                found[f"{prefix}.{key}"] = (entry, key)
    return found


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


# ---------------------------------------------------------------- loading


class OptimizerLoader:
    """Loads the optimizers in the checkpoint *path*; with *remote*, tensors and values are read from there.

    *absent* maps the attributes that only the checkpoint or only the run has to their kinds. *allow_missing* names the
    attributes that may start without the saved state, with a warning of rank 0.
    """

    def __init__(
        self,
        path: Path,
        remote: VerifiedRanges | None,
        absent: Texts,
        allow_missing: frozenset[str],
        *,
        is_rank0: bool,
    ) -> None:
        self._path, self._remote = path, remote
        self._absent, self._allow_missing = absent, allow_missing
        self._is_rank0 = is_rank0

    def load(
        self, item: Item, items: list[Item], tree: Tree, owners: Owners, state: ValueDict
    ) -> frozenset[str]:
        """Load an optimizer and its LR schedulers; the saved values are read into *state*.

        *items* are all items of the run, and *tree* the saved tree of the optimizer. Returns the names of the optimizer
        and its schedulers if they start without the saved state, which ``allow_missing_state`` permits; otherwise none.
        Raises :class:`CheckpointUnusable` if the saved state does not match.
        """
        name = item.name
        others = self._schedules_of_another_kind(item, items, tree, state)
        self._absent = {**self._absent, **dict.fromkeys(others, "lr_scheduler")}
        try:
            tree, match, values = self._matched(item, tree, owners, state)
        except CheckpointUnusable as error:
            if name not in self._allow_missing:
                raise
            return self._start_anew(item, items, error)
        read_tree(self._path, tree, values, self._remote)
        # Tensors were read in place; other values were replaced in the mapping only.
        for key, (container, index) in locations(name, state).items():
            if key in tree.objects and key in values:
                container[index] = values[key]
        parameters = owners.parameters(item, state[name])
        load_read_state(
            item.value, state[name], parameters, partial(owners.set_optimizer_state, item)
        )
        for scheduler in items:
            if scheduler.owner == name and scheduler.name in state.keys() - others:
                (saved_schedule,) = state[scheduler.name]
                schedule = match.schedule_state(saved_schedule, scheduler.value)
                scheduler.value.load_state_dict(schedule)
        return others

    def _schedules_of_another_kind(
        self, item: Item, items: list[Item], tree: Tree, state: Values
    ) -> frozenset[str]:
        """The names of the LR schedulers of an optimizer that were saved as schedules of another kind.

        Raises :class:`CheckpointUnusable` for those that ``allow_missing_state`` does not permit to start without it:
        torch would mix the settings of both.
        """
        found = set()
        for scheduler in items:
            is_here = scheduler.owner == item.name and scheduler.name in state
            if not is_here or scheduler.name not in tree.objects:
                continue
            (saved,) = read_object(self._path, tree, scheduler.name, self._remote)
            difference = other_kind(saved, scheduler.value)
            if difference is None:
                continue
            if scheduler.name not in self._allow_missing:
                raise unusable(
                    f"the checkpoint's {scheduler.name!r} is a schedule of another kind than the recipe's",
                    self._path,
                    first_lines([difference]),
                    "resume with the schedule that was saved; or continue with the recipe's schedule at the present "
                    f"step: --checkpoint.allow_missing_state '[{scheduler.name}]'",
                )
            found.add(scheduler.name)
        return frozenset(found)

    def _matched(
        self, item: Item, tree: Tree, owners: Owners, state: ValueDict
    ) -> tuple[Tree, GroupMatch, ValueDict]:
        """The saved values of an optimizer under the names that they have here, the match of its parameter groups, and
        the values to read into by flat name. *state* gets a location for each of them.

        Raises :class:`CheckpointUnusable` if the optimizer has other state.
        """
        name = item.name
        optimizer_state = state[name]
        saved_groups = self._groups(name, tree)
        groups = [group["params"] for group in optimizer_state["param_groups"]]
        match = match_groups(name, saved_groups, groups, tree)
        tree = match.renumbered(tree)
        stored = {*tree.tensors, *tree.objects}
        schedules = {key for key, kind in self._absent.items() if kind == "lr_scheduler"}
        schedules &= self._allow_missing

        def is_needed(key: str, others: Collection[str]) -> bool:
            """Whether a value must be on both sides. Exceptions are the values of an LR scheduler that only one side
            has, and the options that it adds to the groups."""
            is_of_schedule = key in schedules or key.startswith(f"{name}.param_groups.")
            return key in others or not (schedules and is_of_schedule)

        # What the checkpoint has no state for starts without: its state was created here only to be read into.
        without_state = {fqn for group in saved_groups for fqn in group}
        without_state -= {fqn for fqn, _ in saved_entries(name, stored)}
        for fqn in without_state & optimizer_state["state"].keys():
            del optimizer_state["state"][fqn]

        optional: frozenset[str] = getattr(item.value, "optional_state", frozenset())
        for fqn, entry in optimizer_state["state"].items():
            for key in optional & entry.keys():
                if f"{name}.state.{fqn}.{key}" not in stored:
                    del entry[key]

        parameters = owners.parameters(item, optimizer_state)
        before = locations(name, state)
        tree = _select(tree, lambda key: is_needed(key, before))
        allocate_late_entries(name, tree, optimizer_state, parameters)
        values = {
            key: container[index]
            for key, (container, index) in locations(name, state).items()
            if is_needed(key, stored)
        }
        compared = _without_other_ranks(item, tree, owners)
        check_differences(self._path, item, compared, values, match.mismatched)
        return tree, match, values

    def _start_anew(
        self, item: Item, items: list[Item], mismatch: CheckpointUnusable
    ) -> frozenset[str]:
        """Leave an optimizer without state, and its LR schedulers as they are; return their names."""
        # Its state was created only to be read into.
        item.value.state.clear()
        if self._is_rank0:
            log.warning(
                "%s starts without state, as checkpoint.allow_missing_state permits, because the saved state does not "
                "match:%s",
                item.name,
                mismatch.problems[0].value,
            )
        schedulers = [each.name for each in items if each.owner == item.name]
        return frozenset((item.name, *schedulers))

    def _groups(self, name: str, tree: Tree) -> list[list[str]]:
        """The parameters of each group that the optimizer *name* had, by FQN."""
        prefix = f"{name}.param_groups."
        keys = [key for key in tree.objects if key.startswith(prefix) and key.endswith(".params")]
        # By number: as text, group 10 would come before group 2.
        keys.sort(key=lambda key: int(key.split(".")[-2]))
        return [read_object(self._path, tree, key, self._remote) for key in keys]


def _select(tree: Tree, is_selected: Callable[[str], bool]) -> Tree:
    """The entries of *tree* with selected names."""
    tensors = {name: tensor for name, tensor in tree.tensors.items() if is_selected(name)}
    objects = {name: blob for name, blob in tree.objects.items() if is_selected(name)}
    return replace(tree, tensors=tensors, objects=objects)


def _without_other_ranks(item: Item, tree: Tree, owners: Owners) -> Tree:
    """An optimizer's tree without the state of parameters that only other ranks train."""
    trained = trained_by_all(item.value)
    if trained is None:
        return tree
    others = {fqn for group in trained for fqn in group}
    others -= {fqn for group in owners.groups(item) for fqn in group}
    prefix = f"{item.name}.state."

    def is_here(name: str) -> bool:
        if not name.startswith(prefix):
            return True
        fqn, _, _ = name.removeprefix(prefix).rpartition(".")
        return fqn not in others

    return _select(tree, is_here)
