"""The one deep object: a plain mapping of state goes in, a checkpoint that can be trusted comes out, and back.

    checkpointer = Checkpointer("checkpoints", ranks=ranks, group=group)
    state = discover(recipe)
    resumed = checkpointer.load(state)          # None: a fresh run
    checkpointer.save(state, step=20, epoch=0, ...)

A save is three short exchanges between the ranks and, between them, work that each rank does alone: plan, write, and
(the leader, rank 0) publish. What fails on one rank fails on all, with that rank's message.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pickle
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.planner import SavePlan

from automodel_ckpt.checkpoint import commit, layout, policy, resume
from automodel_ckpt.checkpoint.adapter_assets import AdapterAssets
from automodel_ckpt.checkpoint.background import Background, Cancelled, Layout, lay_out
from automodel_ckpt.checkpoint.composed import placed_files
from automodel_ckpt.checkpoint.direct import METER
from automodel_ckpt.checkpoint.discovery import Item, classify, refuse_unsafe
from automodel_ckpt.checkpoint.environment import environment
from automodel_ckpt.checkpoint.export_publish import clear_leftovers
from automodel_ckpt.checkpoint.export_source import BaseMaps
from automodel_ckpt.checkpoint.failures import as_failure
from automodel_ckpt.checkpoint.file_system import overlay_warning, size_text
from automodel_ckpt.checkpoint.forecast import Forecast, forecast_bytes, free_bytes
from automodel_ckpt.checkpoint.formats import hf, safetensors, torch_save
from automodel_ckpt.checkpoint.formats.planning import TreePlan, saved_value
from automodel_ckpt.checkpoint.inline_export import export_from_memory
from automodel_ckpt.checkpoint.jobs import FileJob, Job, run_all
from automodel_ckpt.checkpoint.live_state import LiveState, look
from automodel_ckpt.checkpoint.loading import Loader, shown
from automodel_ckpt.checkpoint.manifest import Manifest, Part, StateRecord, TreePart, merge_files, merge_tree
from automodel_ckpt.checkpoint.objects import ObjectPlanner
from automodel_ckpt.checkpoint.placement import Placement
from automodel_ckpt.checkpoint.run_directory import RunDirectory
from automodel_ckpt.checkpoint.shared_storage import refuse_separate_storage
from automodel_ckpt.checkpoint.side_files import Assets, write_finished, write_for_export
from automodel_ckpt.checkpoint.trees import Owners, module_state, optimizer_tree, whole_of
from automodel_ckpt.checkpoint.verify import Level, verify
from automodel_ckpt.distributed import agree
from automodel_ckpt.errors import (
    AutomodelError,
    CheckpointUnusable,
    ExportFailed,
    Problem,
    RecipeError,
    SaveFailed,
)

log = logging.getLogger("automodel_ckpt")

ModelFormat = Literal["safetensors", "torch_save"]
ModelLayout = Literal["shards", "hf", "adapter"]
_POLL_SECONDS = 0.02
# Beside the tensors, and for the alignment of files.
_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Resumed:
    """What was loaded: the checkpoint's path, its step and epoch, and its manifest."""

    path: Path
    step: int
    epoch: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A save that became a checkpoint, or will (*published* false: asynchronous, only the stall is known yet).

    Seconds of wall time, bytes of all its files; *export* is the consolidated directory where one was made,
    *export_failure* why there is none though one was due. Training waits for the *stall*, the checkpoint is there after
    the *total*; *export_command* makes the Hugging Face files, None where there is nothing to be made.
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


@dataclass(frozen=True, slots=True)
class Saving:
    """How far a save is: bytes of this rank's share that are written, of about how many."""

    step: int
    written_bytes: int
    total_bytes: int


@dataclass(slots=True)
class _Snapshot:
    """The state of one rank at a save: a plan per tree, a value per other object."""

    items: list[Item]
    trees: dict[str, TreePlan] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Proposal:
    """What a rank tells the others before a save: its plans, the digests of its other state, its place, and of the
    trees whose files all ranks fill together, how these are named."""

    plans: dict[str, SavePlan]
    digests: dict[str, str]
    dp_rank: int
    staging: str | None
    naming: dict[str, hf.Naming]


@dataclass(slots=True)
class _Again:
    """What a rank tells the others where its plan of the save before is still good."""

    digests: dict[str, str]
    staging: str


