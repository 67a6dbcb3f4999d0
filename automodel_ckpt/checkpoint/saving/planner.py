"""The plan of a save on one rank: the state, what this rank writes, and the manifest.

Used by synchronous saves (``checkpointer.py``) and asynchronous ones (``saving/async_saves.py``).
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.digests import FileRecord
from automodel_ckpt.checkpoint.discovery import Item, classify
from automodel_ckpt.checkpoint.formats import hf, safetensors, torch_save
from automodel_ckpt.checkpoint.formats.assignment import Share
from automodel_ckpt.checkpoint.formats.description import TreeDescription
from automodel_ckpt.checkpoint.formats.planning import TreePlan
from automodel_ckpt.checkpoint.formats.tree_layout import TreeLayout
from automodel_ckpt.checkpoint.manifest import NOT_SAVED, Manifest, StateRecord, Tree
from automodel_ckpt.checkpoint.module_tensors import module_state, stored_layout, untrained_names
from automodel_ckpt.checkpoint.options import ModelFormat, ModelLayout, Options
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.saving.agreement import TreeSummary, shares_of_all, summarize
from automodel_ckpt.checkpoint.saving.environment import environment
from automodel_ckpt.checkpoint.saving.forecast import (
    Forecast,
    forecast_bytes,
    forecast_manifest_bytes,
    free_bytes,
)
from automodel_ckpt.checkpoint.saving.side_files import Assets, write_finished, write_for_export
from automodel_ckpt.checkpoint.saving.staging import Staging
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.checkpoint.state.objects import ObjectPlanner
from automodel_ckpt.checkpoint.state.optimizer_names import Owners, optimizer_tree, trained_by_all
from automodel_ckpt.checkpoint.state.optimizer_state import (
    check_consistent,
    digests_of_own,
    locations,
)
from automodel_ckpt.checkpoint.state.storable import check_safe, check_safe_values, check_storable
from automodel_ckpt.checkpoint.writing.jobs import FileJob, Job
from automodel_ckpt.checkpoint.writing.rank_manifest import RankManifest, merge_tree
from automodel_ckpt.checkpoint.writing.reuse import Previous, links_are_supported
from automodel_ckpt.errors import AutomodelError, SaveFailed
from automodel_ckpt.units import size_text

# Below this size, separate files cost more than they save.
_MIN_SEPARATE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save. *published* is false for an asynchronous save in progress: only its stall is known.

    Training waits for *stall_seconds*; the checkpoint is published after *total_seconds* (wall time). *nbytes* are
    those of all its files, *pruned* the checkpoints that the keep policy removed. *export* is the directory of the
    export, where one was made, and *export_failure* the reason where one failed. *export_command* is the shell command
    that exports the checkpoint, None where there is nothing to export.
    """

    path: Path
    step: int
    stall_seconds: float
    total_seconds: float = 0.0
    nbytes: int = 0
    free_bytes: int | None = None
    pruned: tuple[str, ...] = ()
    export: Path | None = None
    export_failure: AutomodelError | None = None
    published: bool = True
    export_command: str | None = None

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.total_seconds if self.total_seconds else 0.0


@dataclass(slots=True)
class Proposal:
    """What a rank sends to the others before a save.

    *trees* summarizes its trees, by name; *digests* are those of its other state. Only rank 0 sends the others:
    *staging*, the path that it created; *maps* and *tied*, which name and split the files that all ranks write
    together, by tree; *previous*, its choice of a checkpoint whose files are shared.
    """

    trees: dict[str, TreeSummary]
    digests: dict[str, str]
    dp_rank: int
    staging: str | None = None
    maps: dict[str, BaseMaps] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    previous: Previous | None = None


