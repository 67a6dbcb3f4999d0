"""The publication of saves: what rank 0 adds to the files of all ranks, and exports as Hugging Face files."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from automodel_ckpt.base.durable_io import free_bytes
from automodel_ckpt.checkpoint.export.files import agreeing_config
from automodel_ckpt.checkpoint.export.hf_assets import consolidate_script, no_need_script
from automodel_ckpt.checkpoint.export.plan import Plan
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import METER, FileRecord
from automodel_ckpt.checkpoint.files.type_aliases import FileDict
from automodel_ckpt.checkpoint.formats.planning import Share, TreePlan
from automodel_ckpt.checkpoint.formats.rank_files import HF, TORCH_SAVE, metadata_of
from automodel_ckpt.checkpoint.jobs.jobs import (
    FileJob,
    RankManifest,
    finalize,
    merge_trees,
    read_rank_manifests,
    run_all,
)
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Tree, environment
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.saving.planner import Planner
from automodel_ckpt.checkpoint.saving.save import (
    Assets,
    Proposal,
    Save,
    SaveReport,
    SaveSettings,
    json_values,
)
from automodel_ckpt.checkpoint.sources.source import MAPS, MODEL
from automodel_ckpt.errors import AutomodelError, ExportFailed, LeaseLost
from automodel_ckpt.parallel.ranks import agree

log = logging.getLogger("automodel_ckpt")

T = TypeVar("T")


class Publisher:
    """Completes and publishes the planned saves of a run with *settings*. Calls no collective.

    Rank 0 uses it; the other ranks call only :meth:`report`.
    """

    def __init__(self, settings: SaveSettings) -> None:
        self._settings = settings
        # Not at the first save, which `git` would delay.
        self._environment = environment() if settings.is_rank0 else {}

    def write_common(self, save: Save, written: RankManifest) -> None:
        """Write the recipe, the losses and the side files of each module, and add them to *written*. Raises OSError."""
        staging = save.staging.path
        losses = json.dumps(json_values(save.losses), indent=2) + "\n"
        files = {layout.CONFIG: save.config_yaml.encode(), layout.LOSSES: losses.encode()}
        for name, tree in save.trees.items():
            assets = self._settings.assets.get(name)
            side_files = {}
            if tree.format == HF:
                side_files = _files_of_model(assets, tree)
            elif assets is not None:
                side_files = _files_for_export(assets)
            files |= {f"{tree.directory}/{file}": data for file, data in side_files.items()}
        for file, data in files.items():
            path = staging / file
            path.parent.mkdir(parents=True, exist_ok=True)
            # This fsyncs the file only; commit.finalize fsyncs its directories before the manifest
            # exists.
            written.files[file] = commit.write_file(path, data)

    def write_metadata(self, save: Save, merged: Callable[[str], Tree]) -> dict[str, FileRecord]:
        """Write DCP's ``.metadata`` of each tree in the format torch_save.

        *merged* returns a tree of the checkpoint, by its name, with the slices of all ranks; it is called only where
        the metadata is new.
        """
        written = {}
        for name, tree in save.trees.items():
            if tree.format != TORCH_SAVE:
                continue
            tree.metadata = tree.metadata or metadata_of(tree, merged(name))
            file = f"{tree.directory}/{layout.DCP_METADATA}"
            written[file] = commit.write_file(save.staging.path / file, tree.metadata)
        return written

    def partial_manifest(self, save: Save) -> Manifest:
        """The manifest without what the ranks wrote: no files, and of each tree the tensors without records."""
        settings = self._settings
        trees = {}
        for name, planned in save.trees.items():
            tensors, copies = planned.layout.tensors, planned.layout.copies
            trees[name] = Tree(planned.format, tensors, {}, planned.tied, copies)
        request = resume.request_text(self._settings.run.path, settings.options.restore_from)
        return Manifest(
            step=save.name.step,
            epoch=save.name.epoch,
            # `finalize` sets the time.
            created=0.0,
            world_size=settings.ranks.world_size,
            dp_size=settings.ranks.dp_size,
            progress=save.progress,
            losses=json_values(save.losses),
            validated=save.validated,
            environment=self._environment | settings.notes,
            lineage={"restore_from": request, "resumed_from": settings.resumed_from},
            state=save.records,
            trees=trees,
            files={},
        )

    def complete(
        self,
        save: Save,
        common: RankManifest,
        merged: Callable[[str], Tree],
        finish: Callable[[], int],
        pause: Callable[[float], None] = time.sleep,
    ) -> SaveReport:
        """Publish *save* after all ranks have written it.

        *common* is the rank manifest to which the metadata is added, *merged* as in :meth:`write_metadata`. *finish*
        finalizes the checkpoint and returns its bytes. *pause* is called while other nodes are
        waited for, and may raise. Raises OSError where it could not be published.
        """
        common.files.update(self.write_metadata(save, merged))
        if save.before_publishing is not None:
            # A recipe flushes its logs here: no checkpoint is published before the log lines of its step.
            save.before_publishing()
        nbytes = finish()
        nodes = self._settings.nodes
        if nodes is not None:
            # Before rank 0's node: its own checkpoint is the one that the next save continues.
            nodes.publish(save.staging.path, str(save.name), pause)
        report = self._publish(save, nbytes)
        if nodes is not None:
            nodes.remove_others(pause)
        return report

    def _publish(self, save: Save, nbytes: int) -> SaveReport:
        """Publish a finalized checkpoint of *nbytes*, update the pointers, and apply the keep policy.

        Raises OSError where it could not be published.
        """
        losses = json_values(save.losses) if save.validated else {}
        self._settings.run.publish(save.staging.path, save.name, losses)
        # Before anything that can fail: a published checkpoint must not be removed as a staging
        # directory.
        save.staging.is_owner = False
        report = self.report(save)
        # After publishing: until then, the newest old checkpoint is what a resume needs.
        pruned = self._settings.run.prune(str(save.name))
        root = self._settings.run.root
        if self._settings.nodes is not None or os.path.exists(root / layout.GENERATION):
            from automodel_ckpt.checkpoint.memory.save_files import remove_set_aside

            # The next save or start tries again.
            with contextlib.suppress(OSError):
                remove_set_aside(root)
        return replace(report, nbytes=nbytes, pruned=pruned)

    def notify(self, save: Save, report: SaveReport) -> None:
        """Call ``on_saved`` of *save*. Raises :class:`SaveFailed` for what it raises."""
        if save.on_saved is None:
            return
        try:
            save.on_saved(report)
        except Exception as error:
            raise as_failure(
                error,
                f"reporting {save.name} (the checkpoint itself is safe)",
                self._settings.run.path,
            ) from error

    def report(self, save: Save) -> SaveReport:
        """The report of a completed save on any rank, without its bytes and removed checkpoints."""
        seconds, free = time.monotonic() - save.started, None
        # No collective follows: an error on one rank could not be raised on the others.
        with contextlib.suppress(OSError):
            free = free_bytes(self._settings.run.path)
        stall = seconds if save.stall_seconds is None else save.stall_seconds
        path = self._settings.run.path / str(save.name)
        command = self._settings.export_command(path)
        return SaveReport(
            path, save.name.step, stall, seconds, free_bytes=free, export_command=command
        )


def _files_for_export(assets: Assets) -> FileDict:
    """``.hf_metadata/`` and ``consolidate.sh``, which are next to shards, by name."""
    files = {layout.CONSOLIDATE_SCRIPT: consolidate_script(sys.executable).encode()}
    for name, data in assets.files.items():
        files[f"{layout.HF_METADATA}/{name}"] = data
    return files


def _files_of_model(assets: Assets | None, tree: TreePlan) -> FileDict:
    """The index and, with *assets*, all files that a loader needs, which are next to Hugging Face files, by name.

    config.json gets the dtype of the weights. An adapter has neither index nor config.json.
    """
    files = {}
    if assets is not None:
        # The maps are for exports from shards; here the weights are stored as the base stores them.
        files = {name: data for name, data in assets.files.items() if name not in MAPS}
    if assets is None or not assets.maps.is_adapter:
        plan = Plan(tree.layout.files)
        files[layout.HF_INDEX] = plan.index()
        files[layout.CONSOLIDATE_SCRIPT] = no_need_script().encode()
        if assets is not None:
            config, where = files["config.json"], Path(tree.directory, "config.json")
            files["config.json"], _ = agreeing_config(config, plan, assets.maps, where)
    return files


# ---------------------------------------------------------------- exports


class Exports:
    """The exports of the checkpoints of a run with *settings*, on all its ranks.

    *wait_for_save* is called before a checkpoint is exported from its files: it may still be in progress.
    """

    def __init__(self, settings: SaveSettings, wait_for_save: Callable[[], object]) -> None:
        self._settings, self._wait_for_save = settings, wait_for_save

    @property
    def of_each_checkpoint(self) -> bool:
        """Whether each checkpoint is exported."""
        return self._settings.makes_export(last=False)

    def own_files(self, checkpoint: Path) -> Path | None:
        """The directory of the model in a checkpoint, if other programs load it as it is; None when it is exported."""
        if not self._settings.model_files_are_the_export:
            return None
        return Path(os.path.abspath(checkpoint)) / layout.state_directory(MODEL)

    def is_exported(self, checkpoint: Path) -> bool:
        """Whether a checkpoint has its Hugging Face export."""
        return all(_export_of(checkpoint, name).is_dir() for name in self._settings.assets)

    def export_if_missing(self, checkpoint: Path, *, last: bool) -> None:
        """Export a checkpoint if a kill, a signal or a failure prevented its export. Collective.

        Does nothing where the options ask for no export of this checkpoint (*last*: the last one of a run), or where it
        belongs to another run. Raises :class:`ExportFailed` on all ranks.
        """
        if self._settings.makes_export(last) and checkpoint.parent == self._settings.run.root:
            self._export_once(checkpoint.name, self._settings.assets)

    def export_best(self) -> None:
        """Export the checkpoint that LOWEST_VAL points to, unless it is already exported. Collective.

        Raises :class:`ExportFailed` on all ranks. In the layouts hf and adapter nothing is written: the checkpoint's
        model files are the export.
        """
        self._wait_for_save()
        name = self._of_rank0("looking for the best checkpoint", self._settings.run.best)
        if name is None:
            if self._settings.is_rank0:
                log.warning("export_best: no checkpoint was validated, so there is no best one")
        elif not self._settings.model_files_are_the_export:
            self._export_once(name, self._settings.assets)
        elif self._settings.is_rank0:
            log.info(
                "export_best: nothing to export, the model files of %s are already in Hugging Face format",
                self._settings.run.path / name,
            )

    def export_average(self, checkpoint: Path) -> None:
        """Export the average of the weights in a *checkpoint* of this run, unless it is exported. Collective.

        Raises :class:`ExportFailed` on all ranks. In the layouts hf and adapter nothing is written: the files of the
        average are the export.
        """
        if self._settings.model_files_are_the_export:
            log.info(
                "export_ema: nothing to export, %s is already in Hugging Face format",
                checkpoint / layout.AVERAGE,
            )
        else:
            self._export_once(checkpoint.name, [layout.AVERAGE])

    def _of_rank0(self, doing: str, find: Callable[[], T]) -> T | None:
        """Return the result of *find* on rank 0 on all ranks. Collective. Raises on all ranks what it raises there.

        The ranks may see different states of the directory, and all must call the same collectives.
        """
        return agree.broadcast_object(self._settings.group, self.run_on_rank0(doing, find))

    def _export_once(self, name: str, attributes: Collection[str]) -> None:
        """Export modules of the checkpoint *name*, unless they are already exported."""
        self._wait_for_save()
        exports = [_export_of(self._settings.run.root / name, each) for each in attributes]
        doing = f"looking for the export of {name}"
        if self._of_rank0(doing, lambda: all(export.is_dir() for export in exports)):
            return
        export = self._export_from_files(name, attributes)
        if export is not None:
            self._settings.run.on_exported(name)
            log.info("Hugging Face export of %s: %s", name, export)

    def _export_from_files(self, name: str, attributes: Collection[str]) -> Path | None:
        """Export modules of a published checkpoint on rank 0. Returns the last directory there, None elsewhere."""
        from automodel_ckpt.checkpoint.export.consolidate import consolidate

        run = self._settings.run

        def export() -> Path | None:
            output = None
            for attribute in attributes:
                run.check_lease()
                # Checked again before the rename: a run that is suspended in a long export can lose its lease.
                output = consolidate(
                    _export_of(run.root / name, attribute).parent,
                    log=log.info,
                    before_publishing=run.check_lease,
                ).output
            return output

        return self.run_on_rank0(f"exporting {name} (the checkpoint itself is safe)", export)

    def run_on_rank0(
        self,
        doing: str,
        work: Callable[[], T],
        kind: type[AutomodelError] = ExportFailed,
    ) -> T | None:
        """Run *work* on rank 0 while the others wait. Returns its result there, None elsewhere. Collective.

        Raises an error of *kind* on all ranks where it fails; *doing* describes it in the message.
        """
        with self._settings.raise_on_all_ranks(doing, kind):
            # Not in one collective: work on a large model can outlast the group's timeout.
            return agree.while_working(
                self._settings.group, work if self._settings.is_rank0 else lambda: None
            )

    def export_save(self, save: Save, report: SaveReport) -> SaveReport:
        """Export the model of a published *save*; return *report* with the result. Collective.

        If the export fails, the published checkpoint is unchanged and the failure is in the report. Raises
        :class:`LeaseLost` on all ranks where another run took over the directory.
        """
        try:
            self._export_from_files(str(save.name), self._settings.assets)
            self._settings.run.on_exported(str(save.name))
            for name in self._settings.assets:
                export = _export_of(self._settings.run.root / str(save.name), name)
                report = replace(report, export=export)
        except LeaseLost:
            raise
        except AutomodelError as failure:
            report = replace(report, export_failure=failure)
        seconds = time.monotonic() - save.started
        return replace(report, stall_seconds=seconds, total_seconds=seconds)


def _export_of(checkpoint: Path, attribute: str) -> Path:
    return checkpoint / layout.state_directory(attribute) / layout.CONSOLIDATED


# ---------------------------------------------------------------- synchronous saves


class SyncSaves:
    """The synchronous saves of all ranks. Where *save* is in progress, it is :attr:`in_progress`."""

    def __init__(self, planner: Planner, exports: Exports) -> None:
        self._planner, self._exports = planner, exports
        self._settings = planner.settings
        self._publisher = Publisher(planner.settings)
        self.in_progress: Save | None = None

    def save(
        self, save: Save, proposals: list[Proposal], shares: Mapping[str, Sequence[Share]]
    ) -> SaveReport:
        """Plan, write, publish and export *save*, which all ranks have proposed. Collective.

        *proposals* and *shares* come from all ranks. Raises :class:`SaveFailed` on all ranks. The failure of an
        export is in the report.
        """
        self.in_progress = save
        try:
            with self._settings.raise_on_all_ranks(f"saving {save.name}"):
                written, jobs, objects = self._planner.plan(save, proposals, shares)
                self._planner.create_on_node(save)
                self._write(save, written, [*jobs, *objects])
            return self._publish_and_export(save)
        finally:
            self.in_progress = None
            for tree in save.trees.values():
                tree.release_values()

    def _publish_and_export(self, save: Save) -> SaveReport:
        nodes = self._settings.nodes
        if nodes is not None:
            with self._settings.raise_on_all_ranks(f"saving {save.name}"):
                if nodes.is_leader:
                    nodes.contribute(save.staging.path)
        # The report of a save with an export is complete only after the export.
        exports = self._settings.makes_export(save.last)
        report = None
        # The exchange above is also a barrier: all rank manifests exist when rank 0 reads them.
        with self._settings.raise_on_all_ranks(f"publishing {save.name}"):
            if self._settings.is_rank0:
                report = self._complete(save)
            save.total_bytes = None
            if report is not None and not exports:
                self._publisher.notify(save, report)
        report = self._publisher.report(save) if report is None else report
        if exports:
            report = self._exports.export_save(save, report)
            with self._settings.raise_on_all_ranks(f"reporting {save.name}"):
                if self._settings.is_rank0:
                    self._publisher.notify(save, report)
        return report

    def _write(self, save: Save, written: RankManifest, jobs: Sequence[FileJob]) -> None:
        """Write this rank's files and its rank manifest below the staging directory."""
        staging = save.staging.path
        save.bytes_before = METER.nbytes
        save.total_bytes = sum(job.size for job in jobs)
        run_all(jobs, staging, written, previous=save.previous)
        if self._settings.is_rank0:
            self._publisher.write_common(save, written)
        # Last: a rank manifest on disk means that all files of its rank are durable.
        commit.write_file(
            staging / layout.rank_manifest_file(self._settings.ranks.rank), written.to_bytes()
        )

    def _complete(self, save: Save) -> SaveReport:
        """Merge the rank manifests and publish the checkpoint. Called by rank 0 after all ranks have written."""
        staging = save.staging.path
        rank_manifests = read_rank_manifests(staging, self._settings.ranks.world_size)
        manifest = self._publisher.partial_manifest(save)
        trees = merge_trees(manifest, rank_manifests)
        return self._publisher.complete(
            save,
            rank_manifests[0],
            trees.__getitem__,
            lambda: finalize(staging, manifest, rank_manifests, trees),
        )
