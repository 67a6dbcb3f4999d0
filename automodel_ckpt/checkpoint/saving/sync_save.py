"""Synchronous saves: write, publish and export a save, and keep its plan for the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.direct import METER
from automodel_ckpt.checkpoint.formats.assignment import Share
from automodel_ckpt.checkpoint.jobs.jobs import FileJob, run_all
from automodel_ckpt.checkpoint.jobs.rank_manifest import (
    RankManifest,
    finalize,
    merge_trees,
    read_rank_manifests,
)
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.collective_errors import raise_on_all_ranks
from automodel_ckpt.checkpoint.saving.exports import Exports
from automodel_ckpt.checkpoint.saving.planner import Planner
from automodel_ckpt.checkpoint.saving.publisher import Publisher
from automodel_ckpt.checkpoint.saving.save import Proposal, Save, SaveReport


class SyncSaves:
    """The synchronous saves of all ranks of *group*. Where *save* is in progress, it is :attr:`in_progress`."""

    def __init__(self, planner: Planner, group: ProcessGroup | None, exports: Exports) -> None:
        self._planner, self._group, self._exports = planner, group, exports
        self._settings = planner.settings
        self._publisher = Publisher(planner.settings)
        self.in_progress: Save | None = None

    def save(
        self, save: Save, proposals: list[Proposal], shares: Mapping[str, Sequence[Share]]
    ) -> SaveReport:
        """Plan, write, publish and export *save*, which all ranks have proposed. Collective.

        *proposals* and *shares* are those of all ranks. Raises :class:`SaveFailed` on all ranks. The failure of an
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
        # The exchange above is also a barrier: all rank manifests exist when rank 0 reads them.
        if not self._settings.makes_export(save.last):
            return self._publish_on_rank0(save, notifies=True)
        # The report of a save with an export is complete only after the export.
        report = self._publish_on_rank0(save, notifies=False)
        report = self._exports.export_save(save, report)
        with self._raise_on_all_ranks(f"reporting {save.name}"):
            if self._is_rank0:
                self._publisher.notify(save, report)
        return report

    def _publish_on_rank0(self, save: Save, *, notifies: bool) -> SaveReport:
        """Publish *save* on rank 0, and call its ``on_saved`` if *notifies*. Returns the report. Collective."""
        report = None
        with self._raise_on_all_ranks(f"publishing {save.name}"):
            if self._is_rank0:
                report = self._publish(save)
            save.total_bytes = None
            if report is not None and notifies:
                self._publisher.notify(save, report)
        return self._publisher.report(save) if report is None else report

    @property
    def _is_rank0(self) -> bool:
        return self._settings.ranks.rank == 0

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

    def _publish(self, save: Save) -> SaveReport:
        """Merge the rank manifests and publish the checkpoint. Called by rank 0 after all ranks have written."""
        staging = save.staging.path
        rank_manifests = read_rank_manifests(staging, self._settings.ranks.world_size)
        manifest = self._publisher.partial_manifest(save)
        trees = merge_trees(manifest, rank_manifests)
        rank_manifests[0].files.update(self._publisher.write_metadata(save, trees.__getitem__))
        if save.before_publishing is not None:
            # A recipe flushes its logs here: no checkpoint is published before the log lines of its
            # step.
            save.before_publishing()
        nbytes = finalize(staging, manifest, rank_manifests, trees)
        if self._settings.nodes is not None:
            # Before rank 0's node: its own checkpoint is the one that the next save continues.
            self._settings.nodes.publish(staging, str(save.name))
        report = self._publisher.publish(save, nbytes)
        if self._settings.nodes is not None:
            self._settings.nodes.remove_others()
        return report