@dataclass(slots=True)
class Save:
    """One save, from its request to its publication. The first fields are the arguments of :meth:`Checkpointer.save`.

    The others are the state of this rank: *items*; a plan per tree (module or optimizer); the value of each other
    object; *tied* names by module; *file_layouts* of the modules whose files all ranks write together; *metadata*,
    the bytes of DCP's ``.metadata`` by tree, which depend on the plan only; *records*, how each attribute is stored;
    *descriptions* of the trees, until the plan is made; *layouts*, the order of their tensors in the files; *previous*,
    the checkpoint whose files are shared.
    While a synchronous save is written, *total_bytes* is about what this rank writes, and *bytes_before* the value of
    ``METER.nbytes`` at the start.
    """

    name: layout.CheckpointName
    config_yaml: str
    losses: dict[str, Any]
    progress: dict[str, Any]
    validated: bool
    last: bool
    before_publishing: Callable[[], None] | None
    on_saved: Callable[[SaveReport], None] | None
    started: float
    staging: Staging = field(default_factory=Staging)
    items: list[Item] = field(default_factory=list)
    trees: dict[str, TreePlan] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    file_layouts: dict[str, hf.FileLayout] = field(default_factory=dict)
    metadata: dict[str, bytes] = field(default_factory=dict)
    records: dict[str, StateRecord] = field(default_factory=dict)
    descriptions: dict[str, TreeDescription] = field(default_factory=dict)
    layouts: dict[str, TreeLayout] = field(default_factory=dict)
    previous: Previous | None = None
    bytes_before: int = 0
    total_bytes: int | None = None
    stall_seconds: float | None = None
    is_published: bool = False

    def reuse_plan(self, previous: Save) -> None:
        """Take the plan of a previous save, whose state has the same names, shapes, dtypes and placements."""
        self.trees, self.tied = previous.trees, previous.tied
        self.file_layouts, self.metadata = previous.file_layouts, previous.metadata
        self.layouts = previous.layouts


