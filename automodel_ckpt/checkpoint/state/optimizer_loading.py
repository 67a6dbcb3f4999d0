"""Load the saved state of optimizers and their LR schedulers, without what only the checkpoint or only the run has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from automodel_ckpt.checkpoint.files.type_aliases import Texts, ValueDict, Values
from automodel_ckpt.checkpoint.formats.reading import read_object, read_tree
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.parts.tree import Tree
from automodel_ckpt.checkpoint.state.mismatch import check_differences, unusable
from automodel_ckpt.checkpoint.state.optimizer_state import (
    Owners,
    allocate_late_entries,
    load_read_state,
    locations,
    saved_entries,
    trained_by_all,
)
from automodel_ckpt.checkpoint.state.param_groups import GroupMatch, match_groups, other_kind
from automodel_ckpt.checkpoint.store.ranges import VerifiedRanges
from automodel_ckpt.errors import CheckpointUnusable

log = logging.getLogger("automodel_ckpt")


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
                    self._path,
                    f"the checkpoint's {scheduler.name!r} is a schedule of another kind than the recipe's",
                    [difference],
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
