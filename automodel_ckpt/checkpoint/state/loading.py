"""Load a verified checkpoint into the objects of a recipe: match names, check differences, read values."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.discovery import Item
from automodel_ckpt.checkpoint.formats.reading import (
    differences,
    read_object,
    read_tree,
    read_value,
)
from automodel_ckpt.checkpoint.manifest import NOT_SAVED, Manifest, StateRecord, Tree
from automodel_ckpt.checkpoint.module_tensors import complete_state, module_state, set_module_state
from automodel_ckpt.checkpoint.state.optimizer_names import Owners, optimizer_tree, trained_by_all
from automodel_ckpt.checkpoint.state.optimizer_state import (
    FORMS,
    Forms,
    Place,
    StateAllocator,
    forms_in,
    load_read_state,
    places,
)
from automodel_ckpt.checkpoint.state.param_groups import GroupMatch, match_groups
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable
from automodel_ckpt.user_code import location_in_user_code

log = logging.getLogger("automodel_ckpt")


def first_lines(lines: list[str]) -> str:
    """The first of many lines, indented, as the value of a message."""
    first = lines[:20] + ([f"... and {len(lines) - 20} more"] if len(lines) > 20 else [])
    return "\n    " + "\n    ".join(first)


class Loader:
    """Loads one verified checkpoint into a recipe's state. Needs no other rank."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        ranks: layout.RankLayout,
        allow_missing: frozenset[str],
    ) -> None:
        self._path, self._manifest, self._ranks, self._allow_missing = (
            path,
            manifest,
            ranks,
            allow_missing,
        )
        self._absent: dict[str, str] = {}

    def load(self, items: list[Item]) -> None:
        """Load all *items*. Random number generators are loaded last: loading must not advance them.

        Raises :class:`CheckpointUnusable` where the checkpoint does not match.
        """
        records, owners = self._match(items), Owners(items)
        matched = [item for item in items if item.name in records and item.kind != "lr_scheduler"]
        trees = {
            i.name: self._manifest.trees[records[i.name][0]] for i in matched if i.kind != "object"
        }
        for item in matched:
            if item.kind == "module":
                self._check_differences(item, trees[item.name], complete_state(item.value)[0])
        # Before modules are read: an optimizer's state is made by a step of it, which may change weights.
        made = {
            i.name: optimizer_tree(i, items, owners, create=True)
            for i in matched
            if i.kind == "optimizer"
        }
        order = {"module": 0, "optimizer": 1, "object": 2}
        for item in sorted(matched, key=lambda item: (item.scope == "rank_rng", order[item.kind])):
            if item.kind == "module":
                self._load_module(item, trees[item.name])
            elif item.kind == "optimizer":
                self._load_optimizer(item, items, trees[item.name], owners, made[item.name])
            else:
                self._load_object(item, records[item.name][1])

    def incompatibilities(self, items: list[Item]) -> list[str]:
        """The differences between the checkpoint and *items*, one line each; reads no values.

        Compares attributes and the tensors of modules. Optimizers are not compared: their state would have to be
        created.
        """
        matched, lines = self._matched(items)
        modules = [item for item in items if item.kind == "module" and item.name in matched]
        for item in modules:
            tree = self._manifest.trees[matched[item.name][0]]
            lines += differences(tree, complete_state(item.value)[0])
        return lines

    def _match(self, items: list[Item]) -> dict[str, tuple[str, StateRecord]]:
        """{attribute: (saved name, record)}. Raises :class:`CheckpointUnusable` that lists what is on one side only."""
        matched, lines = self._matched(items)
        kinds = {name: record.kind for name, record in self._manifest.state.items()}
        kinds |= {item.name: item.kind for item in items}
        on_both_sides = set(matched)
        on_both_sides |= {saved_name for saved_name, _ in matched.values()}
        self._absent = {name: kind for name, kind in kinds.items() if name not in on_both_sides}
        if lines:
            names = sorted({line.split(":")[0][2:] for line in lines})
            self._raise_unusable(
                "the state in the checkpoint does not match this recipe",
                lines,
                f"to continue without it: --checkpoint.allow_missing_state '[{', '.join(names)}]'",
            )
        return matched

    def _matched(self, items: list[Item]) -> tuple[dict[str, tuple[str, StateRecord]], list[str]]:
        saved = {name: r for name, r in self._manifest.state.items() if r.scope != NOT_SAVED}
        by_name = {n: (name, r) for name, r in saved.items() for n in (name, *r.aliases)}
        matched: dict[str, tuple[str, StateRecord]] = {}
        lines, taken = list[str](), set[str]()
        for item in items:
            found = next((by_name[n] for n in (item.name, *item.aliases) if n in by_name), None)
            taken |= {found[0]} if found is not None else set()
            if found is not None and found[1].kind == item.kind:
                matched[item.name] = found
            elif item.name not in self._allow_missing:
                other = (
                    "here, but not saved"
                    if found is None
                    else f"saved as {found[1].kind}, here {item.kind}"
                )
                lines.append(f"{'+' if found is None else '~'} {item.name}: {other}")
        unexpected = sorted(saved.keys() - taken)
        lines += [f"- {n}: saved, but not here" for n in unexpected if n not in self._allow_missing]
        return matched, lines

    def _raise_unusable(self, what: str, lines: list[str], hint: str) -> NoReturn:
        raise CheckpointUnusable(what, where=str(self._path), value=first_lines(lines), hint=hint)

    def _load_module(self, item: Item, tree: Tree) -> None:
        state, tied = module_state(item.value)
        read_tree(self._path, tree, state)
        set_module_state(item.value, state, tied, strict=True)

    def _load_optimizer(
        self, item: Item, items: list[Item], tree: Tree, owners: Owners, state: dict[str, Any]
    ) -> None:
        """Load an optimizer and its LR schedulers; the saved values are read into *state*."""
        groups, mine = self._groups(item.name, tree), state[item.name]
        absent = {name: kind for name, kind in self._absent.items() if name in self._allow_missing}
        here = [group["params"] for group in mine["param_groups"]]
        match = match_groups(item.name, groups, here, tree, _module_prefixes(absent))
        leave = _Leave(item.name, absent, match)
        new = {fqn for fqn in mine["state"] if leave.drops(f"{item.name}.state.{fqn}.")}
        saved_forms, tree = self._forms(item.name, tree)
        forms, tree = match.renumbered_forms(saved_forms), match.renumbered(tree)
        for fqn in (self._without_state(item.name, tree, groups) - {fqn for _, fqn in forms}) | new:
            mine["state"].pop(fqn, None)
        parameters, flat = owners.parameters(item, mine), self._flat(item.name, state)
        stored = {*tree.tensors, *tree.objects}
        tree = _only(tree, lambda name: leave.takes(name, both=name in flat))
        StateAllocator(item.name, tree, forms, parameters).allocate_in(mine)
        flat = self._flat(item.name, state)
        values = {
            n: holder[key] for n, (holder, key) in flat.items() if leave.takes(n, both=n in stored)
        }
        self._check_differences(item, _without_others(item, tree, owners), values, match.mismatched)
        read_tree(self._path, tree, values)
        for name in tree.objects.keys() & values.keys():
            holder, key = flat[name]
            holder[key] = values[name]
        load_read_state(item.value, mine, parameters, partial(owners.set_optimizer_state, item))
        for scheduler in items:
            if scheduler.owner == item.name and scheduler.name in state:
                schedule_state = match.schedule_state(state[scheduler.name][0], scheduler.value)
                scheduler.value.load_state_dict(schedule_state)

    @staticmethod
    def _flat(name: str, state: dict[str, Any]) -> dict[str, Place]:
        """The position of each value of an optimizer's state by flat name, without the parameter lists of groups."""
        start = f"{name}.param_groups."
        found = places(state)
        return {
            key: place
            for key, place in found.items()
            if not (key.startswith(start) and key.endswith(".params"))
        }

    def _check_differences(
        self, item: Item, tree: Tree, state: Mapping[str, Any], further: Iterable[str] = ()
    ) -> None:
        if lines := [*differences(tree, state), *further]:
            self._raise_unusable(
                f"the checkpoint's {item.name!r} does not match this recipe",
                lines,
                "resume with the recipe that wrote it (its config.yaml is in the checkpoint), "
                "or start a new run in another checkpoint.checkpoint_dir "
                "(checkpoint.on_incompatible sibling creates one)",
            )

    def _forms(self, name: str, tree: Tree) -> tuple[Forms, Tree]:
        """(container forms saved for the optimizer *name*, the tree without them)."""
        forms = f"{name}.{FORMS}"
        if forms not in tree.objects:
            return {}, tree
        return forms_in(read_object(self._path, tree, forms)), _only(
            tree, lambda entry: entry != forms
        )

    def _groups(self, name: str, tree: Tree) -> list[list[str]]:
        """The parameters of each group that the optimizer *name* had, by FQN."""
        keys = [
            key
            for key in tree.objects
            if key.startswith(f"{name}.param_groups.") and key.endswith(".params")
        ]
        return [
            read_object(self._path, tree, key)
            for key in sorted(keys, key=lambda key: int(key.split(".")[-2]))
        ]

    def _without_state(self, name: str, tree: Tree, groups: list[list[str]]) -> set[str]:
        """What the optimizer *name* was to train and never had updated: parameters that took no part, or not yet."""
        trained = {fqn for group in groups for fqn in group}
        prefix = f"{name}.state."
        entries = [
            key.removeprefix(prefix)
            for key in (*tree.tensors, *tree.objects)
            if key.startswith(prefix)
        ]
        return trained - {
            entry[:end] for entry in entries for end, letter in enumerate(entry) if letter == "."
        }

    def _load_object(self, item: Item, record: StateRecord) -> None:
        file = self._file_of(item, record)
        state = read_value(self._path, file) if file is not None else None
        fits: Callable[[Any], bool] = getattr(item.value, "fits", lambda state: True)
        if file is not None and fits(state):
            self._load_state_dict(item, state)
        elif item.name not in self._allow_missing:
            self._recompute(item)

    def _load_state_dict(self, item: Item, state: Any) -> None:
        try:
            item.value.load_state_dict(state)
        except AutomodelError:
            raise
        except Exception as error:
            log.debug("unexpected", exc_info=True)
            self._raise_unusable(
                f"{item.name!r} could not load the state that was saved",
                [
                    repr(error),
                    *([f"in {place}"] if (place := location_in_user_code(error)) else []),
                ],
                "resume with the recipe that wrote it, or use another checkpoint of this run",
            )

    def _recompute(self, item: Item) -> None:
        """Recompute per-rank state from the step, for a run with a different number of ranks.

        Raises :class:`CheckpointUnusable` for an object without the method ``derive``.
        """
        derive: Callable[[int], object] | None = getattr(item.value, "derive", None)
        if derive is None:
            self._raise_unusable(
                f"{item.name!r} was saved by {self._manifest.world_size} ranks, each with its own state",
                [f"~ {item.name}: this run has {self._ranks.world_size} ranks"],
                f"resume on the same number of ranks, or --checkpoint.allow_missing_state '[{item.name}]'",
            )
        if self._ranks.rank == 0:
            same = self._manifest.world_size == self._ranks.world_size
            what = "The data-parallel size changed" if same else "The number of ranks changed"
            log.warning("%s: %s is recomputed from the seed and the step", what, item.name)
        derive(self._manifest.step)

    def _file_of(self, item: Item, record: StateRecord) -> str | None:
        """The file for this rank; any where all are equal; None where the number of ranks must be the saved one."""
        scope: Any = record.scope
        same_ranks = (self._manifest.world_size, self._manifest.dp_size) == (
            self._ranks.world_size,
            self._ranks.dp_size,
        )
        if same_ranks and scope != "replicated":
            mine = layout.rank_file(_saved_name(record), scope, self._ranks)
            return mine if mine in record.files else None
        alike = len({self._manifest.files[file].digest for file in record.files}) == 1
        return record.files[0] if alike and scope != "rank_rng" else None


