"""Load a verified checkpoint into the objects of a recipe: match names, check differences, read values."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted, counted_are
from automodel_ckpt.base.user_code import location_in_user_code
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts, ValueDict, Values
from automodel_ckpt.checkpoint.formats.reading import read_tree, read_value
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.parts.manifest import NOT_SAVED, Manifest, StateRecord, Tree
from automodel_ckpt.checkpoint.parts.slices import have_same_digests
from automodel_ckpt.checkpoint.state.fill_modules import set_module_state
from automodel_ckpt.checkpoint.state.mismatch import (
    cast_names,
    check_differences,
    differences,
    first_lines,
    has_weights_only,
    weights_only,
)
from automodel_ckpt.checkpoint.state.module_tensors import (
    Owners,
    complete_state,
    frozen_names,
    module_state,
    optimizer_tree,
)
from automodel_ckpt.checkpoint.state.optimizer_loading import OptimizerLoader
from automodel_ckpt.checkpoint.state.storable import DTYPE_CODES
from automodel_ckpt.checkpoint.store.ranges import VerifiedRanges
from automodel_ckpt.errors import AutomodelError, unusable

log = logging.getLogger("automodel_ckpt")

# A module is read before its optimizers, which create state of its shape, and they before other objects.
_ORDER = {"module": 0, "optimizer": 1, "object": 2}


class Loader:
    """Loads one verified checkpoint into a recipe's state. Needs no other rank."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        ranks: layout.RankLayout,
        allow_missing: frozenset[str],
        remote: VerifiedRanges | None = None,
    ) -> None:
        """With *remote*, tensors and values of trees are read from there, and other files from *path*."""
        self._path, self._manifest, self._remote = path, manifest, remote
        self._ranks, self._allow_missing = ranks, allow_missing
        self._absent: TextDict = {}
        self.started_anew: frozenset[str] = frozenset()
        """The optimizers, and their LR schedulers, that :meth:`load` left without the saved state."""
        self._module_states: dict[str, tuple[ValueDict, TextDict]] = {}
        """The :func:`module_state` of each module: its tensors themselves, collected once."""

    def load(self, items: list[Item]) -> None:
        """Load all *items*. Random number generators are loaded last: loading must not advance them.

        Raises :class:`CheckpointUnusable` where the checkpoint does not match.
        """
        records, owners = self._match(items), Owners(items)
        optimizers = OptimizerLoader(
            self._path,
            self._remote,
            self._absent,
            self._allow_missing,
            is_rank0=self._ranks.rank == 0,
        )
        # LR schedulers are stored and loaded with their optimizer.
        matched = [item for item in items if item.name in records and item.kind != "lr_scheduler"]
        trees = {}
        for item in matched:
            saved_name, _ = records[item.name]
            if item.kind != "object":
                trees[item.name] = self._tree(item, saved_name)
        for item in matched:
            if item.kind == "module":
                # All modules before any is read: a later mismatch would leave the others
                # overwritten.
                self._check_module(item, trees[item.name])
        # Before modules are read: an optimizer's state is created by a step of it, which may change weights.
        created = {
            item.name: optimizer_tree(item, items, owners, create=True)
            for item in matched
            if item.kind == "optimizer"
        }
        for item in sorted(matched, key=lambda item: (item.scope == "rank_rng", _ORDER[item.kind])):
            if item.kind == "module":
                state, tied = self._module_states[item.name]
                read_tree(self._path, trees[item.name], state, self._remote)
                set_module_state(item.value, state, tied, strict=True)
            elif item.kind == "optimizer":
                self.started_anew |= optimizers.load(
                    item, items, trees[item.name], owners, created[item.name]
                )
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
            tree = self._tree(item, saved_name)
            lines += differences(tree, self._complete_state(item)[0], self._casts(item, tree))
        return lines

    def _check_module(self, item: Item, tree: Tree) -> None:
        """Raise :class:`CheckpointUnusable` if *tree* is not a state of the module."""
        (state, _), casts = self._complete_state(item), self._casts(item, tree)
        check_differences(self._path, item, tree, state, cast=casts)
        if casts and self._ranks.rank == 0:
            log.info(
                "%s not trained: saved as %s, cast to %s",
                counted_are(len(casts), "tensor"),
                " and ".join(sorted({tree.tensors[name].dtype for name in casts})),
                " and ".join(sorted({DTYPE_CODES[state[name].dtype] for name in casts})),
            )

    def _casts(self, item: Item, tree: Tree) -> set[str]:
        """The frozen tensors of the module *item* that have a wider floating-point type here than saved.

        That is no difference: a base in 16 bits can be in float32 on another device.
        """
        names = cast_names(tree, self._complete_state(item)[0])
        return names & frozen_names(item.value) if names else names

    def _tree(self, item: Item, saved_name: str) -> Tree:
        """The saved tree of *item*; of a module, with the tensors that it has here if only ties differ.

        Ties depend on the revision of this program and on the strategy: parameters that share memory are one tensor,
        and no longer share it once they are sharded. A tensor that is tied here is left out if it was saved a second
        time with equal bytes. One that was tied when it was saved is read from the tensor that it was tied to.
        """
        tree = self._manifest.trees[saved_name]
        if item.kind != "module":
            return tree
        state, tied = self._complete_state(item)
        tensors = dict(tree.tensors)
        for alias, stored in tied.items():
            if alias in tensors and stored in tensors:
                one, other = tensors[alias], tensors[stored]
                is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
                if is_alike and have_same_digests(one, other):
                    del tensors[alias]
        for alias, stored in tree.tied.items():
            if alias in state and alias not in tensors and stored in tensors:
                tensors[alias] = tensors[stored].renamed(alias)
        return tree if tensors.keys() == tree.tensors.keys() else replace(tree, tensors=tensors)

    def _complete_state(self, item: Item) -> tuple[Values, Texts]:
        return complete_state(item.value, self._module_states[item.name])

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
            if has_weights_only(self._manifest) and matched:
                raise weights_only(self._path, names)
            raise unusable(
                "the state in the checkpoint does not match this run",
                self._path,
                first_lines(lines),
                f"to continue without it: --checkpoint.allow_missing_state '[{', '.join(names)}]'",
            )
        return matched

    def _matched(self, items: list[Item]) -> tuple[dict[str, tuple[str, StateRecord]], list[str]]:
        """({attribute: (saved name, record)}, a line for each difference)."""
        saved = {}
        by_name = {}
        for name, record in self._manifest.state.items():
            if record.scope == NOT_SAVED:
                continue
            saved[name] = record
            for each_name in (name, *record.aliases):
                by_name[each_name] = (name, record)
        matched = {}
        lines = []
        modules = {item.name: item.value for item in items if item.kind == "module"}
        self._module_states = {name: module_state(module) for name, module in modules.items()}
        taken = set()
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

    def _load_object(self, item: Item, record: StateRecord) -> None:
        file = self._file_of(record)
        state = None if file is None else read_value(self._path, file)
        fits = getattr(item.value, "fits", lambda state: True)
        if file is None or not fits(state):
            if item.name not in self._allow_missing:
                self._recompute(item)
            return
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
            raise unusable(
                f"{item.name!r} could not load the state that was saved",
                self._path,
                first_lines(lines),
                "resume with the settings that wrote it, or use another checkpoint of this run",
            ) from error

    def _recompute(self, item: Item) -> None:
        """Recompute per-rank state from the step, for a run with a different number of ranks.

        Raises :class:`CheckpointUnusable` for an object without the method ``derive``.
        """
        derive = getattr(item.value, "derive", None)
        if derive is None:
            raise unusable(
                f"{item.name!r} was saved by {counted(self._manifest.world_size, 'rank')}, each with its own state",
                self._path,
                f"this run has {counted(self._ranks.world_size, 'rank')}",
                f"resume on the same number of ranks, or --checkpoint.allow_missing_state '[{item.name}]'",
            )
        if self._ranks.rank == 0:
            log.warning(
                "The number of ranks or the data-parallel size changed: %s is recomputed from the seed and the step",
                item.name,
            )
        derive(self._manifest.step)

    def _file_of(self, record: StateRecord) -> str | None:
        """The file with this rank's state; any file where all are equal. None where the number of ranks must be the
        saved one."""
        scope: Any = record.scope
        saved, ranks = self._manifest, self._ranks
        same_ranks = saved.world_size == ranks.world_size and saved.dp_size == ranks.dp_size
        if same_ranks and scope != "replicated":
            only_dp = ranks.dp_size == ranks.world_size
            directory = os.path.dirname(record.files[0])
            file = layout.rank_file(directory, scope, ranks.rank, ranks.dp_rank, only_dp=only_dp)
            return file if file in record.files else None
        digests = {saved.files[file].digest for file in record.files}
        # Random states that are equal now must not stay equal: they are recomputed.
        return record.files[0] if len(digests) == 1 and scope != "rank_rng" else None
