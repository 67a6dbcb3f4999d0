"""Synchronous saves: write, publish and export a save that all ranks have proposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.collective_errors import raise_on_all_ranks
from automodel_ckpt.checkpoint.files.direct import METER
from automodel_ckpt.checkpoint.formats.assignment import Share
from automodel_ckpt.checkpoint.saving.exports import Exports
from automodel_ckpt.checkpoint.saving.planner import Planner, Proposal, Save, SaveReport
from automodel_ckpt.checkpoint.writing.jobs import run_all
from automodel_ckpt.checkpoint.writing.rank_manifest import finalize, read_rank_manifests


def save_now(
    save: Save,
    proposals: list[Proposal],
    shares: Mapping[str, Sequence[Share]],
    *,
    planner: Planner,
    group: ProcessGroup | None,
    exports: Exports,
) -> SaveReport:
    """Write this rank's share of *save*, and publish and export it together with the other ranks. Collective.

    *proposals* and *shares* are those of all ranks.
    Raises :class:`SaveFailed` on all ranks. The failure of an export is in the report.
    """
    report = None
    where = planner.run.path
    with raise_on_all_ranks(group, f"saving {save.name}", where):
        _write(save, proposals, shares, planner)
    # The exchange above is also a barrier: all rank manifests exist when rank 0 reads them.
    with raise_on_all_ranks(group, f"publishing {save.name}", where):
        if planner.ranks.rank == 0:
            report = _publish(save, planner)
    save.total_bytes = None
    if report is None:
        report = planner.report(save)
    if planner.exports(save.last):
        report = exports.export_save(save, report)
    if save.on_saved is not None and planner.ranks.rank == 0:
        save.on_saved(report)
    return report


def _write(
    save: Save, proposals: list[Proposal], shares: Mapping[str, Sequence[Share]], planner: Planner
) -> None:
    """Write this rank's files and its rank manifest below the staging directory."""
    staging = save.staging.path
    written, jobs, objects = planner.plan(save, proposals, shares)
    all_jobs = [*jobs, *objects]
    save.bytes_before = METER.nbytes
    save.total_bytes = sum(job.size for job in all_jobs)
    run_all(all_jobs, staging, written, previous=save.previous)
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
