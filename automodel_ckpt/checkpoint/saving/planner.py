"""The plan of a save on one rank: which state there is, and what this rank writes.

Synchronous saves (``saving/publisher.py``) and asynchronous ones (``saving/async_saves.py``) call, in this order:
:meth:`Planner.read_state`, :meth:`Planner.propose`, :meth:`Planner.assign` with the proposals of all ranks,
:meth:`Planner.plan`, and :meth:`Planner.create_on_node`. An asynchronous save that uses the plan of the previous one
calls :meth:`Planner.reserve` and :meth:`Planner.object_jobs` instead of the middle ones.

Every rank sends a digest of its description of each tree and the first ranks of its meshes. Usually all digests of a
tree are equal, and nothing else is sent. Otherwise (stages of a pipeline), one rank of each digest sends its
description. What each rank has as a whole is stored by one of them. Another digest shows whether the ranks have the
same; if not, a warning names what differs.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from automodel_ckpt.base.durable_io import free_bytes
from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.export.plan import BaseMaps
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import digest_of
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts, Values
from automodel_ckpt.checkpoint.formats.planning import Share, TreeDescription, TreePlan
from automodel_ckpt.checkpoint.formats.rank_files import (
    HF,
    SAFETENSORS,
    TORCH_SAVE,
    ShardFiles,
    hf_jobs,
    item_jobs,
    lay_out_hf,
    lay_out_items,
    lay_out_shards,
    shard_jobs,
)
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob, RankManifest
from automodel_ckpt.checkpoint.jobs.reuse import links_are_supported
from automodel_ckpt.checkpoint.parts.discovery import ADD_TO_STATE, Item, classify
from automodel_ckpt.checkpoint.parts.manifest import NOT_SAVED, StateRecord
from automodel_ckpt.checkpoint.saving.save import (
    Forecast,
    Proposal,
    Save,
    SaveSettings,
    TreeSummary,
    forecast_bytes,
)
from automodel_ckpt.checkpoint.state.module_tensors import (
    Owners,
    check_consistent,
    digests_of_own,
    frozen_names,
    module_state,
    optimizer_tree,
    stored_layout,
    trained_by_all,
    untrained_names,
)
from automodel_ckpt.checkpoint.state.storable import (
    check_safe,
    check_safe_values,
    check_storable,
    is_sharded,
    saved,
)
from automodel_ckpt.errors import RecipeError, SaveFailed
from automodel_ckpt.parallel.ranks import agree

log = logging.getLogger("automodel_ckpt")

_MAX_NAMED = 5
# Below this size, separate files cost more than they save.
_MIN_SEPARATE_BYTES = 16 << 20


class Planner:
    """Plans saves with *settings*: what this rank writes. Only :meth:`assign` and what it calls are collective."""

    def __init__(self, settings: SaveSettings) -> None:
        self.settings = settings
        # Whether the saves have files that can be shared; unknown before the first plan.
        self._has_reusable_files = True
        self.replica_warnings = ReplicaWarnings(is_reporter=settings.ranks.rank == 0)
        self.expected_bytes = 0
        """Expected bytes on disk of the save that was proposed last; set on rank 0."""

    # ---------------------------------------------------------------- what this rank has

    def check_state(self, state: Values) -> None:
        """Raise :class:`RecipeError` for *state* that cannot be stored safely, :class:`SaveFailed` for its meshes."""
        save = Save(layout.CheckpointName(0, 0))
        self.read_state(save, state)
        _check_trees(save)
        for tree in save.trees.values():
            tree.describe()
        for name, value in save.objects.items():
            check_safe(name, value)

    def read_state(self, save: Save, state: Values) -> None:
        """Read the *state* of this rank into *save*. Raises :class:`RecipeError` for state that cannot be stored."""
        save.items = classify(state)
        # A save that could not use the plan of the previous one still refers to it.
        save.trees, save.objects = {}, {}
        owners = Owners(save.items)
        for item in save.items:
            directory = layout.state_directory(item.name)
            if item.kind == "module":
                tree, tied = module_state(item.value, detached=False)
                complete = stored_layout(item.value).complete
                tied = tied if complete is None else dict(complete.tied)
                kinds = {k: kind for k, kind in untrained_names(item.value).items() if k in tree}
                plan = TreePlan(item.name, directory, tree, nested=False, kinds=kinds, tied=tied)
                save.trees[item.name] = plan
            elif item.kind == "optimizer" and self.settings.options.save_optimizer:
                tree = optimizer_tree(item, save.items, owners)
                save.trees[item.name] = TreePlan(item.name, directory, tree, nested=True)
            elif item.kind == "object":
                save.objects[item.name] = item.value.state_dict()

    def propose(self, save: Save) -> Proposal:
        """Describe what this rank has, for the other ranks, after :meth:`read_state`.

        Rank 0 also creates the staging directory, which the caller removes on failure. Raises OSError, and
        :class:`SaveFailed` where the disk is too full.
        """
        _check_trees(save)
        for name in self.settings.assets.keys() - save.trees.keys():
            # Without its files, the checkpoint could not be exported.
            raise RecipeError(
                "the assets are of a module that is not part of the saved state",
                where="Checkpointer(assets=...)",
                value=name,
                hint=ADD_TO_STATE,
            )
        save.descriptions = {tree.name: tree.describe() for tree in save.trees.values()}
        proposal = self.propose_values(save)
        for name, description in save.descriptions.items():
            proposal.trees[name] = TreeSummary(description.digest(), description.origins)
        if self.settings.ranks.rank == 0:
            forecast = self.forecast(save.items)
            self.expected_bytes = forecast.nbytes
            self.reserve(save, forecast, proposal)
            proposal.maps = self._maps(save)
            proposal.tied = {name: dict(save.trees[name].tied) for name in proposal.maps}
        return proposal

    def propose_values(self, save: Save) -> Proposal:
        """Digest what is small or stored by one rank only."""
        digests = {key: check_safe(key, value) for key, value in save.objects.items()}
        # Without buffers that DDP copies to all ranks anyway.
        copied = set()
        for item in save.items:
            if isinstance(item.value, DistributedDataParallel) and item.value.broadcast_buffers:
                copied.add(item.name)
            is_stored = item.kind == "optimizer" and item.name in save.trees
            if is_stored and trained_by_all(item.value) is None:
                digests |= digests_of_own(item.name, item.value)
        for name, tree in save.trees.items():
            save.replicated[name] = replicated_digests(tree, compares_buffers=name not in copied)
        replicated = {name: digest_of_all(values) for name, values in save.replicated.items()}
        return Proposal(digests, replicated, self.settings.ranks.dp_rank)

    # ---------------------------------------------------------------- what only rank 0 decides

    def reserve(self, save: Save, forecast: Forecast, proposal: Proposal) -> None:
        """Create the staging directory of *save*, and name it in the *proposal*; only rank 0 calls this.

        Raises OSError, and :class:`SaveFailed` where the disk is too full.
        """
        # At every save, not only the first: it checks that no other run took over the directory.
        self.settings.run.hold()
        self.check_fits(forecast, save.items)
        directories = [tree.directory for tree in save.trees.values()]
        staging = save.staging.reserve(self.settings.run.root, str(save.name), directories)
        if self.settings.incremental is not False and self._has_reusable_files:
            previous = self.settings.previous()
            if previous is not None and links_are_supported(Path(previous.root), staging):
                proposal.previous = previous
        # Last: without it, the other ranks know that this failed.
        proposal.staging = str(staging)

    def _maps(self, save: Save) -> dict[str, BaseMaps]:
        """How the files that all ranks write together are named and split, by module.

        All modules have such files in layout hf, only adapters in layout adapter, none in layout shards.
        """
        found = {}
        for name, tree in save.trees.items():
            if tree.nested or self.settings.model_layout == "shards":
                continue
            assets = self.settings.assets.get(name)
            # Without dtypes: a checkpoint stores each tensor in its own dtype, only an export casts.
            maps = BaseMaps() if assets is None else replace(assets.maps, dtype=None)
            if self.settings.model_layout == "hf" or maps.is_adapter:
                found[name] = maps
        return found

    def forecast(self, items: Iterable[Item]) -> Forecast:
        """The expected bytes of one save of *items* with its export, and the free bytes."""
        settings, items = self.settings, list(items)
        side_bytes = sum(assets.nbytes for assets in settings.assets.values())
        expected = forecast_bytes(
            items,
            world_size=settings.ranks.world_size,
            save_optimizer=settings.options.save_optimizer,
            side_bytes=side_bytes,
        )
        if settings.makes_export(last=False):
            modules = [item for item in items if item.name in settings.assets]
            expected += forecast_bytes(
                modules, world_size=1, save_optimizer=False, side_bytes=side_bytes
            )
        return Forecast(expected, free_bytes(settings.run.path))

    def check_fits(self, forecast: Forecast, items: Iterable[Item]) -> None:
        """Raise :class:`SaveFailed` where the disk has too little space for one checkpoint of *items*.

        The files of frozen parameters that it can share with an earlier checkpoint take no space.
        """
        settings = self.settings
        nbytes = int(forecast.nbytes * (1.0 if settings.nodes is None else settings.nodes.share))
        # The earlier checkpoint is looked for only where it matters.
        if nbytes > forecast.free_bytes and settings.shares_files and settings.previous():
            for module in (item.value for item in items if item.kind == "module"):
                state, _ = module_state(module)
                for name in frozen_names(module).intersection(state):
                    nbytes -= state[name].nbytes
        if nbytes > forecast.free_bytes:
            needed, free = size_text(nbytes), size_text(forecast.free_bytes)
            raise SaveFailed(
                "a checkpoint does not fit on the disk",
                where=settings.run.path,
                value=f"it needs about {needed}, {free} are free",
                hint="free space (`ckpt prune` removes old checkpoints), set checkpoint.keep_last, "
                "or another checkpoint.checkpoint_dir",
            )

    # ---------------------------------------------------------------- what this rank writes

    def assign(self, save: Save, proposals: Sequence[Proposal]) -> dict[str, list[Share]]:
        """Exchange what the proposals of all ranks do not contain. Returns their shares of each tree. Collective.

        Raises :class:`SaveFailed` on all ranks where they do not have the same trees.
        """
        for rank, proposal in enumerate(proposals):
            if differing := sorted(proposals[0].trees.keys() ^ proposal.trees.keys()):
                raise SaveFailed(
                    "every rank must have the same modules and optimizers, which may be without tensors",
                    where=differing[0],
                    value=f"ranks 0 and {rank} differ",
                    hint="",
                )
        shares = {}
        # Sorted: the order of the state may differ between ranks, the order of their exchanges may not.
        for name in sorted(save.trees):
            summaries = [proposal.trees[name] for proposal in proposals]
            mine = save.descriptions[name]
            shares[name] = shares_of_all(self.settings.group, mine, summaries)
        replicated = [proposal.replicated for proposal in proposals]
        self.replica_warnings.compare(self.settings.group, save.replicated, replicated)
        return shares

    def plan(
        self, save: Save, proposals: list[Proposal], shares: Mapping[str, Sequence[Share]]
    ) -> tuple[RankManifest, list[FileJob], list[FileJob]]:
        """Plan what this rank writes: (rank manifest to be filled in, jobs of trees, jobs of objects).

        Also completes the plan and the records of *save*. *shares* come from all ranks, by tree.
        """
        digests = [proposal.digests or {} for proposal in proposals]
        check_consistent(digests)
        save.previous = proposals[0].previous
        written = RankManifest(self.settings.ranks.rank)
        jobs: list[FileJob] = []
        self._has_reusable_files = False
        for tree in save.trees.values():
            tree.assign(shares[tree.name])
            untrained = self._untrained_in(tree)
            self._has_reusable_files = self._has_reusable_files or bool(untrained)
            jobs += self._tree_jobs(tree, proposals[0], untrained)
            written.trees[tree.name] = tree.layout.rank_tree()
        dp_ranks = [proposal.dp_rank for proposal in proposals]
        return written, jobs, self.object_jobs(save, digests, dp_ranks)

    def _untrained_in(self, tree: TreePlan) -> Texts:
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

    def _tree_jobs(self, tree: TreePlan, of_rank0: Proposal, untrained: Texts) -> Iterator[FileJob]:
        """Choose the format of a tree; return the jobs of this rank. *untrained* tensors get separate files."""
        name, rank = tree.name, self.settings.ranks.rank
        # Rank 0's for all ranks: each computes the offsets in files that all of them write.
        if (maps := of_rank0.maps.get(name)) is not None:
            tree.format, tree.layout = HF, lay_out_hf(tree, maps, of_rank0.tied[name])
            return hf_jobs(tree, rank)
        if not tree.nested and self.settings.options.model_save_format == SAFETENSORS:
            assets = self.settings.assets.get(name)
            mapping = {} if assets is None else assets.file_index_mapping
            files = ShardFiles(mapping, untrained)
            tree.format, tree.layout = SAFETENSORS, lay_out_shards(tree, files)
            return shard_jobs(tree, rank, files)
        tree.format, tree.layout = TORCH_SAVE, lay_out_items(tree)
        return item_jobs(tree, rank)

    def object_jobs(
        self, save: Save, digests: Sequence[Texts], dp_ranks: Sequence[int]
    ) -> list[FileJob]:
        """The jobs of objects, which are planned anew at each save; also sets the records of *save*.

        *digests* (of each object's state, by name) and *dp_ranks* come from every rank, in order.
        """
        ranks, jobs = self.settings.ranks, []
        for item in save.items:
            scope: str = item.scope
            if item.kind != "object":
                if item.kind != "module" and not self.settings.options.save_optimizer:
                    scope = NOT_SAVED
                record = StateRecord(item.kind, scope, item.path, aliases=item.aliases)
                save.records[item.name] = record
                continue
            # Decided by the digests of all ranks, so that all ranks plan the same files.
            differs = len({of_rank[item.name] for of_rank in digests}) > 1
            object_scope = "rank" if item.scope == "replicated" and differs else item.scope
            only_dp = ranks.dp_size == ranks.world_size
            files = _object_files(item.name, object_scope, dp_ranks, only_dp=only_dp)
            if ranks.rank in files:
                content = partial(saved, save.objects[item.name])
                jobs.append(FileJob(files[ranks.rank], [Chunk(0, content)]))
            names = tuple(files.values())
            directory = os.path.dirname(names[0]) or names[0]
            record = StateRecord(item.kind, object_scope, directory, names, item.aliases)
            save.records[item.name] = record
        return jobs

    def create_on_node(self, save: Save) -> None:
        """Create the staging directory of *save* on the node of this rank, if each node has one. Raises OSError.

        Called by every rank before it writes.
        """
        if self.settings.nodes is None:
            return
        directories = [tree.directory for tree in save.trees.values()]
        self.settings.nodes.create(save.staging.path, directories)
        if self.settings.nodes.is_leader:
            save.staging.is_owner = True


def _check_trees(save: Save) -> None:
    """Raise :class:`RecipeError` for what cannot be stored safely in the trees of *save*."""
    for tree in save.trees.values():
        check_storable(tree.name, tree.flat)
        check_safe_values(tree.name, tree.flat)


def _object_files(
    name: str, scope: layout.Scope, dp_ranks: Sequence[int], *, only_dp: bool
) -> dict[int, str]:
    """The file that each writing rank writes of an object."""
    if scope == "replicated":
        return {0: layout.state_file(name)}
    files = {}
    first: dict[int, int] = {}
    for rank, dp_rank in enumerate(dp_ranks):
        # Ranks with the same part of the data have the same state: the first of them writes it.
        if first.setdefault(dp_rank, rank) == rank or scope != "dp_rank":
            files[rank] = layout.rank_file(name, scope, rank, dp_rank, only_dp=only_dp)
    return files


# ---------------------------------------------------------------- what ranks exchange


def digest_of_all(digests: Texts) -> str:
    """Return one digest of the :func:`replicated_digests` of a tree."""
    return digest_of(repr(sorted(digests.items())).encode())


def replicated_digests(plan: TreePlan, *, compares_buffers: bool) -> TextDict:
    """Return the digests of what this rank has as a whole, and only one rank stores, by name.

    That is what is not a tensor, the options of parameter groups and, with *compares_buffers*, buffers. Parameters and
    their optimizer state are not compared: they are the same wherever a strategy does not shard them.
    """
    options = f"{plan.name}.param_groups."
    found = {}
    for name, value in plan.flat.items():
        is_tensor = isinstance(value, torch.Tensor)
        is_buffer = compares_buffers and plan.kinds.get(name) == layout.BUFFERS
        if is_tensor and not is_buffer and not name.startswith(options):
            continue
        if is_sharded(value):
            if not all(placement.is_replicate() for placement in value.placements):
                continue
            value = value.to_local()
        found[name] = check_safe(plan.name, {name: value})
    return found


class ReplicaWarnings:
    """Warns where ranks have different values of what only one of them stores: once for each value.

    *is_reporter*: whether this rank prints the warnings.
    """

    def __init__(self, *, is_reporter: bool) -> None:
        self._is_reporter = is_reporter
        self._reported: set[tuple[str, str]] = set()

    def compare(
        self,
        group: ProcessGroup | None,
        mine: Mapping[str, Texts],
        digests: Sequence[Texts],
    ) -> None:
        """Compare the values of all ranks. Collective.

        *mine* has the :func:`replicated_digests` of this rank by tree, *digests* are the :func:`digest_of_all` of all
        ranks by tree.
        """
        differing = {}
        for tree, values in mine.items():
            if len({of_rank[tree] for of_rank in digests}) > 1:
                differing[tree] = values
        # The digests are the same on all ranks, so that all of them enter this collective, or none does.
        if not differing:
            return
        all_digests = agree.gather_objects(group, differing)
        if not self._is_reporter:
            return
        for tree in sorted(differing):
            ranks_of = _differing([of_rank[tree] for of_rank in all_digests])
            new = [name for name in ranks_of if (tree, name) not in self._reported]
            self._reported.update((tree, name) for name in new)
            for name in new[:_MAX_NAMED]:
                stored, *others = ranks_of[name]
                more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
                listed = ", ".join(map(str, others[:_MAX_NAMED])) + more
                log.warning(
                    f"{tree}: {name} differs between ranks. The checkpoint has the value of rank {stored}, and a "
                    f"resume gives it to all ranks. Others have: rank {listed}"
                )
            if len(new) > _MAX_NAMED:
                log.warning("%s: %d more values differ", tree, len(new) - _MAX_NAMED)


def _differing(digests: Sequence[Texts]) -> dict[str, list[int]]:
    """Return, for each name with several digests, the first rank that has it, then the ranks with another digest."""
    ranks: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(digests):
        for name, digest in of_rank.items():
            known = ranks.setdefault(name, [rank])
            if digests[known[0]][name] != digest:
                known.append(rank)
    return {name: of_name for name, of_name in ranks.items() if len(of_name) > 1}


def shares_of_all(
    group: ProcessGroup | None,
    mine: TreeDescription,
    summaries: Sequence[TreeSummary],
) -> list[Share]:
    """Return what all ranks have of a tree; the same on all ranks. Collective.

    *mine* is the description of this rank, *summaries* come from all ranks, in order.
    """
    ranks_of: dict[str, list[int]] = {}
    for number, summary in enumerate(summaries):
        ranks_of.setdefault(summary.digest, []).append(number)
    shares = []
    for ranks in ranks_of.values():
        description = mine
        if len(ranks_of) > 1:
            description = agree.broadcast_object(group, mine, source=ranks[0])
        shares.append(Share(description, ranks, [summaries[each].origins for each in ranks]))
    return shares
