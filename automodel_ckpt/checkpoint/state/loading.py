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
    ByteRanges,
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
    Location,
    StateAllocator,
    forms_in,
    load_read_state,
    locations,
)
from automodel_ckpt.checkpoint.state.param_groups import GroupMatch, match_groups
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable
from automodel_ckpt.user_code import location_in_user_code

log = logging.getLogger("automodel_ckpt")

_MAX_LINES = 20
# A module is read before the optimizers whose state is created by its shape, and those before other objects.
_ORDER = {"module": 0, "optimizer": 1, "object": 2}


def first_lines(lines: list[str]) -> str:
    """The first of many lines, indented, as the value of a message."""
    first = lines[:_MAX_LINES]
    if len(lines) > _MAX_LINES:
        first.append(f"... and {len(lines) - _MAX_LINES} more")
    return "".join(f"\n    {line}" for line in first)


class Loader:
    """Loads one verified checkpoint into a recipe's state. Needs no other rank."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        ranks: layout.RankLayout,
        allow_missing: frozenset[str],
        remote: ByteRanges | None = None,
    ) -> None:
        """With *remote*, tensors and values of trees are read from there, and other files from *path*."""
        self._path, self._manifest, self._remote = path, manifest, remote
        self._ranks, self._allow_missing = ranks, allow_missing
        self._absent: dict[str, str] = {}
        self._module_states: dict[str, tuple[dict[str, Any], dict[str, str]]] = {}

    def load(self, items: list[Item]) -> None:
        """Load all *items*. Random number generators are loaded last: loading must not advance them.

        Raises :class:`CheckpointUnusable` where the checkpoint does not match.
        """
        records, owners = self._match(items), Owners(items)
        # LR schedulers are stored and loaded with their optimizer.
        matched = [item for item in items if item.name in records and item.kind != "lr_scheduler"]
        trees: dict[str, Tree] = {}
        for item in matched:
            saved_name, _ = records[item.name]
            if item.kind != "object":
                trees[item.name] = self._manifest.trees[saved_name]
        for item in matched:
            if item.kind == "module":
                # All modules before any is read: a later mismatch would leave the others
                # overwritten.
                self._check_differences(item, trees[item.name], self._complete_state(item))
        # Before modules are read: an optimizer's state is created by a step of it, which may change weights.
        created: dict[str, dict[str, Any]] = {}
        for item in matched:
            if item.kind == "optimizer":
                created[item.name] = optimizer_tree(item, items, owners, create=True)
        for item in sorted(matched, key=lambda item: (item.scope == "rank_rng", _ORDER[item.kind])):
            if item.kind == "module":
                self._load_module(item, trees[item.name])
            elif item.kind == "optimizer":
                self._load_optimizer(item, items, trees[item.name], owners, created[item.name])
            else:
                self._load_object(item, records[item.name][1])

    def incompatibilities(self, items: list[Item]) -> list[str]:
        """The differences between the checkpoint and *items*, one line each; reads no values.

        Compares attributes and the tensors of modules. Optimizers are not compared: their state would have to be
        created.
        """
        matched, lines = self._matched(items)
        for item in items:
            if item.kind != "module" or item.name not in matched:
                continue
            saved_name, _ = matched[item.name]
            tree = self._manifest.trees[saved_name]
            lines += differences(tree, self._complete_state(item))
        return lines

    def _module_state(self, item: Item) -> tuple[dict[str, Any], dict[str, str]]:
        """The :func:`module_state` of a module: its tensors themselves, collected once."""
        if item.name not in self._module_states:
            self._module_states[item.name] = module_state(item.value)
        return self._module_states[item.name]

    def _complete_state(self, item: Item) -> Mapping[str, Any]:
        return complete_state(item.value, self._module_state(item))[0]

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
        """({attribute: (saved name, record)}, a line for each difference)."""
        saved: dict[str, StateRecord] = {}
        by_name: dict[str, tuple[str, StateRecord]] = {}
        for name, record in self._manifest.state.items():
            if record.scope == NOT_SAVED:
                continue
            saved[name] = record
            for each_name in (name, *record.aliases):
                by_name[each_name] = (name, record)
        matched: dict[str, tuple[str, StateRecord]] = {}
        lines: list[str] = []
        taken: set[str] = set()
        for item in items:
            names = [name for name in (item.name, *item.aliases) if name in by_name]
            if not names:
                if item.name not in self._allow_missing:
                    lines.append(f"+ {item.name}: here, but not saved")
                continue
            saved_name, record = by_name[names[0]]
            taken.add(saved_name)
            if record.kind == item.kind:
                matched[item.name] = (saved_name, record)
            elif item.name not in self._allow_missing:
                lines.append(f"~ {item.name}: saved as {record.kind}, here {item.kind}")
        for name in sorted(saved.keys() - taken):
            if name not in self._allow_missing:
                lines.append(f"- {name}: saved, but not here")
        return matched, lines

    def _raise_unusable(self, what: str, lines: list[str], hint: str) -> NoReturn:
        raise CheckpointUnusable(what, where=str(self._path), value=first_lines(lines), hint=hint)

    def _load_module(self, item: Item, tree: Tree) -> None:
        state, tied = self._module_state(item)
        read_tree(self._path, tree, state, self._remote)
        set_module_state(item.value, state, tied, strict=True)

    def _load_optimizer(
        self, item: Item, items: list[Item], tree: Tree, owners: Owners, state: dict[str, Any]
    ) -> None:
        """Load an optimizer and its LR schedulers; the saved values are read into *state*."""
        name = item.name
        optimizer_state = state[name]
        saved_groups = self._groups(name, tree)
        groups = [group["params"] for group in optimizer_state["param_groups"]]
        absent = {key: kind for key, kind in self._absent.items() if key in self._allow_missing}
        match = match_groups(name, saved_groups, groups, tree, _module_prefixes(absent))
        skipped = _Skipped(name, absent, match)
        saved_forms, tree = self._forms(name, tree)
        forms, tree = match.renumbered_forms(saved_forms), match.renumbered(tree)

        # What the checkpoint has no state for starts without: its state was created here only to be read into.
        without_state = self._without_state(name, tree, saved_groups)
        without_state -= {fqn for _, fqn in forms}
        for fqn in list(optimizer_state["state"]):
            if fqn in without_state or skipped.drops(f"{name}.state.{fqn}."):
                del optimizer_state["state"][fqn]

        parameters = owners.parameters(item, optimizer_state)
        here = self._locations(name, state)
        stored = {*tree.tensors, *tree.objects}
        tree = _select(tree, lambda key: skipped.takes(key, on_both_sides=key in here))
        StateAllocator(name, tree, forms, parameters).allocate_in(optimizer_state)
        here = self._locations(name, state)
        values: dict[str, Any] = {}
        for key, (container, index) in here.items():
            if skipped.takes(key, on_both_sides=key in stored):
                values[key] = container[index]
        compared = _without_other_ranks(item, tree, owners)
        self._check_differences(item, compared, values, match.mismatched)
        read_tree(self._path, tree, values, self._remote)
        # Tensors were read in place; other values were replaced in the mapping only.
        for key in tree.objects.keys() & values.keys():
            container, index = here[key]
            container[index] = values[key]
        load = partial(owners.set_optimizer_state, item)
        load_read_state(item.value, optimizer_state, parameters, load)
        for scheduler in items:
            if scheduler.owner == name and scheduler.name in state:
                (saved_schedule,) = state[scheduler.name]
                schedule = match.schedule_state(saved_schedule, scheduler.value)
                scheduler.value.load_state_dict(schedule)

    @staticmethod
    def _locations(name: str, state: dict[str, Any]) -> dict[str, Location]:
        """The location of each value of an optimizer's state by flat name, without the parameter lists of groups."""
        prefix = f"{name}.param_groups."
        found: dict[str, Location] = {}
        for key, location in locations(state).items():
            if not (key.startswith(prefix) and key.endswith(".params")):
                found[key] = location
        return found

    def _check_differences(
        self, item: Item, tree: Tree, state: Mapping[str, Any], further: Iterable[str] = ()
    ) -> None:
        lines = [*differences(tree, state), *further]
        if lines:
            self._raise_unusable(
                f"the checkpoint's {item.name!r} does not match this recipe",
                lines,
                "resume with the recipe that wrote it (its config.yaml is in the checkpoint), "
                "or start a new run in another checkpoint.checkpoint_dir "
                "(checkpoint.on_incompatible sibling creates one)",
            )

    def _forms(self, name: str, tree: Tree) -> tuple[Forms, Tree]:
        """(container forms saved for the optimizer *name*, the tree without them)."""
        key = f"{name}.{FORMS}"
        if key not in tree.objects:
            return {}, tree
        forms = forms_in(read_object(self._path, tree, key, self._remote))
        return forms, _select(tree, lambda entry: entry != key)

    def _groups(self, name: str, tree: Tree) -> list[list[str]]:
        """The parameters of each group that the optimizer *name* had, by FQN."""
        prefix = f"{name}.param_groups."
        keys = [key for key in tree.objects if key.startswith(prefix) and key.endswith(".params")]
        # By number: as text, group 10 would come before group 2.
        keys.sort(key=lambda key: int(key.split(".")[-2]))
        return [read_object(self._path, tree, key, self._remote) for key in keys]

    def _without_state(self, name: str, tree: Tree, groups: list[list[str]]) -> set[str]:
        """The parameters that the optimizer *name* was to train, and that no step had updated when it was saved."""
        trained = {fqn for group in groups for fqn in group}
        prefix = f"{name}.state."
        for key in (*tree.tensors, *tree.objects):
            if not key.startswith(prefix):
                continue
            # The FQN ends at one of the dots: both FQNs and the keys that follow may contain dots.
            entry = key.removeprefix(prefix)
            end = entry.find(".")
            while end >= 0:
                trained.discard(entry[:end])
                end = entry.find(".", end + 1)
        return trained

    def _load_object(self, item: Item, record: StateRecord) -> None:
        file = self._file_of(record)
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
            lines = [repr(error)]
            location = location_in_user_code(error)
            if location is not None:
                lines.append(f"in {location}")
            self._raise_unusable(
                f"{item.name!r} could not load the state that was saved",
                lines,
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

    def _file_of(self, record: StateRecord) -> str | None:
        """The file for this rank; any where all are equal; None where the number of ranks must be the saved one."""
        scope: Any = record.scope
        saved, ranks = self._manifest, self._ranks
        same_ranks = saved.world_size == ranks.world_size and saved.dp_size == ranks.dp_size
        if same_ranks and scope != "replicated":
            file = layout.rank_file(_saved_name(record), scope, ranks)
            return file if file in record.files else None
        digests = {saved.files[file].digest for file in record.files}
        # Random states that are equal now must not stay equal: they are recomputed.
        if len(digests) != 1 or scope == "rank_rng":
            return None
        return record.files[0]


def _module_prefixes(absent: Mapping[str, str]) -> tuple[str, ...]:
    """The FQN prefixes of optimizer parameters that belong to the modules in *absent* (name: kind)."""
    return tuple(f"{module.replace('.', '%')}." for module in absent)


class _Skipped:
    """Which values of an optimizer are skipped because attributes in *absent* (name: kind) are on one side only.

    These are the state of absent modules, groups without other parameters, and the options that an absent LR scheduler
    adds. *match* is the match of its groups to the saved ones.
    """

    def __init__(self, name: str, absent: Mapping[str, str], match: GroupMatch) -> None:
        dropped = [f"{name}.state.{prefix}" for prefix in _module_prefixes(absent)]
        if absent:
            dropped += match.new_groups
        self._dropped = tuple(dropped)
        self._schedules = {schedule for schedule, kind in absent.items() if kind == "lr_scheduler"}
        self._options = f"{name}.param_groups."

    def drops(self, name: str) -> bool:
        """Whether a name of the (flat) tree belongs to what is absent."""
        return name.startswith(self._dropped)

    def takes(self, name: str, *, on_both_sides: bool) -> bool:
        """Whether a name is compared and read: it is on both sides, or must be."""
        if self.drops(name):
            return False
        if on_both_sides or not self._schedules:
            return True
        return name not in self._schedules and not name.startswith(self._options)


def _select(tree: Tree, is_selected: Callable[[str], bool]) -> Tree:
    """The entries of *tree* whose names are selected."""
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


def _saved_name(record: StateRecord) -> str:
    return os.path.dirname(record.files[0])
