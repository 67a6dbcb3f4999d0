"""Asynchronous checkpointing: reuse of the previous plan, the save in progress, and its completion.

This module coordinates the ranks; ``background.py`` is the part of one rank.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.collective_errors import raise_on_all_ranks
from automodel_ckpt.checkpoint.discovery import Item, classify
from automodel_ckpt.checkpoint.export_leftovers import clear_leftovers
from automodel_ckpt.checkpoint.failures import as_failure
from automodel_ckpt.checkpoint.files.pickle_values import saved
from automodel_ckpt.checkpoint.saving.background import Background, Cancelled
from automodel_ckpt.checkpoint.saving.forecast import Forecast, free_bytes
from automodel_ckpt.checkpoint.saving.host_memory import MemoryLayout, lay_out
from automodel_ckpt.checkpoint.saving.planner import Planner, Proposal, Save, SaveReport, Snapshot
from automodel_ckpt.checkpoint.saving.staging import Staging
from automodel_ckpt.checkpoint.state.live_state import LiveState, look
from automodel_ckpt.checkpoint.state.storable import check_safe, check_safe_values
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
class _Again:
    """What a rank reports to the others before a save with the plan of the save before.

    *digests* of its small state, None where the plan does not fit that rank's state; *staging*, the path of the
    directory that rank 0 created; *failed*, whether rank 0 could not create it.
    """

    digests: dict[str, str] | None
    staging: str = ""
    failed: bool = False


@dataclass(slots=True)
class _Kept:
    """The plan of a save, for reuse by later saves: it applies while the state has the signature *outline*.

    *layout* is that of the trees in the writer's memory; *values* are its pickled values that are not tensors;
    *written* is the rank manifest of the trees before anything is written; *nbytes* is what a save takes on disk.
    """

    outline: list[Any]
    snapshot: Snapshot
    dp_ranks: list[int]
    layout: MemoryLayout
    written: RankManifest
    nbytes: int
    values: dict[tuple[str, str], bytes] = field(default_factory=dict)


class AsyncSaves:
    """The asynchronous saves of all ranks of *group*, one at a time.

    A save fails when its writer makes no progress for *patience_seconds* while the ranks wait for it. Raises
    :class:`OSError` or :class:`AttributeError` where this system does not support asynchronous saves.
    """

    def __init__(
        self,
        planner: Planner,
        group: ProcessGroup | None,
        *,
        patience_seconds: float,
        on_cuda: bool,
    ) -> None:
        self._planner, self._group = planner, group
        self._patience_seconds = patience_seconds
        self._background = Background(on_cuda=on_cuda)
        self._in_flight: Save | None = None
        self._kept: _Kept | None = None

    def reserve(self, nbytes: int) -> None:
        """Allocate the host memory for saves of *nbytes* on this rank. Raises OSError."""
        self._background.reserve(nbytes)

    @property
    def _is_rank0(self) -> bool:
        return self._planner.ranks.rank == 0

    # ---------------------------------------------------------------- a new plan

    def save(self, save: Save, proposals: list[Proposal]) -> SaveReport:
        """Plan a save, copy the state and start writing; return when the state is copied. Collective.

        Raises :class:`SaveFailed` on all ranks.
        """
        try:
            with raise_on_all_ranks(self._group, f"saving {save.name}", self._planner.run.path):
                written, jobs, objects = self._planner.plan(save, proposals)
                live = self._live(save.snapshot)
                trees = lay_out(jobs)
                self._upload(save, written, trees, objects)
        except AutomodelError:
            self._abandon(save)
            raise
        if all(agree.gather_objects(self._group, live is not None)) and live is not None:
            dp_ranks = [proposal.dp_rank for proposal in proposals]
            self._kept = _Kept(
                live.outline, save.snapshot, dp_ranks, trees, written, self._planner.expected_bytes
            )
        return self._under_way(save)

    def _under_way(self, save: Save) -> SaveReport:
        for tree in save.snapshot.trees.values():
            tree.release_values()
        save.stall_seconds = time.monotonic() - save.started
        path = self._planner.run.path / str(save.name)
        return SaveReport(path, save.name.step, save.stall_seconds, published=False)

    def _upload(
        self, save: Save, written: RankManifest, trees: MemoryLayout, objects: Iterable[Job]
    ) -> None:
        """Copy the state, then write the copy in the background."""
        self._in_flight = save
        staged = self._background.stage(
            [trees, lay_out(list(objects), trees.end)], at_once=_buffers(save.snapshot.items)
        )
        # From here on the state may change.
        then = partial(self._complete, save) if self._is_rank0 else None
        self._background.start(
            save.staging.path, written, staged, then=then, doing=f"saving {save.name}"
        )

    def _live(self, snapshot: Snapshot) -> LiveState | None:
        """The live state that a later save can compare; None where it differs from what was planned."""
        with contextlib.suppress(
            Exception
        ):  # a custom state_dict may do anything: it has succeeded otherwise
            live = look(snapshot.items, save_optimizer=self._planner.save_optimizer)
            if live.is_what({name: tree.flat() for name, tree in snapshot.trees.items()}):
                return live
        return None

    # ---------------------------------------------------------------- the plan of the save before

    def save_again(
        self, state: Mapping[str, Any], make: Callable[..., Save], staging: Staging
    ) -> SaveReport | None:
        """Save with the plan of the previous save; return None, with no effect, where it does not match on some rank.

        Collective. *make* creates a save from its *staging* directory and snapshot. Raises on all ranks what prevented
        rank 0 from creating the staging directory. Later failures are raised by :meth:`settle` on all ranks.
        """
        kept = self._kept
        if kept is None:
            return None
        before = kept.snapshot
        snapshot = Snapshot(
            classify(state), before.trees, before.tied, before.file_layouts, before.metadata
        )
        save, live = make(staging=staging, snapshot=snapshot), LiveState()
        with contextlib.suppress(
            Exception
        ):  # the new plan, made instead, meets the same and reports it
            live = look(snapshot.items, save_optimizer=self._planner.save_optimizer)
        answer, failure = self._again(kept, live, save)
        answers = agree.gather_objects(self._group, answer)
        if answers[0].failed:
            agree.all_or_nothing(self._group, failure)
        agreed = [answer.digests for answer in answers if answer.digests is not None]
        if len(agreed) < len(answers):
            self._kept = None
            staging.remove()
            return None
        staging.path = Path(answers[0].staging)
        self._in_flight = save  # from here on, a failure is found by settle
        try:
            for name, tree in before.trees.items():
                tree.set_values(live.trees[name])
            objects = self._planner.object_plans(save, agreed, kept.dp_ranks)
            self._upload(save, kept.written, kept.layout, objects)
        except Exception as error:
            self._background.fail(as_failure(error, f"saving {save.name}", self._planner.run.path))
        return self._under_way(save)

    def _again(
        self, kept: _Kept, live: LiveState, save: Save
    ) -> tuple[_Again, AutomodelError | None]:
        """Check whether the plan matches the state of this rank; if so, rank 0 creates the staging directory.

        Returns this rank's answer, and the failure on rank 0 or None.
        """
        digests = self._fitting(kept, live, save.snapshot)
        if digests is None or not self._is_rank0:
            return _Again(digests), None
        try:
            forecast = Forecast(kept.nbytes, free_bytes(self._planner.run.path))
            staging = self._planner.reserve(save.snapshot, save.name, forecast, save.staging)
        except Exception as error:
            return _Again(digests, failed=True), as_failure(
                error, f"saving {save.name}", self._planner.run.path
            )
        return _Again(digests, staging), None

    def _fitting(self, kept: _Kept, live: LiveState, snapshot: Snapshot) -> dict[str, str] | None:
        """The digests of this rank's small state, which is stored in *snapshot*; None where the plan does not match."""
        with contextlib.suppress(
            Exception
        ):  # the new plan, made instead, meets the same and reports it
            if live.outline == kept.outline and self._refreshed(kept, live):
                snapshot.objects = {
                    i.name: i.value.state_dict() for i in snapshot.items if i.kind == "object"
                }
                return {key: check_safe(key, value) for key, value in snapshot.objects.items()}
        return None

    def _refreshed(self, kept: _Kept, live: LiveState) -> bool:
        """Update the values that are not tensors in the layout; return False where one no longer has its size."""
        for name in kept.layout.values:
            value = live.trees[name[0]][name[1]]
            now = pickle.dumps(value)
            if kept.values.get(name) != now:
                check_safe_values(name[0], {name[1]: value})
                if not kept.layout.replace(name, bytes(saved(value))):
                    return False
                kept.values[name] = now
        return True

    # ---------------------------------------------------------------- in rank 0's thread

    def _complete(self, save: Save) -> None:
        """Finish the checkpoint, publish and export it, after rank 0 has written its share. Runs in a thread of rank
        0.

        Work that grows with the number of tensors is done in the writer process: in this thread it would contend with
        training for the GIL.
        """
        planner, common = self._planner, RankManifest(self._planner.ranks.rank)
        planner.write_common(save, common)
        self._await_rank_manifests(save.staging.path)
        num_ranks = planner.ranks.world_size
        common.files.update(
            planner.write_metadata(save, lambda: read_rank_manifests(save.staging.path, num_ranks))
        )
        if save.before_publishing is not None:
            save.before_publishing()
        nbytes = self._background.finalize(
            save.staging.path, planner.partial_manifest(save), common
        )
        report = planner.publish(save, nbytes)
        save.is_published = True
        if save.on_saved is not None:
            save.on_saved(report)
        if planner.exports(save.last):
            self._export_in_background(save)

    def _await_rank_manifests(self, staging: Path) -> None:
        for path in rank_manifest_paths(staging, self._planner.ranks.world_size):
            while not path.exists():
                self._background.pause(_POLL_SECONDS)

    def _export_in_background(self, save: Save) -> None:
        path = self._planner.run.root / str(save.name)
        sources = [path / layout.state_directory(name) for name in self._planner.assets]
        try:
            self._planner.run.check_lease()
            output, log_lines = self._background.export(sources, self._planner.run.lease_token)
        except Cancelled:
            for source in sources:
                clear_leftovers(source / layout.CONSOLIDATED, log.debug)
            return
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

    def leave_out_exports(self) -> None:
        """Disable exports from now on, and stop the one in progress."""
        self._background.leave_out_exports()

    # ---------------------------------------------------------------- until it has ended

    @property
    def progress(self) -> tuple[int, int, int] | None:
        """(step, bytes written by this rank, approximate total bytes) of the save that is being written, or None."""
        save = self._in_flight
        if save is None or save.is_published or self._background.state != "busy":
            return None
        return save.name.step, *self._background.progress

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows of a failure: all ranks should then call :meth:`settle`."""
        return self._background.state == "failed"

    def await_copies(self) -> None:
        """Call this before state on the device is changed: its copy may not be complete yet."""
        self._background.await_copies()

    def settle(self) -> bool:
        """Wait for the save in progress; return True if there was one. Collective.

        Raises :class:`SaveFailed` on all ranks where it failed or made no progress on any rank; its files are then
        removed.
        """
        save, background = self._in_flight, self._background
        if save is None:
            return False
        while True:
            mine = (background.state, background.still_seconds(), background.is_at_work)
            reports = agree.gather_objects(self._group, mine)
            states = [state for state, _, _ in reports]
            if "failed" in states:
                self._abandon(save)
            if "busy" not in states:
                break
            if all(still > self._patience_seconds for _, still, _ in reports):
                background.give_up(anyhow=not any(is_at_work for _, _, is_at_work in reports))
            background.wait(_POLL_SECONDS)
        self._in_flight = None
        return True

    def _abandon(self, save: Save) -> None:
        """Stop a failed save on all ranks, remove its staging directory, and raise its failure."""
        failure = self._background.abandon()
        self._in_flight, self._kept = None, None
        try:
            agree.all_or_nothing(self._group, failure)
        finally:
            save.staging.remove()

    def wait(self) -> None:
        """Wait until this rank has no upload in progress."""
        self._background.wait()

    def close(self) -> None:
        """Wait, then release the memory and the writer process."""
        self._kept = None
        self._background.close()


def on_cuda(state: Mapping[str, Any]) -> bool:
    """Whether a module of the state has parameters on a GPU."""
    modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    return any(parameter.is_cuda for module in modules for parameter in module.parameters())


def _buffers(items: Iterable[Item]) -> set[int]:
    """The data pointers of module buffers, which a forward pass may change."""
    return {
        buffer.data_ptr()
        for item in items
        if item.kind == "module"
        for buffer in item.value.buffers()
    }
