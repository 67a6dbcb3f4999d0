"""Export a checkpoint whose state is still in memory: all ranks write it from there, and no file is read again.

The export begins after the checkpoint is published, so a failed export leaves the checkpoint intact. Every rank casts
its slices and writes them at their offsets (:mod:`automodel_ckpt.checkpoint.formats.hf`). Rank 0 adds the side files
and publishes the export (:mod:`automodel_ckpt.checkpoint.export.publish`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.export.copy_engine import Digested
from automodel_ckpt.checkpoint.export.export_leftovers import Log
from automodel_ckpt.checkpoint.export.files import (
    cast_lines,
    side_files,
    write_manifest,
    write_side_files,
)
from automodel_ckpt.checkpoint.export.plan import Plan, counted_casts
from automodel_ckpt.checkpoint.export.publish import Check, check_target, staged
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import range_digest
from automodel_ckpt.checkpoint.formats import hf
from automodel_ckpt.checkpoint.formats.planning import TreePlan
from automodel_ckpt.checkpoint.jobs.jobs import run_all
from automodel_ckpt.checkpoint.jobs.rank_manifest import RankManifest, merge_tree
from automodel_ckpt.checkpoint.parts.manifest import Tree
from automodel_ckpt.checkpoint.parts.slices import Tensor, contiguous_slices
from automodel_ckpt.checkpoint.saving.side_files import Assets
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps, maps_of
from automodel_ckpt.checkpoint.sources.opening import open_checkpoint
from automodel_ckpt.parallel.ranks import agree

RaiseOnAllRanks = Callable[[], contextlib.AbstractContextManager[object]]


def export_from_memory(
    plan: TreePlan,
    checkpoint: Path,
    assets: Assets,
    tied: Mapping[str, str],
    *,
    rank: int,
    group: ProcessGroup | None,
    raise_on_all_ranks: RaiseOnAllRanks,
    log: Log,
    before_publishing: Check = lambda: None,
) -> Path:
    """Export the module of a partitioned *plan*, whose state is that of the published *checkpoint*. Collective.

    Returns the directory of the export. Rank 0's *assets* and *tied* names count, and *log* is called there.
    *raise_on_all_ranks* makes a block whose failure on one rank is raised on all ranks; there is then no export. Rank 0
    calls *before_publishing*; its exception is raised on all ranks. No collective waits for data.
    """
    directory = checkpoint / plan.directory
    target = directory / layout.CONSOLIDATED
    name, maps = "", BaseMaps()
    with contextlib.ExitStack() as stack:
        with raise_on_all_ranks():
            if rank == 0:
                check_target(target)
                staging = stack.enter_context(
                    staged(target, log, before_publishing=before_publishing)
                )
                name, maps = staging.name, assets.maps
        # Every rank computes offsets in the same files, so all must plan from the same values.
        name, maps, tied = agree.broadcast_object(group, (name, maps, tied))
        written = RankManifest(rank)
        with raise_on_all_ranks():
            file_layout = hf.lay_out(plan, name, maps, tied)
        with raise_on_all_ranks():
            # A generator: it plans inside of `run_all`. A rank that failed here would leave the
            # others in the collectives of while_working.
            jobs = hf.shared_file_jobs(plan, rank, file_layout)
            agree.while_working(group, partial(run_all, jobs, directory, written))
        rank_manifests = agree.gather_objects(group, written)

        def finish() -> None:
            if rank == 0:
                tree = merge_tree(plan.name, hf.NAME, rank_manifests, {})
                _complete(directory, file_layout, tree, rank_manifests, log)
                # Publishes the export: `staged` renames its directory when its context ends.
                stack.close()

        with raise_on_all_ranks():
            agree.while_working(group, finish)
    return target


def _complete(
    directory: Path,
    file_layout: hf.FileLayout,
    tree: Tree,
    rank_manifests: list[RankManifest],
    log: Log,
) -> None:
    """Write the side files and the manifest of an export, on rank 0, after all weights are written."""
    source = open_checkpoint(directory)
    plan = Plan(file_layout.files, counted_casts(file_layout.files), file_layout.warnings)
    files, more_warnings = side_files(source, plan, maps_of(source))
    for warning in (*source.notes, *plan.warnings, *more_warnings):
        log(f"warning: {warning}")
    for line in cast_lines(plan.casts):
        log(line)
    staging = directory / file_layout.directory
    write_side_files(files, staging)
    headers = _headers(file_layout, rank_manifests)
    byte_ranges = _byte_ranges(directory, tree.stored)
    write_manifest(plan, source, staging, [*headers, *byte_ranges])


def _headers(
    file_layout: hf.FileLayout, rank_manifests: Iterable[RankManifest]
) -> Iterator[Digested]:
    """The digest of each file's header, which rank 0 wrote."""
    directory = file_layout.directory
    lengths = {f"{directory}/{file.name}": len(file.header) for file in file_layout.files}
    for written in rank_manifests:
        for path, header in written.placed.items():
            yield Digested(Path(path).name, 0, lengths[path], header.digest)


def _byte_ranges(directory: Path, tensors: Iterable[Tensor]) -> Iterator[Digested]:
    """The digest of each byte range that one rank wrote. Tensors with interleaved slices are read again."""
    for tensor in tensors:
        for stored in contiguous_slices(tensor):
            if stored.nbytes == 0:
                continue
            # The digests of interleaved slices are not those of byte ranges of the file.
            digest = stored.digest
            if not digest:
                digest = range_digest(directory / stored.file, stored.start, stored.nbytes)
            yield Digested(Path(stored.file).name, stored.start, stored.nbytes, digest)
