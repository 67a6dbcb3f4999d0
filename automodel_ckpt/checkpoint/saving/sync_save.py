"""Synchronous saves: write, publish and export a save, and keep its plan for the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.collective_errors import raise_on_all_ranks
from automodel_ckpt.checkpoint.files.direct import METER
from automodel_ckpt.checkpoint.formats.assignment import Share
from automodel_ckpt.checkpoint.manifest import Blob
from automodel_ckpt.checkpoint.saving.exports import Exports
from automodel_ckpt.checkpoint.saving.plan_reuse import PlanReuse
from automodel_ckpt.checkpoint.saving.planner import Planner, Proposal, Save, SaveReport
from automodel_ckpt.checkpoint.writing.jobs import Data, FileJob, Job, run_all, with_data
from automodel_ckpt.checkpoint.writing.rank_manifest import (
    RankManifest,
    finalize,
    read_rank_manifests,
)


class SyncSaves:
    """The synchronous saves of all ranks of *group*. Where *save* is in progress, it is :attr:`in_progress`."""

    def __init__(self, planner: Planner, group: ProcessGroup | None, exports: Exports) -> None:
        self._planner, self._group, self._exports = planner, group, exports
        self._reuse = PlanReuse(planner, group)
        self._jobs: list[Job] = []
        self.in_progress: Save | None = None

    def save(
        self, save: Save, proposals: list[Proposal], shares: Mapping[str, Sequence[Share]]
    ) -> SaveReport:
        """Plan, write, publish and export *save*, which all ranks have proposed. Collective.

        *proposals* and *shares* are those of all ranks. Raises :class:`SaveFailed` on all ranks. The failure of an
        export is in the report.
        """
        planned: list[Job] = []

        def plan() -> tuple[RankManifest, list[FileJob]]:
            written, jobs, objects = self._planner.plan(save, proposals, shares)
            planned.extend(jobs)
            return written, objects

        with self._saving(save):
            live = self._reuse.live_state(save)
            report = self._save(save, planned, plan)
            values = _Values()
            self._jobs = [values.taken_from(job) for job in planned]
            self._reuse.keep(save, live, proposals, values)
            return report

    def save_with_previous_plan(self, save: Save, state: Mapping[str, Any]) -> SaveReport | None:
        """Save with the plan of the previous save; return None, with no effect, where it does not match on some rank.

        Collective. Raises as :meth:`save`.
        """
        reuse = self._reuse.agree(save, state)
        if reuse is None:
            return None
        written = RankManifest(self._planner.ranks.rank)
        for name, tree_layout in save.layouts.items():
            written.trees[name] = tree_layout.rank_tree()
        with self._saving(save):
            return self._save(save, self._jobs, lambda: (written, reuse.prepare()))

    @contextlib.contextmanager
    def _saving(self, save: Save) -> Iterator[None]:
        self.in_progress = save
        try:
            yield
        except BaseException:
            self._reuse.forget()
            raise
        finally:
            self.in_progress = None
            for tree in save.trees.values():
                tree.release_values()

    def _save(
        self,
        save: Save,
        jobs: Sequence[Job],
        plan: Callable[[], tuple[RankManifest, list[FileJob]]],
    ) -> SaveReport:
        """Write the *jobs* of the trees, which *plan* may add to, and those of objects, which it returns; publish."""
        report = None
        planner, group = self._planner, self._group
        where = planner.run.path
        with raise_on_all_ranks(group, f"saving {save.name}", where):
            written, objects = plan()
            _write(save, written, [*jobs, *objects], planner)
        # The exchange above is also a barrier: all rank manifests exist when rank 0 reads them.
        with raise_on_all_ranks(group, f"publishing {save.name}", where):
            if planner.ranks.rank == 0:
                report = _publish(save, planner)
        save.total_bytes = None
        if report is None:
            report = planner.report(save)
        if planner.exports(save.last):
            report = self._exports.export_save(save, report)
        if save.on_saved is not None and planner.ranks.rank == 0:
            save.on_saved(report)
        return report


class _Values:
    """The values in jobs that are not tensors, replaced before each save."""

    def __init__(self) -> None:
        self._data: dict[tuple[str, str], bytes] = {}

    def taken_from(self, job: Job) -> Job:
        """A copy of *job* that writes the present values."""
        data: list[Data] = []
        for chunk in job.chunks:
            if isinstance(chunk.entry, Blob) and isinstance(chunk.data, bytes):
                name = (job.tree or "", chunk.entry.fqn)
                self._data[name] = chunk.data
                data.append(partial(self._view, name))
            else:
                data.append(chunk.data)
        return with_data(job, data)

    def _view(self, name: tuple[str, str]) -> memoryview:
        return memoryview(self._data[name])

    def names(self) -> Iterable[tuple[str, str]]:
        """The tree and the name of each value."""
        return self._data

    def replace(self, name: tuple[str, str], data: bytes) -> bool:
        """Set the bytes of a value for the next save; return False where their size has changed."""
        is_same_size = len(data) == len(self._data[name])
        if is_same_size:
            self._data[name] = data
        return is_same_size


def _write(save: Save, written: RankManifest, jobs: Sequence[Job], planner: Planner) -> None:
    """Write this rank's files and its rank manifest below the staging directory."""
    staging = save.staging.path
    save.bytes_before = METER.nbytes
    save.total_bytes = sum(job.size for job in jobs)
    run_all(jobs, staging, written, previous=save.previous)
    if planner.ranks.rank == 0:
        planner.write_common(save, written)
    # Last: a rank manifest on disk means that all files of its rank are durable.
    commit.write_file(staging / layout.rank_manifest_file(planner.ranks.rank), written.to_bytes())


def _publish(save: Save, planner: Planner) -> SaveReport:
    """Merge the rank manifests and publish the checkpoint. Called by rank 0 after all ranks have written."""
    staging = save.staging.path
    rank_manifests = read_rank_manifests(staging, planner.ranks.world_size)
    metadata = planner.write_metadata(save, lambda: rank_manifests)
    rank_manifests[0].files.update(metadata)
    if save.before_publishing is not None:
        # A recipe flushes its logs here: no checkpoint is published before the log lines of its
        # step.
        save.before_publishing()
    nbytes = finalize(staging, planner.partial_manifest(save), rank_manifests, save.previous)
    return planner.publish(save, nbytes)