@dataclass(slots=True)
class _Kept:
    """The plan of an asynchronous save, for those that follow: it is good as long as the state has this *outline*.

    *layout* is that of the trees in the writer's memory; *values* are those in it that are no tensors, pickled;
    *part* is what the manifest learns of the trees beside what is written; *nbytes* what a save takes on the disk.
    """

    outline: list[Any]
    snapshot: _Snapshot
    dp_ranks: list[int]
    layout: Layout
    part: Part
    nbytes: int
    values: dict[tuple[str, str], bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Save:
    """One save, from its plan to its publication. *staging* is where it is written, *records* how each attribute is."""

    name: layout.CheckpointName
    staging: Path
    snapshot: _Snapshot
    config_yaml: str
    losses: dict[str, Any]
    progress: dict[str, Any]
    validated: bool
    last: bool
    before_publishing: Callable[[], None] | None
    on_saved: Callable[[SaveReport], None] | None
    started: float
    stall_seconds: float = 0.0
    is_published: bool = False
    records: dict[str, StateRecord] = field(default_factory=dict)


class Checkpointer:
    """Saves and loads the state of a run in *directory*.

    *group* is a gloo process group of all ranks, used by nothing else meanwhile; *assets* gives, by the attribute name
    of a module, what its export needs (entries may come later, before the first save). The other arguments are the
    recipe's ``checkpoint:`` keys of the same names; a background save whose writer does not move at all for
    *patience_seconds* while it is waited for has failed. Raises :class:`RecipeError` for keys that exclude each other.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        ranks: layout.RankLayout,
        group: ProcessGroup | None,
        assets: Mapping[str, Assets] | None = None,
        model_save_format: ModelFormat = "safetensors",
        model_layout: ModelLayout = "shards",
        save_consolidated: bool | str | None = None,
        restore_from: str | None = None,
        save_optimizer: bool = True,
        best_metric_key: str = "val_loss",
        best_mode: policy.Mode = "min",
        keep_last: int | None = None,
        keep_best: int = 0,
        keep_every_steps: int | None = None,
        keep_steps: Iterable[int] = (),
        verify: Level = "digest",
        allow_missing_state: Iterable[str] = (),
        on_incompatible: Literal["error", "sibling"] = "error",
        is_async: bool = False,
        patience_seconds: float = 1800.0,
    ) -> None:
        if model_layout != "shards" and model_save_format != "safetensors":
            raise RecipeError(
                "Hugging Face files cannot be written in that format",
                where="checkpoint.model_save_format",
                value=model_save_format,
                remedy=f"leave it out: with checkpoint.model_layout {model_layout} the files are safetensors",
            )
        keep = policy.KeepPolicy(keep_last, keep_best, keep_every_steps, frozenset(keep_steps), best_mode)
        self._run = RunDirectory(Path(directory), keep, best_metric_key)
        self._ranks, self._group = ranks, group
        self.assets = dict(assets or {})
        self._format, self._layout = model_save_format, model_layout
        self._export_when = _export_when(save_consolidated, model_save_format, model_layout)
        self._restore_from = restore_from
        self._save_optimizer = save_optimizer
        self._verify: Level = verify
        self._allow_missing = frozenset(allow_missing_state)
        self._on_incompatible = on_incompatible
        self._resumed_step: int | None = None
        self._resumed_from: str | None = None
        self._told = False
        self._wants_background = is_async
        self._patience_seconds = patience_seconds
        self._background: Background | None = None
        self._in_flight: _Save | None = None
        self._writing: tuple[int, int, int] | None = None
        self._kept: _Kept | None = None
        self._forecast_bytes = 0

    @property
    def is_leader(self) -> bool:
        return self._ranks.rank == 0

    @property
    def directory(self) -> Path:
        """Where checkpoints are saved, as the user wrote it."""
        return self._run.path

    # ---------------------------------------------------------------- before training

    def open(self) -> None:
        """Create the run directory and hold it, before anything expensive is built. Called on all ranks.

        Raises :class:`RecipeError`, the same on all ranks, where it cannot be written, another live run holds it, or
        the ranks do not share it.
        """
        with self._failing_together("opening checkpoint.checkpoint_dir", RecipeError):
            if self.is_leader:
                self._run.hold()
                if (warning := overlay_warning(self.directory)) is not None:
                    log.warning("%s", warning)
        with self._failing_together("looking for shared storage", RecipeError):
            refuse_separate_storage(self._run.root, self._ranks.rank, self._group)

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse, before training, state that clashes or could not be read back safely. Raises :class:`RecipeError`."""
        items = classify(state)
        owners = Owners(items)
        for item in items:
            if item.kind in ("object", "lr_scheduler"):
                refuse_unsafe(item.name, item.value.state_dict())
            elif item.kind == "optimizer" and self._save_optimizer:
                owners.refuse_strangers(item)

    def forecast(self, state: Mapping[str, Any]) -> Forecast:
        """What one save will take and what is free. Raises :class:`RecipeError` as :meth:`check`."""
        return Forecast(self._expected_bytes(classify(state)), free_bytes(self.directory))

    def _expected_bytes(self, items: Iterable[Item], states: Mapping[str, Mapping[str, Any]] | None = None) -> int:
        return forecast_bytes(
            items,
            world_size=self._ranks.world_size,
            save_optimizer=self._save_optimizer,
            num_exports=1 if self.assets and self._export_when == "every" else 0,
            states=states,
        )

    def refuse_too_little_space(self, state: Mapping[str, Any]) -> None:
        """Before the first step: say what a checkpoint takes. Raises :class:`SaveFailed` where not even one fits."""
        with self._failing_together("the forecast of a checkpoint's size"):
            if self.is_leader:
                forecast = self.forecast(state)
                self._refuse_what_does_not_fit(forecast)
                log.info(
                    "a checkpoint takes about %s; %s are free",
                    size_text(forecast.nbytes),
                    size_text(forecast.free_bytes),
                )

    def _refuse_what_does_not_fit(self, forecast: Forecast) -> None:
        if not forecast.fits:
            raise SaveFailed(
                "a checkpoint does not fit on the disk",
                where=str(self.directory),
                value=f"it takes about {size_text(forecast.nbytes)}, {size_text(forecast.free_bytes)} are free",
                remedy="free space (`ckpt prune` removes old checkpoints), set checkpoint.keep_last, "
                "or another checkpoint.checkpoint_dir",
            )

    # ---------------------------------------------------------------- save

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Before the first step: have what asynchronous saves need, or say why saves will be synchronous after all.

        Called on all ranks; nothing to do for synchronous saves.
        """
        if not self._wants_background or self._background is not None:
            return
        reason = ""
        try:
            self._background = Background(on_cuda=_on_cuda(state))
            self._background.reserve(self.forecast(state).nbytes // self._ranks.world_size + _SLACK_BYTES)
        except (OSError, AttributeError) as error:  # AttributeError: a system without memfd_create
            reason = str(error)
        reasons = [reason for reason in agree.gather_objects(self._group, reason) if reason]
        if reasons:
            self._wants_background = False
            self._end_background()
            if self.is_leader:
                log.warning("saves will be synchronous, since not every rank can save asynchronously: %s", reasons[0])

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        epoch: int,
        config_yaml: str,
        losses: Mapping[str, Any],
        progress: Mapping[str, Any],
        validated: bool = False,
        last: bool = False,
        before_publishing: Callable[[], None] | None = None,
        on_saved: Callable[[SaveReport], None] | None = None,
    ) -> SaveReport:
        """Save *state* as ``epoch_{epoch}_step_{step}``; returns when it is published.

        Asynchronously (``is_async``) it returns when the state is copied, :attr:`SaveReport.published` false; before,
        it waits for the save before. What fails later is raised by :meth:`settle`.

        *losses* go to losses.json, and with *validated* rank the checkpoint; *last* marks the last one of a run that
        ends by itself; the leader calls *before_publishing* when all is written, and *on_saved* with the report when it
        is published. Called on all ranks. Raises :class:`SaveFailed`, the same on all ranks, and leaves no trace.
        """
        self.settle()
        started = time.monotonic()
        self.prepare(state)
        name = layout.CheckpointName(step=step, epoch=epoch)
        if self.is_leader:
            log.info("Saving checkpoint to %s", self.directory / str(name))
        make = partial(
            _Save, name, config_yaml=config_yaml, losses=dict(losses), progress=dict(progress), validated=validated,
            last=last, before_publishing=before_publishing, on_saved=on_saved, started=started,
        )  # fmt: skip
        if self._kept is not None and (report := self._save_again(self._kept, state, make)) is not None:
            return report
        with self._failing_together(f"saving {name}"):
            snapshot = self._snapshot(state)
            proposal = self._propose(snapshot, name)
        proposals = agree.gather_objects(self._group, proposal)
        save = make(staging=Path(proposals[0].staging or ""), snapshot=snapshot)
        return self._save_now(save, proposals) if self._background is None else self._save_later(save, proposals)

    def _save_now(self, save: _Save, proposals: list[_Proposal]) -> SaveReport:
        name, published = save.name, None
        try:
            with self._failing_together(f"saving {name}"):
                part, jobs, objects = self._plan(save, proposals)
                self._writing = name.step, METER.nbytes, sum(job.size for job in (*jobs, *objects))
                run_all([*jobs, *objects], save.staging, part)
                if self.is_leader:
                    self._write_common(save, part)
                commit.write_file(save.staging / layout.part_file(self._ranks.rank), part.to_bytes())
            with self._failing_together(f"publishing {name}"):
                if self.is_leader:
                    published = self._publish(save, self._parts(save.staging))
        except SaveFailed:
            if self.is_leader:
                commit.discard(save.staging)
            raise
        finally:
            self._writing = None
        self._tell_once(save.snapshot.items)
        report = self._published(save, published) if published is not None else self._report(save)
        report = self._with_export(report, save) if self._exports(save.last) else report
        if save.on_saved is not None and self.is_leader:
            save.on_saved(report)
        return report

    def _save_later(self, save: _Save, proposals: list[_Proposal]) -> SaveReport:
        try:
            with self._failing_together(f"saving {save.name}"):
                part, jobs, objects = self._plan(save, proposals)
                live = self._live(save.snapshot)
                trees = lay_out(jobs)
                self._upload(save, part, trees, objects)
        except SaveFailed:
            self._abandon(save)
            raise
        self._tell_once(save.snapshot.items)
        if all(agree.gather_objects(self._group, live is not None)) and live is not None:
            dp_ranks = [proposal.dp_rank for proposal in proposals]
            self._kept = _Kept(live.outline, save.snapshot, dp_ranks, trees, part, self._forecast_bytes)
        return self._under_way(save)

    def _under_way(self, save: _Save) -> SaveReport:
        for tree in save.snapshot.trees.values():
            tree.hold({})  # what training replaces is to be freed
            tree.state_dict = {}
        save.stall_seconds = time.monotonic() - save.started
        return SaveReport(self.directory / str(save.name), save.name.step, save.stall_seconds, published=False)

    def _upload(self, save: _Save, part: Part, trees: Layout, objects: Iterable[Job]) -> None:
        """Copy the state, and have the copy written."""
        assert self._background is not None
        self._in_flight = save
        staged = self._background.stage(
            [trees, lay_out(list(objects), trees.end)], at_once=_buffers(save.snapshot.items)
        )
        # From here on the state may change.
        then = partial(self._complete, save) if self.is_leader else None
        self._background.start(save.staging, part, staged, then=then, doing=f"saving {save.name}")

    def _live(self, snapshot: _Snapshot) -> LiveState | None:
        """The state as a later save can look at it; None where that is not what was planned."""
        with contextlib.suppress(Exception):  # a custom state_dict may do anything: it has succeeded otherwise
            live = look(snapshot.items, save_optimizer=self._save_optimizer)
            if live.is_what({name: tree.flat() for name, tree in snapshot.trees.items()}):
                return live
        return None

    # ---------------------------------------------------------------- a save like the one before

    def _save_again(self, kept: _Kept, state: Mapping[str, Any], make: Callable[..., _Save]) -> SaveReport | None:
        """Save with the plan of the save before; None, and nothing has happened, where it does not fit on some rank.

        What fails from the agreement on is raised by :meth:`settle`, on all ranks.
        """
        assert self._background is not None
        before = kept.snapshot
        snapshot = _Snapshot(classify(state), before.trees, before.tied, before.placements)
        save, live = make(staging=Path(), snapshot=snapshot), LiveState()
        with contextlib.suppress(Exception):  # planning anew meets it again, and says so
            live = look(snapshot.items, save_optimizer=self._save_optimizer)
        answers = agree.gather_objects(self._group, self._again(kept, live, save))
        agreed = [answer for answer in answers if answer is not None]
        if len(agreed) < len(answers):
            self._kept = None
            if self.is_leader and answers[0] is not None:
                commit.discard(Path(answers[0].staging))
            return None
        save.staging = Path(agreed[0].staging)
        try:
            for name, tree in before.trees.items():
                tree.hold(live.trees[name])
            objects = self._object_plans(save, [answer.digests for answer in agreed], kept.dp_ranks)
            self._upload(save, kept.part, kept.layout, objects)
        except Exception as error:
            self._background.fail(as_failure(error, f"saving {save.name}", self.directory))
        return self._under_way(save)

    def _again(self, kept: _Kept, live: LiveState, save: _Save) -> _Again | None:
        """This rank's word on whether the plan is good for what it has now; on the leader that reserves a place."""
        snapshot = save.snapshot
        with contextlib.suppress(Exception):
            if live.outline == kept.outline and self._refreshed(kept, live):
                snapshot.objects = {i.name: i.value.state_dict() for i in snapshot.items if i.kind == "object"}
                digests = {key: refuse_unsafe(key, value) for key, value in snapshot.objects.items()}
                return _Again(digests, self._reserve(snapshot, save.name, kept.nbytes) if self.is_leader else "")
        return None

    def _refreshed(self, kept: _Kept, live: LiveState) -> bool:
        """Lay out what values are now; False where one does not fit where it stood."""
        for name in kept.layout.values:
            value = live.trees[name[0]][name[1]]
            now = pickle.dumps(value)
            if kept.values.get(name) != now:
                if not kept.layout.replace(name, saved_value(value)):
                    return False
                kept.values[name] = now
        return True

    def _complete(self, save: _Save) -> None:
        """On the leader, in the background, when its own share is written: what there is to do until it is published,
        and its export."""
        common = Part(self._ranks.rank)
        self._write_common(save, common)
        parts = self._awaited_parts(save.staging)
        parts[self._ranks.rank].files.update(common.files)
        report = self._published(save, self._publish(save, parts))
        save.is_published = True
        if save.on_saved is not None:
            save.on_saved(report)
        if self._exports(save.last):
            self._export_in_background(save)

    def _awaited_parts(self, staging: Path) -> list[Part]:
        assert self._background is not None
        while True:
            with contextlib.suppress(FileNotFoundError):
                return self._parts(staging)
            self._background.pause(_POLL_SECONDS)

    def _export_in_background(self, save: _Save) -> None:
        assert self._background is not None
        path = self._run.root / str(save.name)
        sources = [path / layout.state_directory(name) for name in self.assets]
        try:
            output, said = self._background.export(sources)
        except Cancelled:
            for source in sources:
                clear_leftovers(source / layout.CONSOLIDATED, log.debug)
            return
        except Exception as error:
            failure = as_failure(error, f"exporting {save.name} (the checkpoint itself is safe)", path)
            raise ExportFailed.all_of(failure.problems) from error
        for line in said:
            log.info("%s", line)
        log.info("Hugging Face export of %s: %s", save.name, output)

    # ---------------------------------------------------------------- the save in the background

    def saving(self) -> Saving | None:
        """How far the save under way is; None where there is none. May be called by any thread."""
        writing, save, background = self._writing, self._in_flight, self._background
        if writing is not None:
            step, before, total = writing
            return Saving(step, METER.nbytes - before, total)
        if save is not None and not save.is_published and background is not None and background.state == "busy":
            return Saving(save.name.step, *background.progress)
        return None

    @property
    def upload_failed(self) -> bool:
        """Whether this rank knows of a background save that failed: let all ranks call :meth:`settle`."""
        return self._background is not None and self._background.state == "failed"

    def await_copies(self) -> None:
        """To be called before state on the device is changed: its copy may still have to be taken."""
        if self._background is not None:
            self._background.await_copies()

    def settle(self) -> bool:
        """Return when no save is under way in the background; True if one was. Called on all ranks.

        Raises :class:`SaveFailed`, the same on all ranks, where it failed on one or came to a standstill; then there is
        no trace of it.
        """
        save, background = self._in_flight, self._background
        if save is None or background is None:
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

    def _abandon(self, save: _Save) -> None:
        """A background save failed: end it on all ranks, clear it away, and raise what it was."""
        assert self._background is not None
        failure = self._background.abandon()
        self._in_flight, self._kept = None, None
        try:
            agree.all_or_nothing(self._group, failure)
        finally:
            if self.is_leader:
                commit.discard(save.staging)

    def _end_background(self) -> None:
        if self._background is not None:
            background, self._background, self._kept = self._background, None, None
            background.close()

    # ---------------------------------------------------------------- the parts of a save

    def _snapshot(self, state: Mapping[str, Any]) -> _Snapshot:
        snapshot = _Snapshot(classify(state))
        owners = Owners(snapshot.items)
        for item in snapshot.items:
            if item.kind == "module":
                (tree, tied), whole = module_state(item.value), whole_of(item.value)
                snapshot.tied[item.name] = tied if whole is None else dict(whole.tied)
                snapshot.trees[item.name] = TreePlan(item.name, layout.state_directory(item.name), tree, nested=False)
            elif item.kind == "optimizer" and self._save_optimizer:
                tree = optimizer_tree(item, snapshot.items, owners)
                snapshot.trees[item.name] = TreePlan(item.name, layout.state_directory(item.name), tree, nested=True)
            elif item.kind == "object":
                snapshot.objects[item.name] = item.value.state_dict()
        return snapshot

    def _propose(self, snapshot: _Snapshot, name: layout.CheckpointName) -> _Proposal:
        plans = {tree.name: tree.local() for tree in snapshot.trees.values()}
        digests = {key: refuse_unsafe(key, value) for key, value in snapshot.objects.items()}
        staging = None
        if self.is_leader:
            states = {tree.name: tree.state_dict for tree in snapshot.trees.values()}
            self._forecast_bytes = self._expected_bytes(snapshot.items, states)
            staging = self._reserve(snapshot, name, self._forecast_bytes)
        return _Proposal(plans, digests, self._ranks.dp_rank, staging, self._naming(snapshot))

    def _reserve(self, snapshot: _Snapshot, name: layout.CheckpointName, nbytes: int) -> str:
        """On the leader: a staging directory for a checkpoint of about so many bytes."""
        self._run.hold()
        self._refuse_what_does_not_fit(Forecast(nbytes, free_bytes(self.directory)))
        path = commit.reserve(self._run.root, str(name))
        for tree in snapshot.trees.values():
            (path / tree.directory).mkdir()
        return str(path)

    def _naming(self, snapshot: _Snapshot) -> dict[str, hf.Naming]:
        """In the layout hf: what the base says of each module's files. The dtype is that of training. In the layout
        adapter, of adapters only."""
        if self._layout == "shards":
            return {}
        maps = {name: replace(assets.maps, dtype=None) for name, assets in self.assets.items()}
        naming = {name: hf.Naming(maps.get(name, BaseMaps()), tied) for name, tied in snapshot.tied.items()}
        return {name: how for name, how in naming.items() if self._layout == "hf" or how.maps.is_adapter}

    def _plan(self, save: _Save, proposals: list[_Proposal]) -> tuple[Part, list[Job], list[FileJob]]:
        """What this rank has to write of trees and of objects, and the part that will say so; *save* learns how each
        attribute is stored."""
        part, jobs, snapshot = Part(self._ranks.rank), list[Job](), save.snapshot
        kinds = {item.name: item.kind for item in snapshot.items}
        for tree in snapshot.trees.values():
            tree.settle([proposal.plans[tree.name] for proposal in proposals], self._ranks.rank)
            if (naming := proposals[0].naming.get(tree.name)) is not None:
                placement = snapshot.placements[tree.name] = hf.placement_of(tree, tree.directory, naming)
                part.trees[tree.name] = TreePart()
                jobs += hf.plan_jobs(tree, part.rank, placement)
            elif kinds[tree.name] == "module" and self._format == "safetensors":
                assets = self.assets.get(tree.name)
                part.trees[tree.name] = TreePart()
                jobs += safetensors.plan_jobs(tree, part.rank, assets.file_index_mapping if assets else None)
            else:
                job, items = torch_save.plan_jobs(tree, part.rank)
                part.trees[tree.name] = TreePart(dcp_items=items)
                jobs.append(job)
        objects = self._object_plans(save, [p.digests for p in proposals], [p.dp_rank for p in proposals])
        return part, jobs, objects

    def _object_plans(
        self, save: _Save, digests: Sequence[Mapping[str, str]], dp_ranks: Sequence[int]
    ) -> list[FileJob]:
        objects = ObjectPlanner(self._ranks, digests, dp_ranks)
        save.records = {item.name: self._record(item, save.snapshot, objects) for item in save.snapshot.items}
        return objects.jobs

    def _record(self, item: Item, snapshot: _Snapshot, objects: ObjectPlanner) -> StateRecord:
        if item.kind == "object":
            return objects.plan(item, snapshot.objects[item.name])
        saved = item.kind == "module" or self._save_optimizer
        return StateRecord(item.kind, item.scope if saved else "not saved", item.path, aliases=item.aliases)

    def _write_common(self, save: _Save, part: Part) -> None:
        """What the leader alone writes: the recipe, the losses, and what exporting each module needs."""
        for file, data in (
            (layout.CONFIG, save.config_yaml.encode()),
            (layout.LOSSES, (_json_text(save.losses) + "\n").encode()),
        ):
            part.files[file] = commit.write_file(save.staging / file, data)
        placements = save.snapshot.placements
        for name, placement in placements.items():
            write_finished(self.assets.get(name), placement, save.staging, part)
        for name, assets in self.assets.items():
            if name not in placements:
                write_for_export(assets, save.staging, part, save.snapshot.trees[name].directory)

    def _parts(self, staging: Path) -> list[Part]:
        return [Part.parse((staging / layout.part_file(rank)).read_bytes()) for rank in range(self._ranks.world_size)]

    def _publish(self, save: _Save, parts: list[Part]) -> Manifest:
        """All ranks have written: make it a checkpoint."""
        if save.before_publishing is not None:
            save.before_publishing()
        name, staging, snapshot = save.name, save.staging, save.snapshot
        formats = {name: self._tree_format(name, snapshot, save.records[name]) for name in snapshot.trees}
        trees = {n: merge_tree(n, formats[n], parts, snapshot.tied.get(n, {})) for n in snapshot.trees}
        for tree in snapshot.trees.values():
            if formats[tree.name] == torch_save.NAME:
                torch_save.write_metadata(tree, staging, parts)
        manifest = Manifest(
            step=name.step, epoch=name.epoch, created=time.time(),
            world_size=self._ranks.world_size, dp_size=self._ranks.dp_size,
            progress=save.progress, losses=_plain(save.losses), validated=save.validated,
            environment=environment(), lineage=self._lineage(),
            state=save.records,
            trees=trees,
            files=merge_files(parts) | placed_files(parts, (t for tree in trees.values() for t in tree.stored)),
        )  # fmt: skip
        if fault := manifest.fault():
            raise SaveFailed(
                "the ranks did not write a whole checkpoint", where=str(self.directory / str(name)), value=fault,
                remedy="please report this; the checkpoint before stands",
            )  # fmt: skip
        commit.seal(staging, manifest.to_bytes())
        self._set_aside_abandoned()
        commit.publish(staging, str(name))
        return manifest

    def _published(self, save: _Save, manifest: Manifest) -> SaveReport:
        """On the leader: swap the pointers and remove what the keep policy lets go."""
        self._run.point(str(save.name))
        return replace(self._report(save), nbytes=manifest.nbytes, pruned=self._run.prune(str(save.name)))

    def _tree_format(self, name: str, snapshot: _Snapshot, record: StateRecord) -> str:
        if name in snapshot.placements:
            return hf.NAME
        return self._format if record.kind == "module" else torch_save.NAME

    def _lineage(self) -> dict[str, Any]:
        request = resume.request_text(self.directory, self._restore_from)
        return {"restore_from": request, "resumed_from": self._resumed_from}

    def _set_aside_abandoned(self) -> None:
        """Once, after a run went back."""
        if self._resumed_step is not None:
            step, self._resumed_step = self._resumed_step, None
            self._run.set_aside_after(step)

    def _exports(self, last: bool) -> bool:
        return bool(self.assets) and (self._export_when == "every" or (self._export_when == "final" and last))

    def leave_out_exports(self) -> None:
        """Export nothing from now on, not even a save that is being published: an export in the background ends as it
        is. Called on all ranks."""
        self._export_when = "never"
        if self._background is not None:
            self._background.leave_out_exports()

    def is_exported(self, path: Path) -> bool:
        """Whether a checkpoint has its Hugging Face export."""
        places = [path / layout.state_directory(attribute) / layout.CONSOLIDATED for attribute in self.assets]
        return all(place.is_dir() for place in places)

    def export_if_missing(self, resumed: Resumed) -> None:
        """The final export of a finished run that was killed before it had one. Called on all ranks."""
        if self._exports(last=True) and resumed.path.parent == self._run.root:
            self._export_once(resumed.path.name)

    def export_best(self) -> None:
        """Export the checkpoint that LOWEST_VAL points to, unless it has its export. Called on all ranks.

        Raises :class:`SaveFailed`, the same on all ranks, where that cannot be.
        """
        name = self._run.best() if self.is_leader else None
        if self.is_leader and name is None:
            log.warning("export_best: no checkpoint was validated, so there is no best one")
        self._export_once(name)

    def _export_once(self, name: str | None) -> None:
        """The leader's *name* counts; nothing happens where it is None or its export is there."""
        self.settle()
        if name is not None and self.is_exported(self._run.root / name):
            name = None
        name = agree.broadcast_object(self._group, name)
        parsed = layout.parse_checkpoint_name(name) if name else None
        if parsed is not None and (export := self._export(parsed)):
            log.info("Hugging Face export of %s: %s", parsed, export)

    def _export(self, name: layout.CheckpointName) -> Path | None:
        """The Hugging Face export of a published checkpoint from its files, by the leader."""
        from automodel_ckpt.checkpoint.consolidate import consolidate

        def export() -> Path | None:
            places = [self._run.root / str(name) / layout.state_directory(one) for one in self.assets]
            return [consolidate(place, log=log.info).output for place in places][-1] if self.is_leader else None

        with self._failing_together(f"exporting {name} (the checkpoint itself is safe)", ExportFailed):
            return agree.while_working(self._group, export)

    def _with_export(self, report: SaveReport, save: _Save) -> SaveReport:
        """The same from memory, by all ranks; its failure leaves the checkpoint as it is."""
        name, snapshot = save.name, save.snapshot
        together = partial(
            self._failing_together, f"exporting {name} (the checkpoint itself is safe)", kind=ExportFailed
        )
        try:
            for attribute, assets in self.assets.items():
                export = export_from_memory(
                    snapshot.trees[attribute], self._run.root / str(name), assets, snapshot.tied[attribute],
                    rank=self._ranks.rank, group=self._group, together=together, log=log.info,
                )  # fmt: skip
                report = replace(report, export=export)
        except AutomodelError as failure:
            report = replace(report, export_failure=failure)
        seconds = time.monotonic() - save.started
        return replace(report, stall_seconds=seconds, total_seconds=seconds)

    def _report(self, save: _Save) -> SaveReport:
        seconds = time.monotonic() - save.started
        free = None
        with contextlib.suppress(OSError):  # the ranks have parted: nothing may fail on one of them now
            free = free_bytes(self.directory)
        stall, path = seconds if self._background is None else save.stall_seconds, self.directory / str(save.name)
        return SaveReport(
            path, save.name.step, stall, seconds, free_bytes=free, export_command=self.export_command(path)
        )

    def export_command(self, path: Path) -> str | None:
        """What to type for the Hugging Face files of a checkpoint; None where it has nothing to make them from."""
        if not self.assets or self._layout != "shards":
            return None
        return f"ckpt consolidate {shlex.quote(str(path))}"

    def _tell_once(self, items: Iterable[Item]) -> None:
        if self._told or not self.is_leader:
            return
        self._told = True
        for item in items:
            also = f" (also {', '.join(item.aliases)})" if item.aliases else ""
            skipped = item.kind in ("optimizer", "lr_scheduler") and not self._save_optimizer
            log.info("  state: %s%s, %s -> %s", item.name, also, item.kind, "not saved" if skipped else item.path)

    # ---------------------------------------------------------------- load

    def load(self, state: Mapping[str, Any]) -> Resumed | None:
        """Load the newest usable checkpoint (or the one ``restore_from`` names) into *state*; None in a fresh run.

        What was passed over is logged with the reason. Where the one chosen does not fit *state* and nobody named it,
        *on_incompatible* ``sibling`` looks on in :attr:`directory`, from then on one beside it. Called on all ranks.
        Raises :class:`CheckpointUnusable`, the same on all ranks, where none can be used, or it does not fit.
        """
        found = self._find()
        while found is not None and (lines := self._incompatible(*found, state)):
            self._move_to_sibling(found[0], lines)
            found = self._find()
        if found is None:
            return None
        path, manifest = found
        if self.is_leader:
            log.info("Loading checkpoint from %s", self._run.shown(path))
        with self._failing_together(f"loading {path.name}", CheckpointUnusable):
            self._refuse_other_base(path)
            Loader(path, manifest, self._ranks, self._allow_missing).load(classify(state))
        self._resumed_step, self._resumed_from = manifest.step, path.name
        return Resumed(path, manifest.step, manifest.epoch, manifest)

    def _find(self) -> tuple[Path, Manifest] | None:
        """The checkpoint to load, its files compared with its manifest."""
        with self._failing_together("looking for a checkpoint", CheckpointUnusable):
            request = self._run.candidates(self._restore_from) if self.is_leader else None
        request = agree.broadcast_object(self._group, request)
        assert request is not None
        chosen = self._first_usable(request)
        if chosen is not None and request.note and self.is_leader:
            log.info("%s", request.note)
        return chosen

    def _incompatible(self, path: Path, manifest: Manifest, state: Mapping[str, Any]) -> list[str]:
        """What sends the run to a sibling directory; empty where it stays."""
        if self._on_incompatible != "sibling" or self._restore_from is not None:
            return []
        with self._failing_together(f"comparing with {path.name}", CheckpointUnusable):
            return Loader(path, manifest, self._ranks, self._allow_missing).incompatibilities(classify(state))

    def _move_to_sibling(self, path: Path, lines: list[str]) -> None:
        """Leave the directory as it is, and take the next one beside it: ``checkpoints.sibling-1``, -2, ..."""
        before, self._run = self._run, self._run.sibling()
        if self.is_leader:
            message = "THE CHECKPOINTS IN %s ARE OF ANOTHER MODEL and stay as they are: going on in %s. %s differs:%s"
            log.warning(message, before.path, self.directory, path.name, shown(lines))
        with self._failing_together("opening a sibling of checkpoint.checkpoint_dir", RecipeError):
            before.release()
            if self.is_leader:
                self._run.hold()

    def _refuse_other_base(self, path: Path) -> None:
        for name, assets in self.assets.items():
            if isinstance(assets, AdapterAssets):
                assets.refuse_other_base(path, layout.state_directory(name))

    def _first_usable(self, request: resume.Request) -> tuple[Path, Manifest] | None:
        refused: list[resume.Refused] = []
        for path in request.candidates:
            manifest, problems = self._examine(path)
            if manifest is not None and not problems:
                return path, manifest
            name = layout.parse_checkpoint_name(path.name)
            refused.append(
                resume.Refused(path, name.step if name else None, manifest is not None, True, tuple(problems))
            )
            if self.is_leader:
                log.warning("Skipping checkpoint %s: %s", self._run.shown(path), refused[-1].reason())
        if not refused:
            return None
        raise CheckpointUnusable(
            "the checkpoint to restore from cannot be used" if request.by_name else "no checkpoint can be used",
            where=str(self.directory),
            value="\n" + resume.refusal_table(refused),
            remedy="restore the files from a copy, name another checkpoint in checkpoint.restore_from, "
            "or start anew in another checkpoint.checkpoint_dir",
        )

    def _examine(self, path: Path) -> tuple[Manifest | None, list[Problem]]:
        """The manifest, and all problems that the ranks, each reading its share of the files, have found."""
        manifest, problems = None, []
        try:
            manifest = Manifest.read(path)
            problems = verify(path, manifest, self._verify, rank=self._ranks.rank, num_ranks=self._ranks.world_size)
        except CheckpointUnusable as error:
            problems = list(error.problems)
        found = [problem for theirs in agree.gather_objects(self._group, problems) for problem in theirs]
        return manifest, list(dict.fromkeys(found))

    # ---------------------------------------------------------------- both

    def wait(self) -> None:
        """Return when nothing of this rank is under way any more: its share of a save, removals."""
        if self._background is not None:
            self._background.wait()
        self._run.wait()

    def close(self) -> None:
        """Wait, then let the next run have the directory."""
        self.wait()
        self._end_background()
        self._run.release()

    @contextlib.contextmanager
    def _failing_together(self, doing: str, kind: type[AutomodelError] = SaveFailed) -> Iterator[None]:
        """Whatever the block raises on one rank is raised on all, as an error for the user (foreign ones as *kind*)."""
        failure: AutomodelError | None = None
        try:
            yield
        except Exception as error:
            failure = as_failure(error, doing, self.directory, kind)
        agree.all_or_nothing(self._group, failure)


def _on_cuda(state: Mapping[str, Any]) -> bool:
    modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    return any(parameter.is_cuda for module in modules for parameter in module.parameters())


def _buffers(items: Iterable[Item]) -> set[int]:
    """The addresses of modules' tensors that a forward pass may change."""
    return {buffer.data_ptr() for item in items if item.kind == "module" for buffer in item.value.buffers()}


def _export_when(save_consolidated: bool | str | None, model_format: str, model_layout: str) -> str:
    if model_layout != "shards":
        return "never"
    if save_consolidated is None:
        return "final" if model_format == "safetensors" else "never"
    if isinstance(save_consolidated, bool):
        return "every" if save_consolidated else "never"
    return {"true": "every", "false": "never"}.get(save_consolidated, save_consolidated)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for JSON, which has no NaN and no infinities: those become text."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _json_text(values: Mapping[str, Any]) -> str:
    return json.dumps(_plain(values), indent=2)