def _module_prefixes(absent: Mapping[str, str]) -> tuple[str, ...]:
    """The FQN prefixes of optimizer parameters that belong to the modules in *absent* (name: kind)."""
    return tuple(f"{module.replace('.', '%')}." for module in absent)


class _Leave:
    """Which values of an optimizer are skipped because attributes in *absent* (name: kind) are on one side only.

    These are the state of absent modules, groups without other parameters, and the options that an absent LR scheduler
    adds. *match* is the match of its groups to the saved ones.
    """

    def __init__(self, name: str, absent: Mapping[str, str], match: GroupMatch) -> None:
        modules = _module_prefixes(absent)
        self._dropped = (
            *(f"{name}.state.{module}" for module in modules),
            *(match.new_groups if absent else ()),
        )
        self._schedules = {schedule for schedule, kind in absent.items() if kind == "lr_scheduler"}
        self._options = (f"{name}.param_groups.",) if self._schedules else ()

    def drops(self, name: str) -> bool:
        """Whether a name of the (flat) tree belongs to what is absent."""
        return name.startswith(self._dropped)

    def takes(self, name: str, *, both: bool) -> bool:
        """Whether a name is compared and read: it is on *both* sides, or must be."""
        return not self.drops(name) and (
            both or not (name in self._schedules or name.startswith(self._options))
        )


def _only(tree: Tree, holds: Callable[[str], bool]) -> Tree:
    """The entries of *tree* for whose names *holds* is true."""
    tensors = {name: tensor for name, tensor in tree.tensors.items() if holds(name)}
    return replace(
        tree,
        tensors=tensors,
        objects={name: blob for name, blob in tree.objects.items() if holds(name)},
    )


def _without_others(item: Item, tree: Tree, owners: Owners) -> Tree:
    """An optimizer's tree without the state of parameters that only other ranks train."""
    trained = trained_by_all(item.value)
    if trained is None:
        return tree
    others = {fqn for group in trained for fqn in group} - {
        fqn for group in owners.groups(item) for fqn in group
    }
    prefix = f"{item.name}.state."

    def is_here(name: str) -> bool:
        return (
            not name.startswith(prefix)
            or name.removeprefix(prefix).rpartition(".")[0] not in others
        )

    return _only(tree, is_here)


def _saved_name(record: StateRecord) -> str:
    return os.path.dirname(record.files[0])
