"""The plan of a save on one rank: which state there is, and what this rank writes.

Synchronous saves (``saving/publisher.py``) and asynchronous ones (``saving/async_saves.py``) call, in this order:
:meth:`Planner.read_state`, :meth:`Planner.propose`, :meth:`Planner.assign` with the proposals of all ranks,
:meth:`Planner.plan`, and :meth:`Planner.create_on_node`. A save that uses the plan of the previous one calls only
:meth:`Planner.reserve`, :meth:`Planner.object_jobs` and :meth:`Planner.create_on_node` (``saving/plan_reuse.py``).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.formats import hf, safetensors, torch_save
from automodel_ckpt.checkpoint.formats.assignment import Share
from automodel_ckpt.checkpoint.formats.description import describe
from automodel_ckpt.checkpoint.formats.planning import TreePlan
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.jobs.rank_manifest import RankManifest
from automodel_ckpt.checkpoint.jobs.reuse import Previous, ReusableFiles, links_are_supported
from automodel_ckpt.checkpoint.parts.discovery import Item, classify
from automodel_ckpt.checkpoint.parts.manifest import NOT_SAVED, StateRecord
from automodel_ckpt.checkpoint.pickles.pickle_values import saved
from automodel_ckpt.checkpoint.saving.agreement import (
    ReplicaWarnings,
    replicated_digests,
    shares_of_all,
    summarize,
)
from automodel_ckpt.checkpoint.saving.forecast import Forecast, forecast_bytes, free_bytes
from automodel_ckpt.checkpoint.saving.save import Proposal, Save, SavePlan, SaveSettings
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.checkpoint.state.module_tensors import (
    module_state,
    stored_layout,
    untrained_names,
)
from automodel_ckpt.checkpoint.state.optimizer_names import Owners, optimizer_tree, trained_by_all
from automodel_ckpt.checkpoint.state.optimizer_state import (
    check_consistent,
    check_flat,
    digests_of_own,
)
from automodel_ckpt.checkpoint.state.storable import check_safe, check_safe_values, check_storable
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed

# Below this size, separate files cost more than they save.
_MIN_SEPARATE_BYTES = 16 << 20


class Planner:
    """Plans saves with *settings*: what this rank writes. Only :meth:`assign` and what it calls are collective."""

    def __init__(self, settings: SaveSettings) -> None:
        self.settings = settings
        self.disk_space = DiskSpace(settings)
        # Whether the saves have files that can be shared; unknown before the first plan.
        self._has_reusable_files = True
        self.replica_warnings = ReplicaWarnings(is_reporter=settings.ranks.rank == 0)
        self.expected_bytes = 0
        """Expected bytes on disk of the save that was proposed last; set on rank 0."""

    # ---------------------------------------------------------------- before training

    def check_state(self, items: Sequence[Item]) -> None:
        """Raise :class:`RecipeError` for state of *items* that cannot be stored safely."""
        owners = Owners(items)
        for item in items:
            if item.kind in ("object", "lr_scheduler"):
                check_safe(item.name, item.value.state_dict())
            elif item.kind == "module":
                tree, _ = module_state(item.value)
                check_storable(item.name, tree)
                check_safe_values(item.name, tree)
                # Also raises for meshes that cannot be described.
                describe(tree, {}, {})
            elif self.settings.save_optimizer:
                owners.check_parameters(item)
                for index, group in enumerate(item.value.param_groups):
                    options = _group_options(index, group)
                    check_safe_values(item.name, options)
                check_flat(item.name, {"state": {}, "param_groups": item.value.param_groups})

    # ---------------------------------------------------------------- what this rank has

    def read_state(self, save: Save, state: Mapping[str, Any]) -> None:
        """Read the *state* of this rank into *save*. Raises :class:`RecipeError` for state that cannot be stored."""
        save.items = classify(state)
        # A save that could not use the plan of the previous one still refers to it.
        save.plan, save.objects = SavePlan(), {}
        trees = save.plan.trees
        owners = Owners(save.items)
        for item in save.items:
            directory = layout.state_directory(item.name)
            if item.kind == "module":
                tree, tied = module_state(item.value, detached=False)
                complete = stored_layout(item.value).complete
                save.plan.tied[item.name] = tied if complete is None else dict(complete.tied)
                untrained = untrained_names(item.value)
                kinds = {name: kind for name, kind in untrained.items() if name in tree}
                trees[item.name] = TreePlan(item.name, directory, tree, nested=False, kinds=kinds)
            elif item.kind == "optimizer" and self.settings.save_optimizer:
                tree = optimizer_tree(item, save.items, owners)
                trees[item.name] = TreePlan(item.name, directory, tree, nested=True)
            elif item.kind == "object":
                save.objects[item.name] = item.value.state_dict()

    def propose(self, save: Save) -> Proposal:
        """Describe what this rank has, for the other ranks, after :meth:`read_state`.

        Rank 0 also creates the staging directory, which the caller removes on failure. Raises OSError, and
        :class:`SaveFailed` where the disk is too full.
        """
        for tree in save.plan.trees.values():
            state = tree.flatten()
            check_storable(tree.name, state)
            check_safe_values(tree.name, state)
        save.descriptions = {tree.name: tree.describe() for tree in save.plan.trees.values()}
        digests = {key: check_safe(key, value) for key, value in save.objects.items()}
        if self.settings.save_optimizer:
            for item in save.items:
                if item.kind == "optimizer" and trained_by_all(item.value) is None:
                    digests |= digests_of_own(item.name, item.value)
        save.replicated = self._replicated(save)
        summaries = {}
        for name, description in save.descriptions.items():
            summaries[name] = summarize(description, save.replicated[name])
        proposal = Proposal(summaries, digests, self.settings.ranks.dp_rank)
        if self.settings.ranks.rank == 0:
            states = {tree.name: tree.state_dict for tree in save.plan.trees.values()}
            forecast = self.disk_space.forecast(save.items, states)
            self.expected_bytes = forecast.nbytes
            proposal.staging = self.reserve(save, forecast)
            proposal.maps, proposal.tied = self._maps(save), save.plan.tied
            proposal.previous = save.previous
        return proposal

    def _replicated(self, save: Save) -> dict[str, dict[str, str]]:
        """The digests of what only one rank stores, by tree; without buffers that DDP copies to all ranks anyway."""
        copied = set()
        for item in save.items:
            if isinstance(item.value, DistributedDataParallel) and item.value.broadcast_buffers:
                copied.add(item.name)
        found = {}
        for name, tree in save.plan.trees.items():
            found[name] = replicated_digests(tree, compares_buffers=name not in copied)
        return found

    # ---------------------------------------------------------------- what only rank 0 decides

    def reserve(self, save: Save, forecast: Forecast) -> str:
        """Create the staging directory of *save*; only rank 0 calls this. Returns its path.

        Raises OSError, and :class:`SaveFailed` where the disk is too full.
        """
        # At every save, not only the first: it checks that no other run took over the directory.
        self.settings.run.hold()
        self.disk_space.check_fits(forecast, save.items)
        directories = [tree.directory for tree in save.plan.trees.values()]
        staging = save.staging.reserve(self.settings.run.root, str(save.name), directories)
        save.previous = self._find_previous(staging)
        return str(staging)

    def _find_previous(self, staging: Path) -> Previous | None:
        """A save in *staging* can share files of this checkpoint. Returns None when there is none."""
        if self.settings.incremental is False or not self._has_reusable_files:
            return None
        previous = self.settings.previous()
        if previous is None or not links_are_supported(Path(previous.root), staging):
            return None
        return previous

    def _maps(self, save: Save) -> dict[str, BaseMaps]:
        """How the files that all ranks write together are named and split, by module.

        All modules have such files in layout hf, only adapters in layout adapter, none in layout shards.
        """
        found: dict[str, BaseMaps] = {}
        if self.settings.model_layout == "shards":
            return found
        for name in save.plan.tied:
            assets = self.settings.assets.get(name)
            # Without dtypes: a checkpoint stores each tensor in its own dtype, only an export casts.
            maps = BaseMaps() if assets is None else replace(assets.maps, dtype=None)
            if self.settings.model_layout == "hf" or maps.is_adapter:
                found[name] = maps
        return found

    # ---------------------------------------------------------------- what this rank writes

    def assign(
        self, save: Save, proposals: Sequence[Proposal], group: ProcessGroup | None
    ) -> dict[str, list[Share]]:
        """Exchange what the proposals of all ranks do not contain. Returns their shares of each tree. Collective.

        Raises :class:`SaveFailed` on all ranks where they do not have the same trees.
        """
        _require_same_trees(proposals)
        shares: dict[str, list[Share]] = {}
        # Sorted: the order of the state may differ between ranks, the order of their exchanges may not.
        for name in sorted(save.plan.trees):
            summaries = [proposal.trees[name] for proposal in proposals]
            mine = save.descriptions[name]
            shares[name] = shares_of_all(group, mine, summaries)
        digests = []
        for proposal in proposals:
            digests.append({name: tree.replicated for name, tree in proposal.trees.items()})
        self.replica_warnings.compare(group, save.replicated, digests)
        return shares

    def plan(
        self, save: Save, proposals: list[Proposal], shares: Mapping[str, Sequence[Share]]
    ) -> tuple[RankManifest, list[FileJob], list[FileJob]]:
        """Plan what this rank writes: (rank manifest to be filled in, jobs of trees, jobs of objects).

        Also completes the plan and the records of *save*. *shares* come from all ranks, by tree.
        """
        digests = [proposal.digests for proposal in proposals]
        dp_ranks = [proposal.dp_rank for proposal in proposals]
        check_consistent(digests)
        save.previous = proposals[0].previous
        written = RankManifest(self.settings.ranks.rank)
        jobs: list[FileJob] = []
        self._has_reusable_files = False
        for tree in save.plan.trees.values():
            tree.assign(shares[tree.name], self.settings.ranks.rank)
            untrained = self._untrained_in(tree)
            self._has_reusable_files = self._has_reusable_files or bool(untrained)
            jobs += self._tree_jobs(tree, save, proposals[0], untrained)
            written.trees[tree.name] = save.plan.layouts[tree.name].rank_tree()
        return written, jobs, self.object_jobs(save, digests, dp_ranks)

    def _untrained_in(self, tree: TreePlan) -> Mapping[str, str]:
        """{name: kind} of the tensors of an assigned tree that separate files store; the same on all ranks."""
        kinds = tree.kinds
        if not self.settings.shares_files or not kinds:
            return {}
        if self.settings.incremental is True:
            return kinds
        nbytes: Counter[str] = Counter()
        for name, tensor in tree.assignment.tensors.items():
            if name in kinds:
                nbytes[kinds[name]] += tensor.nbytes
        return {name: kind for name, kind in kinds.items() if nbytes[kind] >= _MIN_SEPARATE_BYTES}

    def _tree_jobs(
        self, tree: TreePlan, save: Save, of_rank0: Proposal, untrained: Mapping[str, str]
    ) -> list[FileJob]:
        """Choose the format of a tree; return the jobs of this rank. *untrained* tensors get separate files."""
        plan, name, rank = save.plan, tree.name, self.settings.ranks.rank
        # Rank 0's for all ranks: each computes the offsets in files that all of them write.
        maps = of_rank0.maps.get(name)
        if maps is not None:
            tied = of_rank0.tied[name]
            file_layout = hf.lay_out(tree, tree.directory, maps, tied)
            plan.formats[name] = hf.NAME
            plan.file_layouts[name] = file_layout
            plan.layouts[name] = file_layout.tree
            return list(hf.plan_jobs(tree, rank, file_layout))
        is_module = name in plan.tied
        if is_module and self.settings.model_format == safetensors.NAME:
            assets = self.settings.assets.get(name)
            mapping = {} if assets is None else assets.file_index_mapping
            files = safetensors.ShardFiles(mapping, untrained)
            plan.formats[name] = safetensors.NAME
            plan.layouts[name] = safetensors.lay_out(tree, files)
            return list(safetensors.plan_jobs(tree, rank, files))
        plan.formats[name] = torch_save.NAME
        plan.layouts[name] = torch_save.lay_out(tree)
        return list(torch_save.plan_jobs(tree, rank))

    def object_jobs(
        self,
        save: Save,
        digests: Sequence[Mapping[str, str]],
        dp_ranks: Sequence[int],
    ) -> list[FileJob]:
        """The jobs of objects, which are planned anew at each save; also sets the records of *save*."""
        objects = ObjectPlanner(self.settings.ranks, digests, dp_ranks)
        save.records = {item.name: self._record(item, save, objects) for item in save.items}
        return objects.jobs

    def _record(self, item: Item, save: Save, objects: ObjectPlanner) -> StateRecord:
        if item.kind == "object":
            return objects.plan(item, partial(saved, save.objects[item.name]))
        scope: str = item.scope
        if item.kind != "module" and not self.settings.save_optimizer:
            scope = NOT_SAVED
        return StateRecord(item.kind, scope, item.path, aliases=item.aliases)

    def create_on_node(self, save: Save) -> None:
        """Create the staging directory of *save* on the node of this rank, if each node has one. Raises OSError.

        Called by every rank before it writes.
        """
        if self.settings.nodes is None:
            return
        directories = [tree.directory for tree in save.plan.trees.values()]
        self.settings.nodes.create(save.staging.path, directories)
        if self.settings.nodes.is_leader:
            save.staging.own()


def _require_same_trees(proposals: Sequence[Proposal]) -> None:
    """Raise :class:`SaveFailed` where a rank has other modules or optimizers than rank 0."""
    for rank, proposal in enumerate(proposals):
        if differing := sorted(proposals[0].trees.keys() ^ proposal.trees.keys()):
            raise SaveFailed(
                "a module or optimizer is not on all ranks",
                where=differing[0],
                value=f"ranks 0 and {rank} differ",
                hint="give every rank the same attributes; a rank may have no tensors in them",
            )


def _group_options(index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group by the names that a checkpoint gives them."""
    return {f"param_groups.{index}.{key}": value for key, value in group.items() if key != "params"}


