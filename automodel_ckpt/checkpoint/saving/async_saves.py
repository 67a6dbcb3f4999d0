"""Asynchronous checkpointing: the save in progress, and its completion.

This module coordinates the ranks; ``background.py`` is the part of one rank.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from automodel_ckpt.base.durable_io import free_bytes
from automodel_ckpt.checkpoint.export.files import clear_leftovers
from automodel_ckpt.checkpoint.export.next_steps import try_command
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.formats.planning import Share, TreePlan
from automodel_ckpt.checkpoint.jobs.jobs import (
    FileJob,
    RankManifest,
    merge_tree,
    rank_manifest_paths,
    read_rank_manifests,
)
from automodel_ckpt.checkpoint.jobs.writer import Finalize
from automodel_ckpt.checkpoint.parts.discovery import Item, classify
from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.checkpoint.parts.tree import Tree
from automodel_ckpt.checkpoint.saving.background import (
    Background,
    Cancelled,
    MemoryLayout,
    SaveTask,
    lay_out,
)
from automodel_ckpt.checkpoint.saving.planner import Planner
from automodel_ckpt.checkpoint.saving.publisher import Publisher
from automodel_ckpt.checkpoint.saving.save import Forecast, Proposal, Save, SaveReport
from automodel_ckpt.checkpoint.state.module_tensors import check_consistent
from automodel_ckpt.checkpoint.state.storable import (
    check_safe_values,
    is_sharded,
    local_tensor,
    saved,
)
from automodel_ckpt.errors import AutomodelError, ExportFailed, LeaseLost
from automodel_ckpt.parallel.ranks import agree

log = logging.getLogger("automodel_ckpt")

_POLL_SECONDS = 0.02
_NODES_POLL_SECONDS = 0.5
# Side files, headers and the alignment of files, in addition to a rank's share of the tensors.
_SLACK_BYTES = 1 << 20


@dataclass(slots=True)
class _Kept:
    """The plan of a save, for later saves while the state has the same *signature*.

    *layout* has the places of the trees in the memory of the writer, and *pickled* the values there that are not
    tensors. *written* is the rank manifest before anything is written; *nbytes* is what a save takes on disk.
    """

    signature: Any
    trees: Mapping[str, TreePlan]
    dp_ranks: list[int]
    layout: MemoryLayout
    written: RankManifest
    nbytes: int
    pickled: dict[tuple[str, str], bytes] = field(default_factory=dict)


class AsyncSaves:
    """The asynchronous saves of all ranks, one at a time.

    A save fails when its writer makes no progress for *timeout_seconds* while the ranks wait for it. Raises
    :class:`OSError` or :class:`AttributeError` where this system does not support asynchronous saves.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        timeout_seconds: float,
        on_cuda: bool,
    ) -> None:
        self._planner, self._settings = planner, planner.settings
        self._publisher = Publisher(planner.settings)
        self._nodes = planner.settings.nodes
        self._timeout_seconds = timeout_seconds
        self.background = Background(on_cuda=on_cuda)
        """The part of this rank."""
        self._in_flight: Save | None = None
        self._kept: _Kept | None = None

    # ---------------------------------------------------------------- a new plan

    def save(
        self, save: Save, proposals: list[Proposal], shares: Mapping[str, Sequence[Share]]
    ) -> SaveReport:
        """Plan a save, copy the state and start writing; return when the state is copied. Collective.

        *proposals* and *shares* come from all ranks. Raises :class:`SaveFailed` on all ranks.
        """
        signature = _signature(save)
        try:
            with self._settings.raise_on_all_ranks(f"saving {save.name}"):
                written, jobs, objects = self._planner.plan(save, proposals, shares)
                trees = lay_out(jobs)
                self._copy_and_start(save, written, trees, objects)
        except AutomodelError:
            self._abandon(save)
            raise
        # On all ranks: the next save calls collectives only with a plan.
        dp_ranks, nbytes = (
            [proposal.dp_rank for proposal in proposals],
            self._planner.expected_bytes,
        )
        self._kept = _Kept(signature, save.trees, dp_ranks, trees, written, nbytes)
        return self._report_started(save)

    def _report_started(self, save: Save) -> SaveReport:
        for tree in save.trees.values():
            tree.release_values()
        save.stall_seconds = time.monotonic() - save.started
        path = self._settings.run.path / str(save.name)
        return SaveReport(path, save.name.step, save.stall_seconds, published=False)

    def _copy_and_start(
        self, save: Save, written: RankManifest, trees: MemoryLayout, objects: Iterable[FileJob]
    ) -> None:
        """Copy the state, then write the copy in the background."""
        self._in_flight = save
        self._planner.create_on_node(save)
        layouts = [trees, lay_out(list(objects), trees.end)]
        staged = self.background.stage(layouts, copy_now=_buffers(save.items))
        # From here on the state may change.
        complete: Callable[[SaveTask], None] | None = None
        if self._settings.is_rank0:
            complete = partial(self._complete, save)
        elif self._nodes is not None and self._nodes.is_leader:
            nodes, staging = self._nodes, save.staging.path
            complete = lambda task: nodes.contribute(staging, task.pause)  # noqa: E731
        self.background.start(
            save.staging.path,
            written,
            staged,
            then=complete,
            doing=f"saving {save.name}",
            previous=save.previous,
        )

    # ---------------------------------------------------------------- the plan of the previous save

    def save_with_previous_plan(self, save: Save, state: Values) -> SaveReport | None:
        """Save with the plan of the previous save; return None, with no effect, where it does not match on some rank.

        Collective. Raises on all ranks what prevented rank 0 from creating the staging directory, and
        :class:`RecipeError` where state of an optimizer differs that must not. Later failures are raised by
        :meth:`wait_for_save` on all ranks.
        """
        kept = self._kept
        if kept is None:
            return None
        doing, where = f"saving {save.name}", self._settings.run.path
        proposal, failure = self._propose_reuse(kept, save, state), None
        if proposal.digests is not None and self._settings.is_rank0:
            try:
                self._planner.reserve(save, Forecast(kept.nbytes, free_bytes(where)), proposal)
            except Exception as error:
                failure = as_failure(error, doing, where)
        proposals = agree.gather_objects(self._settings.group, proposal)
        # All ranks see rank 0's proposal, so that all of them enter this collective, or none does.
        if proposals[0].digests is not None and not proposals[0].staging:
            agree.all_or_nothing(self._settings.group, failure)
        digests = [proposal.digests for proposal in proposals if proposal.digests is not None]
        # Rank 0 may have created its directory before it sees that another rank's state differs.
        if len(digests) < len(proposals):
            self._kept = None
            save.staging.remove()
            return None
        check_consistent(digests)
        # The plan may be of a time when the ranks had the same values.
        replicated = [proposal.replicated for proposal in proposals]
        self._planner.replica_warnings.compare(self._settings.group, save.replicated, replicated)
        save.staging.path, save.previous = Path(proposals[0].staging), proposals[0].previous
        self._in_flight = save  # from here on, wait_for_save reports failures
        try:
            for name, tree in kept.trees.items():
                tree.flat = save.trees[name].flat
            save.trees = dict(kept.trees)
            objects = self._planner.object_jobs(save, digests, kept.dp_ranks)
            self._copy_and_start(save, kept.written, kept.layout, objects)
        except Exception as error:
            # Not raised: the last exchange is over, so the other ranks would not notice.
            self.background.fail(as_failure(error, doing, where))
        return self._report_started(save)

    def _propose_reuse(self, kept: _Kept, save: Save, state: Values) -> Proposal:
        """Read the state of this rank, and compare it with the plan."""
        # Whatever fails here fails again, and is reported, when the save is planned anew.
        with contextlib.suppress(Exception):
            self._planner.read_state(save, state)
            if _signature(save) == kept.signature and _update_values(kept, save):
                return self._planner.propose_values(save)
        return Proposal()

    # ---------------------------------------------------------------- in rank 0's thread

    def _complete(self, save: Save, task: SaveTask) -> None:
        """Finish the checkpoint, publish and export it, after rank 0 has written its share. Runs in a thread of rank
        0.

        Work that grows with the number of tensors is done in the writer process: in this thread it would contend with
        training for the GIL.
        """
        publisher, ranks = self._publisher, self._settings.ranks
        staging = save.staging.path
        num_ranks = ranks.world_size
        common = RankManifest(ranks.rank)
        publisher.write_common(save, common)
        if self._nodes is not None:
            self._nodes.contribute(staging, task.pause)
        # No collective: two threads that use one process group hang or crash. A rank manifest
        # appears complete, by a rename, and is the last thing that the writer of its rank creates.
        for path in rank_manifest_paths(staging, num_ranks):
            while not path.exists():
                task.pause(_POLL_SECONDS)
        manifest = publisher.partial_manifest(save)

        def merged(name: str) -> Tree:
            written = read_rank_manifests(staging, num_ranks)
            return merge_tree(name, manifest.trees[name], written)

        def finish() -> int:
            nbytes: int = task.do(Finalize(str(staging), manifest, common), staging)
            return nbytes

        report = publisher.complete(save, common, merged, finish, task.pause)
        save.is_published = True
        is_exported = self._settings.makes_export(save.last)
        # A log must not ask for a command that this run is about to carry out.
        publisher.notify(save, replace(report, export_command=None) if is_exported else report)
        if is_exported:
            self._export_in_background(save, task)

    def _export_in_background(self, save: Save, task: SaveTask) -> None:
        path = self._settings.run.root / str(save.name)
        sources = [path / layout.state_directory(name) for name in self._settings.assets]
        try:
            self._settings.run.check_lease()
            lease = self._settings.run.lease_token
            output, log_lines = self.background.export(task, sources, lease)
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
        self._settings.run.on_exported(str(save.name))
        for line in log_lines:
            log.info("%s", line)
        log.info("Hugging Face export of %s: %s", save.name, output)
        if save.last:
            log.info("try it: %s", try_command(Path(output)))

    # ---------------------------------------------------------------- waiting

    @property
    def progress(self) -> tuple[int, int, int] | None:
        """(step, bytes written by this rank, approximate total bytes) of the save that is being written, or None."""
        save = self._in_flight
        if save is None or save.is_published or self.background.state != "busy":
            return None
        return save.name.step, *self.background.progress

    def wait_for_save(self) -> bool:
        """Wait for the save in progress; return True if there was one. Collective.

        Raises :class:`SaveFailed` on all ranks where it failed or made no progress on any rank; its files are then
        removed.
        """
        save, background = self._in_flight, self.background
        if save is None:
            return False
        # Short exchanges, no collective that waits: a save may exceed the group's timeout.
        while True:
            mine = (background.state, background.idle_seconds(), background.is_writing)
            reports = agree.gather_objects(self._settings.group, mine)
            states = [state for state, _, _ in reports]
            if "failed" in states:
                self._abandon(save)
            if "busy" not in states:
                break
            # Progress of any writer counts: the others may be idle only because they wait for it.
            is_stalled = all(seconds > self._timeout_seconds for _, seconds, _ in reports)
            # Where none writes, what waits is the publication.
            any_writes = any(is_writing for _, _, is_writing in reports)
            if is_stalled and (background.is_writing or not any_writes):
                background.give_up()
            background.wait(_POLL_SECONDS)
        self._in_flight = None
        return True

    def _abandon(self, save: Save) -> None:
        """Stop a failed save on all ranks, remove its staging directory, and raise its failure."""
        # The exchange below is also a barrier: rank 0 removes the directory only after every rank
        # has stopped its writer, which would write into it.
        try:
            failure = self.background.abandon()
        except Exception as error:
            # Not raised here: every rank must reach the exchange.
            failure = as_failure(
                error, f"stopping the save of {save.name}", self._settings.run.path
            )
        self._in_flight = None
        self._kept = None
        try:
            agree.all_or_nothing(self._settings.group, failure)
        finally:
            save.staging.remove()

    def abandon_save(self) -> None:
        """Stop the save in progress of this rank. Not collective."""
        save, self._in_flight = self._in_flight, None
        if save is not None and self.background.state == "busy":
            self.background.abandon()
            self._kept = None
            save.staging.remove()

    def wait_for_nodes(self) -> None:
        """Wait until this rank has no save in progress.

        If each node has its own directory, also wait until rank 0 has published the save here: until then, this node's
        process serves the save.

        A save is abandoned if a node has ended that this one waits for.
        """
        save = self._in_flight
        if save is None or self._nodes is None or not self._nodes.is_leader:
            self.background.wait()
            return
        while self.background.state == "busy":
            if self._lacks_node(save):
                self.abandon_save()
            self.background.wait(_NODES_POLL_SECONDS)
        if self.background.state != "failed" and not self._settings.is_rank0:
            while save.staging.path.is_dir() and not self._lacks_node(save):
                time.sleep(_NODES_POLL_SECONDS)
            save.staging.remove()

    def _lacks_node(self, save: Save) -> bool:
        """Whether a node has ended that this one waits for: rank 0's, or one with files that rank 0 does not have."""
        absent = {0}
        if self._settings.is_rank0:
            absent = set()
            # The directory was renamed if it is published.
            if save.staging.path.is_dir():
                paths = rank_manifest_paths(save.staging.path, self._settings.ranks.world_size)
                absent = {rank for rank, path in enumerate(paths) if not path.exists()}
        return self._nodes is not None and self._nodes.have_ended(absent)

    def close(self) -> None:
        """Wait, then release the memory and the writer process."""
        self._kept = None
        self.background.close()


