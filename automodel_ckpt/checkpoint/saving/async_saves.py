"""Asynchronous checkpointing: the save in progress, and its completion.

This module coordinates the ranks; ``background.py`` is the part of one rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.collective_errors import raise_on_all_ranks
from automodel_ckpt.checkpoint.discovery import Item
from automodel_ckpt.checkpoint.export_leftovers import clear_leftovers
from automodel_ckpt.checkpoint.failures import as_failure
from automodel_ckpt.checkpoint.formats.assignment import Share
from automodel_ckpt.checkpoint.saving.background import Background, Cancelled, Upload
from automodel_ckpt.checkpoint.saving.host_memory import MemoryLayout, lay_out
from automodel_ckpt.checkpoint.saving.plan_reuse import PlanReuse
from automodel_ckpt.checkpoint.saving.planner import Planner, Proposal, Save, SaveReport
from automodel_ckpt.checkpoint.writing.jobs import Job
from automodel_ckpt.checkpoint.writing.rank_manifest import (
    RankManifest,
    rank_manifest_paths,
    read_rank_manifests,
)
from automodel_ckpt.distributed import agree
from automodel_ckpt.errors import AutomodelError, ExportFailed, LeaseLost

log = logging.getLogger("automodel_ckpt")

_POLL_SECONDS = 0.02


@dataclass(slots=True)
class _Plan:
    """What a plan is for this rank: *layout*, that of the trees in the writer's memory; *written*, the rank manifest of
    the trees before anything is written."""

    layout: MemoryLayout
    written: RankManifest


class AsyncSaves:
    """The asynchronous saves of all ranks of *group*, one at a time.

    A save fails when its writer makes no progress for *timeout_seconds* while the ranks wait for it. Raises
    :class:`OSError` or :class:`AttributeError` where this system does not support asynchronous saves.
    """

    def __init__(
        self,
        planner: Planner,
        group: ProcessGroup | None,
        *,
        timeout_seconds: float,
        on_cuda: bool,
    ) -> None:
        self._planner, self._group = planner, group
        self._timeout_seconds = timeout_seconds
        self._background = Background(on_cuda=on_cuda)
        self._in_flight: Save | None = None
        self._reuse = PlanReuse(planner, group)
        self._plan: _Plan | None = None

    def reserve(self, nbytes: int) -> None:
        """Allocate the host memory for saves of *nbytes* on this rank. Raises OSError."""
        self._background.reserve(nbytes)

    @property
    def _is_rank0(self) -> bool:
        return self._planner.ranks.rank == 0

    # ---------------------------------------------------------------- a new plan

    def save(
        self, save: Save, proposals: list[Proposal], shares: Mapping[str, Sequence[Share]]
    ) -> SaveReport:
        """Plan a save, copy the state and start writing; return when the state is copied. Collective.

        *proposals* and *shares* are those of all ranks.

        Raises :class:`SaveFailed` on all ranks.
        """
        try:
            with raise_on_all_ranks(self._group, f"saving {save.name}", self._planner.run.path):
                written, jobs, objects = self._planner.plan(save, proposals, shares)
                live = self._reuse.live_state(save)
                trees = lay_out(jobs)
                self._upload(save, written, trees, objects)
        except AutomodelError:
            self._abandon(save)
            raise
        self._reuse.keep(save, live, proposals, trees)
        self._plan = _Plan(trees, written)
        return self._report_started(save)

    def _report_started(self, save: Save) -> SaveReport:
        for tree in save.trees.values():
            tree.release_values()
        save.stall_seconds = time.monotonic() - save.started
        path = self._planner.run.path / str(save.name)
        return SaveReport(path, save.name.step, save.stall_seconds, published=False)

    def _upload(
        self, save: Save, written: RankManifest, trees: MemoryLayout, objects: Iterable[Job]
    ) -> None:
        """Copy the state, then write the copy in the background."""
        self._in_flight = save
        layouts = [trees, lay_out(list(objects), trees.end)]
        staged = self._background.stage(layouts, copy_now=_buffers(save.items))
        # From here on the state may change.
        complete = partial(self._complete, save) if self._is_rank0 else None
        self._background.start(
            save.staging.path,
            written,
            staged,
            then=complete,
            doing=f"saving {save.name}",
            previous=save.previous,
        )

    # ---------------------------------------------------------------- the plan of the previous save

    def save_with_previous_plan(self, save: Save, state: Mapping[str, Any]) -> SaveReport | None:
        """Save with the plan of the previous save; return None, with no effect, where it does not match on some rank.

        Collective. Raises on all ranks what prevented rank 0 from creating the staging directory. Later failures are
        raised by :meth:`wait_for_save` on all ranks.
        """
        reuse = self._reuse.agree(save, state)
        if reuse is None:
            return None
        assert self._plan is not None
        self._in_flight = save  # from here on, wait_for_save reports failures
        try:
            self._upload(save, self._plan.written, self._plan.layout, reuse.prepare())
        except Exception as error:
            # Not raised: the last exchange is over, so the other ranks would not notice.
            self._background.fail(as_failure(error, f"saving {save.name}", self._planner.run.path))
        return self._report_started(save)

    # ---------------------------------------------------------------- in rank 0's thread

    def _complete(self, save: Save, upload: Upload) -> None:
        """Finish the checkpoint, publish and export it, after rank 0 has written its share. Runs in a thread of rank
        0.

        Work that grows with the number of tensors is done in the writer process: in this thread it would contend with
        training for the GIL.
        """
        planner = self._planner
        staging = save.staging.path
        num_ranks = planner.ranks.world_size
        common = RankManifest(planner.ranks.rank)
        planner.write_common(save, common)
        # No collective: two threads that use one process group hang or crash. A rank manifest
        # appears complete, by a rename, and is the last thing that the writer of its rank creates.
        for path in rank_manifest_paths(staging, num_ranks):
            while not path.exists():
                upload.pause(_POLL_SECONDS)
        read_all = partial(read_rank_manifests, staging, num_ranks)
        common.files.update(planner.write_metadata(save, read_all))
        if save.before_publishing is not None:
            save.before_publishing()
        manifest = planner.partial_manifest(save)
        nbytes = upload.finalize(staging, manifest, common, save.previous)
        report = planner.publish(save, nbytes)
        save.is_published = True
        if save.on_saved is not None:
            save.on_saved(report)
        if planner.exports(save.last):
            self._export_in_background(save, upload)

    def _export_in_background(self, save: Save, upload: Upload) -> None:
        path = self._planner.run.root / str(save.name)
        sources = [path / layout.state_directory(name) for name in self._planner.assets]
        try:
            self._planner.run.check_lease()
            lease = self._planner.run.lease_token
            output, log_lines = self._background.export(upload, sources, lease)
        except Cancelled:
            # disable_exports killed the writer, so that nothing else removes its staging directory.
            for source in sources:
                clear_leftovers(source / layout.CONSOLIDATED, log.debug)
            return
        # Not an ExportFailed, which says that the checkpoint is safe: another run owns the
        # directory.
        except LeaseLost:
            raise
        except Exception as error:
            failure = as_failure(
                error, f"exporting {save.name} (the checkpoint itself is safe)", path, ExportFailed
            )
            raise ExportFailed.all_of(failure.problems) from error
        for line in log_lines:
            log.info("%s", line)
        log.info("Hugging Face export of %s: %s", save.name, output)

    def disable_exports(self) -> None:
        """Make no exports from now on, and stop the one in progress."""
        self._background.disable_exports()

    # ---------------------------------------------------------------- waiting

    @property
    def progress(self) -> tuple[int, int, int] | None:
        """(step, bytes written by this rank, approximate total bytes) of the save that is being written, or None."""
        save = self._in_flight
        if save is None or save.is_published or self._background.state != "busy":
            return None
        return save.name.step, *self._background.progress

    @property
    def is_writing(self) -> bool:
        """Whether this rank has a save in progress."""
        return self._background.state == "busy"

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows of a failure: all ranks should then call :meth:`wait_for_save`."""
        return self._background.state == "failed"

    def await_copies(self) -> None:
        """Call this before state on the device is changed: its copy may not be complete yet."""
        self._background.await_copies()

    def wait_for_save(self) -> bool:
        """Wait for the save in progress; return True if there was one. Collective.

        Raises :class:`SaveFailed` on all ranks where it failed or made no progress on any rank; its files are then
        removed.
        """
        save, background = self._in_flight, self._background
        if save is None:
            return False
        # Short exchanges, no collective that waits: an upload may exceed the group's timeout.
        while True:
            mine = (background.state, background.idle_seconds(), background.is_writing)
            reports = agree.gather_objects(self._group, mine)
            states = [state for state, _, _ in reports]
            if "failed" in states:
                self._abandon(save)
            if "busy" not in states:
                break
            # Progress of any writer counts: the others may be idle only because they wait for it.
            if all(seconds > self._timeout_seconds for _, seconds, _ in reports):
                any_writes = any(is_writing for _, _, is_writing in reports)
                background.give_up(also_waiting=not any_writes)
            background.wait(_POLL_SECONDS)
        self._in_flight = None
        return True

    def _abandon(self, save: Save) -> None:
        """Stop a failed save on all ranks, remove its staging directory, and raise its failure."""
        # The exchange below is also a barrier: rank 0 removes the directory only after every rank
        # has stopped its writer, which would write into it.
        failure = self._background.abandon()
        self._in_flight = None
        self._reuse.forget()
        try:
            agree.all_or_nothing(self._group, failure)
        finally:
            save.staging.remove()

    def wait(self) -> None:
        """Wait until this rank has no upload in progress. Not collective."""
        self._background.wait()

    def close(self) -> None:
        """Wait, then release the memory and the writer process."""
        self._reuse.forget()
        self._background.close()


def on_cuda(state: Mapping[str, Any]) -> bool:
    """Whether a module of the state has parameters on a GPU."""
    modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    return any(parameter.is_cuda for module in modules for parameter in module.parameters())


def _buffers(items: Iterable[Item]) -> set[int]:
    """The data pointers of module buffers, which a forward pass may change."""
    modules = [item.value for item in items if item.kind == "module"]
    return {buffer.data_ptr() for module in modules for buffer in module.buffers()}