class DiskSpace:
    """Forecasts of the saves with *settings*."""

    def __init__(self, settings: SaveSettings) -> None:
        self._settings = settings

    def forecast(
        self, items: Iterable[Item], states: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Forecast:
        """The expected bytes of one save of *items* with its export, and the free bytes."""
        settings, items = self._settings, list(items)
        side_bytes = sum(assets.nbytes for assets in settings.assets.values())
        export = 0
        if settings.makes_export(last=True):
            export = forecast_bytes(
                [item for item in items if item.name in settings.assets],
                world_size=1,
                save_optimizer=False,
                states=states,
                side_bytes=side_bytes,
            )
        expected = forecast_bytes(
            items,
            world_size=settings.ranks.world_size,
            save_optimizer=settings.save_optimizer,
            states=states,
            side_bytes=side_bytes,
        )
        if settings.makes_export(last=False):
            expected += export
        return Forecast(expected, free_bytes(settings.run.path), export)

    def check_fits(self, forecast: Forecast, items: Iterable[Item]) -> None:
        """Raise :class:`SaveFailed` where the disk has too little space for one checkpoint of *items*.

        The files that it can share with an earlier checkpoint take no space.
        """
        share = 1.0 if self._settings.nodes is None else self._settings.nodes.share
        nbytes = int(forecast.nbytes * share)
        if nbytes <= forecast.free_bytes:
            return
        # Only now: it reads the manifest of the earlier checkpoint.
        nbytes -= self._shared_bytes(items)
        if nbytes <= forecast.free_bytes:
            return
        needed, free = size_text(nbytes), size_text(forecast.free_bytes)
        raise SaveFailed(
            "a checkpoint does not fit on the disk",
            where=str(self._settings.run.path),
            value=f"it needs about {needed}, {free} are free",
            hint="free space (`ckpt prune` removes old checkpoints), set checkpoint.keep_last, "
            "or another checkpoint.checkpoint_dir",
        )

    def _shared_bytes(self, items: Iterable[Item]) -> int:
        """The bytes of the files of frozen parameters that a save of *items* shares with an earlier checkpoint."""
        reusable = ReusableFiles.open(
            self._settings.previous() if self._settings.shares_files else None
        )
        if reusable is None:
            return 0
        frozen = {}
        for item in items:
            if item.kind == "module":
                kinds = untrained_names(item.value)
                frozen[item.name] = {name for name in kinds if kinds[name] == layout.FROZEN}
        try:
            return reusable.shared_bytes(frozen)
        except CheckpointUnusable:
            return 0


class ObjectPlanner:
    """Plans how objects are stored, once or per rank; :attr:`jobs` are the files that this rank writes."""

    def __init__(
        self,
        ranks: layout.RankLayout,
        digests: Sequence[Mapping[str, str]],
        dp_ranks: Sequence[int],
    ) -> None:
        """*digests* (of each object's state, by name) and *dp_ranks* come from every rank, in order."""
        self._rank, self._only_dp = ranks.rank, ranks.dp_size == ranks.world_size
        self._digests, self._dp_ranks = digests, dp_ranks
        self.jobs: list[FileJob] = []
        # Ranks with the same part of the data have the same state: the first of them writes it.
        self._dp_writers: dict[int, int] = {}
        for rank, dp_rank in enumerate(dp_ranks):
            self._dp_writers.setdefault(dp_rank, rank)

    def plan(self, item: Item, content: Callable[[], memoryview]) -> StateRecord:
        """Plan this rank's share of an object's state; the record is the same on all ranks.

        *content* returns its bytes when they are written.
        """
        scope = item.scope
        # Decided by the digests of all ranks, so that all ranks plan the same files.
        if scope == "replicated" and len({digests[item.name] for digests in self._digests}) > 1:
            scope = "rank"
        files = self._files(item.name, scope)
        file = files.get(self._rank)
        if file is not None:
            self.jobs.append(FileJob(file, [Chunk(0, content)]))
        names = tuple(files.values())
        directory = os.path.dirname(names[0]) or names[0]
        return StateRecord(item.kind, scope, directory, names, item.aliases)

    def _files(self, name: str, scope: layout.Scope) -> dict[int, str]:
        """The file that each writing rank writes of an object."""
        if scope == "replicated":
            return {0: layout.state_file(name)}
        writers = list(enumerate(self._dp_ranks))
        if scope == "dp_rank":
            writers = [(rank, dp_rank) for dp_rank, rank in sorted(self._dp_writers.items())]
        files: dict[int, str] = {}
        for rank, dp_rank in writers:
            files[rank] = layout.rank_file(name, scope, rank, dp_rank, only_dp=self._only_dp)
        return files