class Planner:
    """Plans saves into *run* and publishes them; calls no collective.

    Entries may be added to *assets* (by attribute name) before the first save. *options* are those of
    :class:`~automodel_ckpt.checkpoint.checkpointer.Checkpointer`.
    """

    def __init__(
        self,
        run: RunDirectory,
        ranks: layout.RankLayout,
        assets: dict[str, Assets],
        options: Options,
    ) -> None:
        self.run, self.ranks, self.assets = run, ranks, assets
        self.save_optimizer = options.save_optimizer
        self.notes: dict[str, str] = {}
        """What manifests contain about the run beside :func:`environment`."""
        self.resumed_from: str | None = None
        self._restore_from = options.restore_from
        self._format: ModelFormat = options.model_save_format
        self._layout: ModelLayout = options.model_layout or "shards"
        self._incremental = options.incremental
        # Whether the saves have files that can be shared; unknown before the first plan.
        self._has_reusable_files = True
        self.export_when = _export_when(options.save_consolidated, self._format, self._layout)
        self.expected_bytes = 0
        """Expected bytes on disk of the save that was proposed last; set on rank 0."""

    # ---------------------------------------------------------------- before

    def forecast(
        self, items: Iterable[Item], states: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Forecast:
        """The expected bytes of one save of *items*, and the free bytes."""
        items = list(items)
        side_bytes = sum(assets.nbytes for assets in self.assets.values())
        expected = forecast_bytes(
            items,
            world_size=self.ranks.world_size,
            save_optimizer=self.save_optimizer,
            num_exports=1 if self.assets and self.export_when == "every" else 0,
            states=states,
            side_bytes=side_bytes,
        )
        export = self._export_bytes(items, states, side_bytes)
        return Forecast(expected, free_bytes(self.run.path), export)

    def _export_bytes(
        self, items: Iterable[Item], states: Mapping[str, Mapping[str, Any]] | None, side_bytes: int
    ) -> int:
        """Expected bytes of the export of one checkpoint."""
        if not self.assets or self.export_when == "never":
            return 0
        modules = [item for item in items if item.name in self.assets]
        return forecast_bytes(
            modules, world_size=1, save_optimizer=False, states=states, side_bytes=side_bytes
        )

    def forecast_manifest_bytes(self, items: Iterable[Item]) -> int:
        """Expected bytes of the manifest of one save of *items*."""
        return forecast_manifest_bytes(items, save_optimizer=self.save_optimizer)

    def check_fits(self, forecast: Forecast) -> None:
        """Raise :class:`SaveFailed` where the disk has too little space for one checkpoint."""
        if forecast.fits:
            return
        needed, free = size_text(forecast.nbytes), size_text(forecast.free_bytes)
        raise SaveFailed(
            "a checkpoint does not fit on the disk",
            where=str(self.run.path),
            value=f"it needs about {needed}, {free} are free",
            hint="free space (`ckpt prune` removes old checkpoints), set checkpoint.keep_last, "
            "or another checkpoint.checkpoint_dir",
        )

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
            elif self.save_optimizer:
                owners.check_parameters(item)
                for index, group in enumerate(item.value.param_groups):
                    options = _group_options(index, group)
                    check_safe_values(item.name, options)
                    locations(options)

    # ---------------------------------------------------------------- plan

    def read_state(self, save: Save, state: Mapping[str, Any]) -> None:
        """Read the *state* of this rank into *save*. Raises :class:`RecipeError` for state that cannot be stored."""
        save.items = classify(state)
        save.trees, save.tied, save.objects = {}, {}, {}
        save.file_layouts, save.metadata, save.layouts = {}, {}, {}
        owners = Owners(save.items)
        for item in save.items:
            directory = layout.state_directory(item.name)
            if item.kind == "module":
                tree, tied = module_state(item.value)
                complete = stored_layout(item.value).complete
                save.tied[item.name] = tied if complete is None else dict(complete.tied)
                kinds: dict[str, str] = {}
                if self._incremental is not False:
                    untrained = untrained_names(item.value)
                    kinds = {name: kind for name, kind in untrained.items() if name in tree}
                plan = TreePlan(item.name, directory, tree, nested=False, kinds=kinds)
                save.trees[item.name] = plan
            elif item.kind == "optimizer" and self.save_optimizer:
                tree = optimizer_tree(item, save.items, owners)
                save.trees[item.name] = TreePlan(item.name, directory, tree, nested=True)
            elif item.kind == "object":
                save.objects[item.name] = item.value.state_dict()

    def propose(self, save: Save) -> Proposal:
        """Plan what this rank saves. Rank 0 also creates the staging directory, which the caller removes on failure.

        Raises OSError, and :class:`SaveFailed` where the disk is too full."""
        save.descriptions = {tree.name: tree.describe() for tree in save.trees.values()}
        for tree in save.trees.values():
            check_safe_values(tree.name, tree.flat())
        digests = {key: check_safe(key, value) for key, value in save.objects.items()}
        for item in save.items:
            is_saved_optimizer = item.kind == "optimizer" and self.save_optimizer
            if is_saved_optimizer and trained_by_all(item.value) is None:
                digests |= digests_of_own(item.name, item.value)
        summaries = {name: summarize(each) for name, each in save.descriptions.items()}
        proposal = Proposal(summaries, digests, self.ranks.dp_rank)
        if self.ranks.rank == 0:
            states = {tree.name: tree.state_dict for tree in save.trees.values()}
            forecast = self.forecast(save.items, states)
            self.expected_bytes = forecast.nbytes
            proposal.staging = self.reserve(save, forecast)
            proposal.maps, proposal.tied = self._maps(save), save.tied
            proposal.previous = save.previous
        return proposal

    def assign(
        self, save: Save, proposals: Sequence[Proposal], group: ProcessGroup | None
    ) -> dict[str, list[Share]]:
        """Exchange what the proposals of all ranks do not contain. Returns their shares of each tree. Collective.

        Raises :class:`SaveFailed` on all ranks where they do not have the same trees.
        """
        _require_same_trees(proposals)
        shares: dict[str, list[Share]] = {}
        # Sorted: the order of the state may differ between ranks, that of their exchanges may not.
        for name in sorted(save.trees):
            summaries = [proposal.trees[name] for proposal in proposals]
            mine = save.descriptions[name]
            shares[name] = shares_of_all(group, save.trees[name], mine, summaries)
        return shares

    def reserve(self, save: Save, forecast: Forecast) -> str:
        """Create the staging directory of *save*; only rank 0 calls this. Returns its path.

        Raises OSError, and :class:`SaveFailed` where the disk is too full."""
        # At every save, not only the first: it checks that no other run took over the directory.
        self.run.hold()
        self.check_fits(forecast)
        directories = [tree.directory for tree in save.trees.values()]
        staging = save.staging.reserve(self.run.root, str(save.name), directories)
        save.previous = self._find_previous(staging)
        return str(staging)

    def _find_previous(self, staging: Path) -> Previous | None:
        """The checkpoint whose files a save in *staging* can share; None if there is none.

        By default it is not the one before: after damage to one of the newest two checkpoints, a start uses the other.
        """
        if self._incremental is False or not self._has_reusable_files:
            return None
        names = self.run.continued()
        avoid = next(names, None) if self._incremental == "auto" else None
        name = next(names, None)
        if name is None or not links_are_supported(self.run.root / name, staging):
            return None
        root = str(self.run.root / name)
        return Previous(root, None if avoid is None else str(self.run.root / avoid))

    def _maps(self, save: Save) -> dict[str, BaseMaps]:
        """How the files that all ranks write together are named and split, by module.

        All modules have such files in layout hf, only adapters in layout adapter, none in layout shards.
        """
        found: dict[str, BaseMaps] = {}
        if self._layout == "shards":
            return found
        for name in save.tied:
            assets = self.assets.get(name)
            # Without dtypes: a checkpoint stores each tensor in its own dtype, only an export casts.
            maps = BaseMaps() if assets is None else replace(assets.maps, dtype=None)
            if self._layout == "hf" or maps.is_adapter:
                found[name] = maps
        return found

    def plan(
        self, save: Save, proposals: list[Proposal], shares: Mapping[str, Sequence[Share]]
    ) -> tuple[RankManifest, list[Job], list[FileJob]]:
        """Plan what this rank writes: (rank manifest to be filled in, jobs of trees, jobs of objects).

        Also sets the records and layouts of *save*. *shares* are those of all ranks, by tree.
        """
        digests = [proposal.digests for proposal in proposals]
        dp_ranks = [proposal.dp_rank for proposal in proposals]
        check_consistent(digests)
        save.previous = proposals[0].previous
        written = RankManifest(self.ranks.rank)
        jobs: list[Job] = []
        self._has_reusable_files = False
        for tree in save.trees.values():
            tree.assign(shares[tree.name], self.ranks.rank)
            untrained = self._untrained_in(tree)
            self._has_reusable_files = self._has_reusable_files or bool(untrained)
            jobs += self._tree_jobs(tree, save, proposals[0], untrained)
            written.trees[tree.name] = save.layouts[tree.name].rank_tree()
        return written, jobs, self.object_jobs(save, digests, dp_ranks)

    def _untrained_in(self, tree: TreePlan) -> Mapping[str, str]:
        """{name: kind} of the tensors of an assigned tree that separate files store; the same on all ranks."""
        kinds = tree.kinds
        if not kinds or (self._layout == "shards" and self._format != "safetensors"):
            return {}
        if self._incremental is True:
            return kinds
        nbytes: Counter[str] = Counter()
        for name, tensor in tree.all_tensors().items():
            if name in kinds:
                nbytes[kinds[name]] += tensor.nbytes
        return {name: kind for name, kind in kinds.items() if nbytes[kind] >= _MIN_SEPARATE_BYTES}

    def _tree_jobs(
        self, tree: TreePlan, save: Save, of_rank0: Proposal, untrained: Mapping[str, str]
    ) -> list[Job]:
        """The jobs of this rank for a tree, in the tree's format; *untrained* tensors are stored in separate files."""
        rank = self.ranks.rank
        # Rank 0's for all ranks: each computes the offsets in files that all of them write.
        maps = of_rank0.maps.get(tree.name)
        if maps is not None:
            tied = of_rank0.tied[tree.name]
            file_layout = hf.lay_out(tree, tree.directory, maps, tied, untrained)
            save.file_layouts[tree.name] = file_layout
            save.layouts[tree.name] = file_layout.tree_layout(tree.assignment.tensors)
            return list(hf.plan_jobs(tree, rank, file_layout))
        is_module = tree.name in save.tied
        if is_module and self._format == "safetensors":
            assets = self.assets.get(tree.name)
            file_mapping = None if assets is None else assets.file_index_mapping
            save.layouts[tree.name] = safetensors.lay_out(tree, file_mapping, untrained)
            return list(safetensors.plan_jobs(tree, rank, file_mapping, untrained))
        save.layouts[tree.name] = torch_save.lay_out(tree)
        return [torch_save.plan_jobs(tree, rank)]

    def object_jobs(
        self, save: Save, digests: Sequence[Mapping[str, str]], dp_ranks: Sequence[int]
    ) -> list[FileJob]:
        """The jobs of objects, which are planned anew at each save; also sets the records of *save*."""
        objects = ObjectPlanner(self.ranks, digests, dp_ranks)
        save.records = {item.name: self._record(item, save, objects) for item in save.items}
        return objects.jobs

    def _record(self, item: Item, save: Save, objects: ObjectPlanner) -> StateRecord:
        if item.kind == "object":
            return objects.plan(item, save.objects[item.name])
        scope: str = item.scope
        if item.kind != "module" and not self.save_optimizer:
            scope = NOT_SAVED
        return StateRecord(item.kind, scope, item.path, aliases=item.aliases)

    # ---------------------------------------------------------------- rank 0

    def write_common(self, save: Save, written: RankManifest) -> None:
        """Write the recipe, the losses and the side files of each module, and add them to *written*. Raises OSError."""
        staging = save.staging.path
        losses = json.dumps(json_values(save.losses), indent=2) + "\n"
        files = {layout.CONFIG: save.config_yaml, layout.LOSSES: losses}
        for file, text in files.items():
            written.files[file] = commit.write_file(staging / file, text.encode())
        for name, file_layout in save.file_layouts.items():
            write_finished(self.assets.get(name), file_layout, staging, written)
        for name, assets in self.assets.items():
            if name not in save.file_layouts:
                write_for_export(assets, staging, written, save.trees[name].directory)

    def write_metadata(
        self, save: Save, read_all: Callable[[], Sequence[RankManifest]]
    ) -> dict[str, FileRecord]:
        """Write DCP's ``.metadata`` of each tree in the format torch_save.

        *read_all* returns the rank manifests of all ranks; it is called only where the metadata is new.
        """
        written: dict[str, FileRecord] = {}
        metadata, formats = save.metadata, self._formats(save)
        for name, tree in save.trees.items():
            if formats[name] != torch_save.NAME:
                continue
            if name not in metadata:
                planned = self._planned_tree(save, name, torch_save.NAME)
                merged = merge_tree(name, torch_save.NAME, read_all(), {}, planned)
                metadata[name] = torch_save.metadata_of(tree, merged)
            file = f"{tree.directory}/{layout.DCP_METADATA}"
            written[file] = commit.write_file(save.staging.path / file, metadata[name])
        return written

    def partial_manifest(self, save: Save) -> Manifest:
        """The manifest without what the ranks wrote: no files, and of each tree the tensors without records."""
        trees: dict[str, Tree] = {}
        for name, tree_format in self._formats(save).items():
            trees[name] = self._planned_tree(save, name, tree_format)
        return Manifest(
            step=save.name.step,
            epoch=save.name.epoch,
            # `finalize` sets the time.
            created=0.0,
            world_size=self.ranks.world_size,
            dp_size=self.ranks.dp_size,
            progress=save.progress,
            losses=json_values(save.losses),
            validated=save.validated,
            environment=environment() | self.notes,
            lineage=self._lineage(),
            state=save.records,
            trees=trees,
            files={},
        )

    def _planned_tree(self, save: Save, name: str, tree_format: str) -> Tree:
        tree_layout = save.layouts[name]
        tied = save.tied.get(name, {})
        return Tree(tree_format, tree_layout.tensors, {}, tied, tree_layout.copies)

    def _formats(self, save: Save) -> dict[str, str]:
        """The format of each tree, by its name."""
        formats: dict[str, str] = {}
        for name in save.trees:
            if name in save.file_layouts:
                formats[name] = hf.NAME
            elif name in save.tied:  # modules only
                formats[name] = self._format
            else:
                formats[name] = torch_save.NAME
        return formats

    def _lineage(self) -> dict[str, Any]:
        request = resume.request_text(self.run.path, self._restore_from)
        return {"restore_from": request, "resumed_from": self.resumed_from}

    def publish(self, save: Save, nbytes: int) -> SaveReport:
        """Publish a finalized checkpoint of *nbytes*, update the pointers, and apply the keep policy.

        Raises OSError where it could not be published.
        """
        losses = json_values(save.losses) if save.validated else {}
        self.run.publish(save.staging.path, save.name, losses)
        # Before anything that can fail: a published checkpoint must not be removed as a staging
        # directory.
        save.staging.published()
        report = self.report(save)
        # After publishing: until then, the newest old checkpoint is what a resume needs.
        pruned = self.run.prune(str(save.name))
        return replace(report, nbytes=nbytes, pruned=pruned)

    # ---------------------------------------------------------------- reports

    def report(self, save: Save) -> SaveReport:
        """The report of a completed save on any rank, without its bytes and removed checkpoints."""
        seconds = time.monotonic() - save.started
        free = None
        # No collective follows: an error on one rank could not be raised on the others.
        with contextlib.suppress(OSError):
            free = free_bytes(self.run.path)
        stall = seconds if save.stall_seconds is None else save.stall_seconds
        path = self.run.path / str(save.name)
        return SaveReport(
            path,
            save.name.step,
            stall,
            seconds,
            free_bytes=free,
            export_command=self.export_command(path),
        )

    def export_command(self, path: Path) -> str | None:
        """The shell command that exports a checkpoint as Hugging Face files; None where there is nothing to export."""
        if not self.assets or self._layout != "shards":
            return None
        return f"ckpt consolidate {shlex.quote(str(path))}"

    @property
    def model_files_are_the_export(self) -> bool:
        """Whether a checkpoint's own model files are what other programs load, so that no export is made."""
        return self._layout != "shards"

    def exports(self, last: bool) -> bool:
        """Whether a save is exported too; *last*: it is the last one of a run."""
        if not self.assets:
            return False
        return self.export_when == "every" or (self.export_when == "final" and last)


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


def _export_when(save_consolidated: bool | str | None, model_format: str, model_layout: str) -> str:
    """Which checkpoints are exported: ``final``, ``every`` or ``never``."""
    if model_layout != "shards":
        return "never"
    if save_consolidated is None:
        return "final" if model_format == "safetensors" else "never"
    if isinstance(save_consolidated, bool):
        return "every" if save_consolidated else "never"
    return save_consolidated


def json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """*values* with NaN and infinities as text, which JSON cannot express as numbers."""
    converted = dict(values)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            converted[name] = str(value)
    return converted