def create_async_saves(
    planner: Planner, state: Values, *, timeout_seconds: float
) -> tuple[AsyncSaves | None, str]:
    """Set up asynchronous saves of *state*, with memory for this rank's share of it. Collective.

    Returns None and the reason where a rank does not support them. Raises on all ranks what one of them raises.
    """
    created = []

    def create() -> str:
        """Return why this rank does not support asynchronous saves; empty where it does."""
        try:
            items = classify(state)
            modules = [item.value for item in items if item.kind == "module"]
            on_cuda = any(each.is_cuda for module in modules for each in module.parameters())
            created.append(AsyncSaves(planner, timeout_seconds=timeout_seconds, on_cuda=on_cuda))
            nbytes = planner.forecast(items).nbytes
            created[0].background.reserve(
                nbytes // planner.settings.ranks.world_size + _SLACK_BYTES
            )
        except (OSError, AttributeError) as error:  # AttributeError: a system without memfd_create
            return str(error) or type(error).__name__
        return ""

    reasons = ["an error"]
    try:
        doing, where = "preparing asynchronous saves", planner.settings.run.path
        failure = partial(as_failure, doing=doing, where=where)
        reasons = agree.gather_or_raise(planner.settings.group, create, failure)
    finally:
        # Closed again where any rank does not support them, or fails.
        if any(reasons):
            for saves in created:
                saves.close()
    reason = next(filter(None, reasons), "")
    return (None, reason) if reason else (created[0], "")


