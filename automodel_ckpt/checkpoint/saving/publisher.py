"""What rank 0 adds to the files of all ranks, the publication of a checkpoint, and synchronous saves."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.export.files import agreeing_config
from automodel_ckpt.checkpoint.export.plan import Plan
from automodel_ckpt.checkpoint.export.script import consolidate_script, no_need_script
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.digests import FileRecord
from automodel_ckpt.checkpoint.files.direct import METER
from automodel_ckpt.checkpoint.files.type_aliases import Files
from automodel_ckpt.checkpoint.formats import torch_save
from automodel_ckpt.checkpoint.formats.assignment import Share
from automodel_ckpt.checkpoint.formats.hf import FileLayout
from automodel_ckpt.checkpoint.jobs.jobs import FileJob, run_all
from automodel_ckpt.checkpoint.jobs.rank_manifest import (
    RankManifest,
    finalize,
    merge_trees,
    read_rank_manifests,
)
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.collective_errors import raise_on_all_ranks
from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Tree
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.saving.environment import environment
from automodel_ckpt.checkpoint.saving.exports import Exports
from automodel_ckpt.checkpoint.saving.forecast import free_bytes
from automodel_ckpt.checkpoint.saving.planner import Planner
from automodel_ckpt.checkpoint.saving.save import (
    Assets,
    Proposal,
    Save,
    SaveReport,
    SaveSettings,
    json_values,
)
from automodel_ckpt.checkpoint.sources.base_maps import MAPS


class Publisher:
    """Completes and publishes the planned saves of a run with *settings*. Calls no collective.

    Rank 0 uses it; the other ranks call only :meth:`report`.
    """

    def __init__(self, settings: SaveSettings) -> None:
        self._settings = settings

    def write_common(self, save: Save, written: RankManifest) -> None:
        """Write the recipe, the losses and the side files of each module, and add them to *written*. Raises OSError."""
        staging = save.staging.path
        losses = json.dumps(json_values(save.losses), indent=2) + "\n"
        files = {layout.CONFIG: save.config_yaml, layout.LOSSES: losses}
        for file, text in files.items():
            written.files[file] = commit.write_file(staging / file, text.encode())
        for name, file_layout in save.plan.file_layouts.items():
            _write_finished(self._settings.assets.get(name), file_layout, staging, written)
        for name, assets in self._settings.assets.items():
            if name not in save.plan.file_layouts:
                _write_for_export(assets, staging, written, save.plan.trees[name].directory)

    def write_metadata(self, save: Save, merged: Callable[[str], Tree]) -> dict[str, FileRecord]:
        """Write DCP's ``.metadata`` of each tree in the format torch_save.

        *merged* returns a tree of the checkpoint, by its name, with the slices of all ranks; it is called only where
        the metadata is new.
        """
        written = {}
        metadata = save.plan.metadata
        for name, tree in save.plan.trees.items():
            if save.plan.formats[name] != torch_save.NAME:
                continue
            if name not in metadata:
                metadata[name] = torch_save.metadata_of(tree, merged(name))
            file = f"{tree.directory}/{layout.DCP_METADATA}"
            written[file] = commit.write_file(save.staging.path / file, metadata[name])
        return written

    def partial_manifest(self, save: Save) -> Manifest:
        """The manifest without what the ranks wrote: no files, and of each tree the tensors without records."""
        settings, plan = self._settings, save.plan
        trees = {}
        for name, planned in plan.layouts.items():
            tied = plan.tied.get(name, {})
            trees[name] = Tree(plan.formats[name], planned.tensors, {}, tied, planned.copies)
        request = resume.request_text(self._settings.run.path, settings.restore_from)
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
            environment=environment() | settings.notes,
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
        # The next save or start tries again.
        with contextlib.suppress(OSError):
            from automodel_ckpt.checkpoint.memory.save_files import remove_set_aside

            remove_set_aside(self._settings.run.root)
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


def _write_for_export(assets: Assets, staging: Path, written: RankManifest, directory: str) -> None:
    """Write ``.hf_metadata/`` and ``consolidate.sh`` beside shards in *directory*. Raises OSError."""
    files = {layout.CONSOLIDATE_SCRIPT: consolidate_script(sys.executable).encode()}
    for name, data in assets.files.items():
        files[f"{layout.HF_METADATA}/{name}"] = data
    _write(staging, written, directory, files)


def _write_finished(
    assets: Assets | None, file_layout: FileLayout, staging: Path, written: RankManifest
) -> None:
    """Write the index and, with *assets*, all files that a loader needs, beside Hugging Face files. Raises OSError.

    config.json gets the dtype of the weights. An adapter has neither index nor config.json.
    """
    directory, files = file_layout.directory, {}
    if assets is not None:
        # The maps are for exports from shards; here the weights are stored as the base stores them.
        files = {name: data for name, data in assets.files.items() if name not in MAPS}
    if assets is None or not assets.maps.is_adapter:
        plan = Plan(file_layout.files)
        files[layout.HF_INDEX] = plan.index()
        files[layout.CONSOLIDATE_SCRIPT] = no_need_script().encode()
        if assets is not None:
            config, where = files["config.json"], Path(directory, "config.json")
            files["config.json"], _ = agreeing_config(config, plan, assets.maps, where)
    _write(staging, written, directory, files)


def _write(staging: Path, written: RankManifest, directory: str, files: Files) -> None:
    """Write *files* (content by name) in *directory* of the checkpoint, and add them to *written*."""
    for name, data in files.items():
        file = f"{directory}/{name}"
        path = staging / file
        path.parent.mkdir(parents=True, exist_ok=True)
        # This fsyncs the file only; commit.finalize fsyncs its directories before the manifest
        # exists.
        written.files[file] = commit.write_file(path, data)


class SyncSaves:
    """The synchronous saves of all ranks of *group*. Where *save* is in progress, it is :attr:`in_progress`."""

    def __init__(self, planner: Planner, group: ProcessGroup | None, exports: Exports) -> None:
        self._planner, self._group, self._exports = planner, group, exports
        self._settings = planner.settings
        self._is_rank0 = planner.settings.ranks.rank == 0
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
            with self._raise_on_all_ranks(f"saving {save.name}"):
                written, jobs, objects = self._planner.plan(save, proposals, shares)
                self._planner.create_on_node(save)
                self._write(save, written, [*jobs, *objects])
            return self._publish_and_export(save)
        finally:
            self.in_progress = None
            for tree in save.plan.trees.values():
                tree.release_values()

    def _publish_and_export(self, save: Save) -> SaveReport:
        nodes = self._settings.nodes
        if nodes is not None:
            with self._raise_on_all_ranks(f"saving {save.name}"):
                if nodes.is_leader:
                    nodes.contribute(save.staging.path)
        # The report of a save with an export is complete only after the export.
        exports = self._settings.makes_export(save.last)
        report = None
        # The exchange above is also a barrier: all rank manifests exist when rank 0 reads them.
        with self._raise_on_all_ranks(f"publishing {save.name}"):
            if self._is_rank0:
                report = self._complete(save)
            save.total_bytes = None
            if report is not None and not exports:
                self._publisher.notify(save, report)
        report = self._publisher.report(save) if report is None else report
        if exports:
            report = self._exports.export_save(save, report)
            with self._raise_on_all_ranks(f"reporting {save.name}"):
                if self._is_rank0:
                    self._publisher.notify(save, report)
        return report

    def _raise_on_all_ranks(self, doing: str) -> AbstractContextManager[None]:
        return raise_on_all_ranks(self._group, doing, self._settings.run.path)

    def _write(self, save: Save, written: RankManifest, jobs: Sequence[FileJob]) -> None:
        """Write this rank's files and its rank manifest below the staging directory."""
        staging = save.staging.path
        save.bytes_before = METER.nbytes
        save.total_bytes = sum(job.size for job in jobs)
        run_all(jobs, staging, written, previous=save.previous)
        if self._is_rank0:
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