def _buffers(items: Iterable[Item]) -> set[int]:
    """The data pointers of module buffers, which a forward pass may change."""
    modules = [item.value for item in items if item.kind == "module"]
    return {buffer.data_ptr() for module in modules for buffer in module.buffers()}


def _signature(save: Save) -> Any:
    """What the plan of a save depends on. Its trees are not yet assigned."""
    items = [(item.name, item.kind, item.scope, item.aliases, item.owner) for item in save.items]
    trees = {}
    for name, tree in save.trees.items():
        specs = {key: _spec(value) for key, value in tree.flat.items()}
        trees[name] = tree.kinds, tree.tied, tree.paths, list(specs.items())
    return items, trees


def _spec(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value)
    spec = type(value), value.dtype, value.shape
    if is_sharded(value):
        return *spec, local_tensor(value).shape, value.placements, value.device_mesh
    return spec


def _update_values(kept: _Kept, save: Save) -> bool:
    """Update the values that are not tensors in the memory; return False where one no longer has its size."""
    for name in kept.layout.values:
        tree, key = name
        value = save.trees[tree].flat[key]
        pickled = pickle.dumps(value)
        if kept.pickled.get(name) == pickled:
            continue
        check_safe_values(tree, {key: value})
        # All later data would move, in memory and in the file: a new size requires a new plan.
        if not kept.layout.replace(name, bytes(saved(value))):
            return False
        kept.pickled[name] = pickled
    return True
