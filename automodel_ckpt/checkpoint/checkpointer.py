"""Save and load checkpoints: :class:`Checkpointer` stores a plain mapping of state and restores it.

    checkpointer = Checkpointer("checkpoints", options=CheckpointOptions(keep_last=3))
    state = {"model": model, "optimizer": optimizer}
    resumed = checkpointer.load(state)          # None: a fresh run
    checkpointer.save(state, step=20, epoch=0, ...)

A save has three steps, each followed by a short collective: every rank plans, every rank writes, and rank 0 publishes.
A failure on one rank is raised on all ranks, with that rank's message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint import commit, layout, policy
from automodel_ckpt.checkpoint.collective_errors import raise_on_all_ranks
from automodel_ckpt.checkpoint.discovery import Item, classify
from automodel_ckpt.checkpoint.files.direct import METER
from automodel_ckpt.checkpoint.files.file_system import overlay_warning
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.module_tensors import module_state
from automodel_ckpt.checkpoint.options import CheckpointOptions, Options
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.run.selection import Chooser
from automodel_ckpt.checkpoint.run.shared_storage import check_shared_storage
from automodel_ckpt.checkpoint.saving.adapter_assets import AdapterAssets
from automodel_ckpt.checkpoint.saving.async_saves import AsyncSaves, on_cuda
from automodel_ckpt.checkpoint.saving.forecast import Forecast, check_manifest_size
from automodel_ckpt.checkpoint.saving.inline_export import export_from_memory
from automodel_ckpt.checkpoint.saving.planner import (
    Planner,
    Proposal,
    Save,
    SaveReport,
    plain,
)
from automodel_ckpt.checkpoint.saving.side_files import Assets
from automodel_ckpt.checkpoint.saving.staging import Staging
from automodel_ckpt.checkpoint.state.loading import Loader, first_lines
from automodel_ckpt.checkpoint.state.model_config import (
    CONFIG,
    ConfigChanges,
    model_changes,
    require_same_function,
)
from automodel_ckpt.checkpoint.state.optimizer_names import Owners
from automodel_ckpt.checkpoint.state.optimizer_state import places
from automodel_ckpt.checkpoint.state.storable import check_safe, check_safe_values, check_storable
from automodel_ckpt.checkpoint.writing.jobs import run_all
from automodel_ckpt.checkpoint.writing.rank_manifest import finalize, read_rank_manifests
from automodel_ckpt.distributed import agree
from automodel_ckpt.errors import (
    AutomodelError,
    CheckpointUnusable,
    ExportFailed,
    LeaseLost,
    RecipeError,
    SaveFailed,
)
from automodel_ckpt.units import size_text

log = logging.getLogger("automodel_ckpt")

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
class Saving:
    """The progress of a save: bytes written by this rank, and the approximate total of this rank."""

    step: int
    written_bytes: int
    total_bytes: int


class Checkpointer:
    """Saves and loads the state of a run in *directory*.

    *group* is a gloo process group of all ranks, used by nothing else meanwhile, and *ranks* is this process's position
    in it. Without *ranks*, all ranks are data-parallel, and *group* is by default that of all ranks of
    torch.distributed where it is initialized. *options* is the ``checkpoint:`` section of a recipe, or
    :class:`~automodel_ckpt.checkpoint.options.CheckpointOptions`.

    *assets* gives, by the attribute name of a module, what its export needs (entries may be added to :attr:`assets`
    before the first save). A background save whose writer makes no progress for *timeout_seconds*, while all ranks wait
    for it, has failed. Raises :class:`RecipeError` for options that exclude each other.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        ranks: layout.RankLayout | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        *,
        assets: Mapping[str, Assets] | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        options = CheckpointOptions() if options is None else options
        _validate_format(options)
        if ranks is None:
            if group is None and dist.is_initialized():
                group = dist.group.WORLD
            ranks = _ranks_in(group)
        self._ranks, self._group = ranks, group
        self._options = options
        self._timeout_seconds = timeout_seconds
        self.assets = dict(assets or {})
        keep = policy.KeepPolicy(
            options.keep_last,
            options.keep_best,
            options.keep_every_steps,
            frozenset(options.keep_steps),
            options.best_mode,
        )
        run = RunDirectory(Path(directory), keep, options.best_metric_key)
        self._planner = Planner(run, ranks, self.assets, options)
        self._chooser = Chooser(options.verify, ranks, group)
        self._items_are_logged = False
        self._is_async = options.is_async
        self._async: AsyncSaves | None = None
        self._writing: tuple[int, int, int] | None = None

    @property
    def _run(self) -> RunDirectory:
        return self._planner.run

    @property
    def is_rank0(self) -> bool:
        return self._ranks.rank == 0

    @property
    def directory(self) -> Path:
        """The run directory, as the user wrote it."""
        return self._run.path

    # ---------------------------------------------------------------- before training

    def open(self) -> None:
        """Create and lock the run directory before the model is built. Collective.

        Raises :class:`RecipeError` on all ranks where the directory cannot be written, another run uses it, or the
        ranks do not share it.
        """
        with self._raise_on_all_ranks("opening checkpoint.checkpoint_dir", RecipeError):
            if self.is_rank0:
                self._run.hold()
                if (warning := overlay_warning(self.directory)) is not None:
                    log.warning("%s", warning)
        with self._raise_on_all_ranks("checking for shared storage", RecipeError):
            check_shared_storage(self._run.root, self._ranks.rank, self._group)

    def check(self, state: Mapping[str, Any]) -> None:
        """Validate *state* before training. Raises :class:`RecipeError` for state that clashes or cannot be stored
        safely.
        """
        items = classify(state)
        owners = Owners(items)
        for item in items:
            if item.kind in ("object", "lr_scheduler"):
                check_safe(item.name, item.value.state_dict())
            elif item.kind == "module":
                tree, _ = module_state(item.value)
                check_storable(item.name, tree)
                check_safe_values(item.name, tree)
            elif self._planner.save_optimizer:
                owners.check_parameters(item)
                for index, group in enumerate(item.value.param_groups):
                    options = {
                        f"param_groups.{index}.{key}": group[key]
                        for key in group
                        if key != "params"
                    }
                    check_safe_values(item.name, options)
                    places(options)

    def check_lease(self) -> None:
        """Check that this run still holds its directory. Called by rank 0 before it writes there.

        Raises :class:`LeaseLost` where another run took over, OSError where that cannot be determined.
        """
        self._run.check_lease()

    def check_lease_on_all_ranks(self) -> None:
        """Raise :class:`LeaseLost` on all ranks where another run took over the directory. Collective."""
        doing = "checking which run holds the run directory"
        # Where that cannot be determined now (OSError), the next write fails instead.
        with self._raise_on_all_ranks(doing), contextlib.suppress(OSError):
            self.check_lease()

    @property
    def lease_is_lost(self) -> bool:
        """Whether this rank knows that another run took over the directory. Reads no file."""
        return self._run.is_lost

    def forecast(self, state: Mapping[str, Any]) -> Forecast:
        """The expected bytes of one save, and the free bytes. Raises :class:`RecipeError` for state that cannot be
        stored.
        """
        return self._planner.forecast(classify(state))

    def check_disk_space(self, state: Mapping[str, Any]) -> Forecast | None:
        """Check before the first step that a checkpoint fits on the disk, and log its size. Collective.

        Returns the forecast on rank 0, None elsewhere. Raises :class:`SaveFailed` where it does not fit, and
        :class:`RecipeError` where its manifest would be too large to be read back.
        """
        forecast = None
        with self._raise_on_all_ranks("estimating the size of a checkpoint"):
            if self.is_rank0:
                forecast = self.forecast(state)
                check_manifest_size(self._planner.forecast_manifest_bytes(classify(state)))
                self._planner.check_fits(forecast)
                log.info(
                    "a checkpoint takes about %s; %s are free",
                    size_text(forecast.nbytes),
                    size_text(forecast.free_bytes),
                )
        return forecast

    # ---------------------------------------------------------------- save

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Set up asynchronous saves before the first step, or log why saves will be synchronous. Collective.

        Does nothing for synchronous saves.
        """
        if not self._is_async or self._async is not None:
            return
        reason = ""
        try:
            self._async = AsyncSaves(
                self._planner,
                self._group,
                patience_seconds=self._timeout_seconds,
                on_cuda=on_cuda(state),
            )
            self._async.reserve(
                self.forecast(state).nbytes // self._ranks.world_size + _SLACK_BYTES
            )
        except (OSError, AttributeError) as error:  # AttributeError: a system without memfd_create
            reason = str(error)
        reasons = [reason for reason in agree.gather_objects(self._group, reason) if reason]
        if reasons:
            self._is_async = False
            self._end_async()
            if self.is_rank0:
                log.warning(
                    "saves will be synchronous: a rank does not support asynchronous checkpointing: %s",
                    reasons[0],
                )

    def _end_async(self) -> None:
        if self._async is not None:
            ended, self._async = self._async, None
            ended.close()

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
        """Save *state* as ``epoch_{epoch}_step_{step}``; return when the checkpoint is published. Collective.

        With ``is_async`` it first waits for the previous save, and returns when the state is copied, with
        :attr:`SaveReport.published` false. A later failure of such a save is raised by :meth:`settle`.

        *losses* are written to losses.json; with *validated* they also rank the checkpoint. *last* marks the last save
        of a run that completes. Rank 0 calls *before_publishing* when all files are written, and *on_saved* with the
        report after publishing. Raises :class:`SaveFailed` on all ranks, and removes what was written.
        """
        self.settle()
        started = time.monotonic()
        self.prepare(state)
        name = layout.CheckpointName(step=step, epoch=epoch)
        if self.is_rank0:
            log.info("Saving checkpoint to %s", self.directory / str(name))
        make = partial(
            Save,
            name,
            config_yaml=config_yaml,
            losses=dict(losses),
            progress=dict(progress),
            validated=validated,
            last=last,
            before_publishing=before_publishing,
            on_saved=on_saved,
            started=started,
        )
        with Staging().removed_on_failure() as staging:
            if (
                self._async is not None
                and (report := self._async.save_again(state, make, staging)) is not None
            ):
                return report
            return self._plan_and_save(state, name, make, staging)

    def _plan_and_save(
        self,
        state: Mapping[str, Any],
        name: layout.CheckpointName,
        make: Callable[..., Save],
        staging: Staging,
    ) -> SaveReport:
        with self._raise_on_all_ranks(f"saving {name}"):
            snapshot = self._planner.snapshot(state)
            proposal = self._planner.propose(snapshot, name, staging)
        proposals = agree.gather_objects(self._group, proposal)
        staging.path = Path(proposals[0].staging or "")
        self._log_items_once(snapshot.items, [proposal.digests for proposal in proposals])
        save = make(staging=staging, snapshot=snapshot)
        return (
            self._save_now(save, proposals)
            if self._async is None
            else self._async.save(save, proposals)
        )

    def _log_items_once(self, items: Iterable[Item], digests: Sequence[Mapping[str, str]]) -> None:
        """Log at the first save what is saved and how. *digests* has the digests of small state by name, for each
        rank.
        """
        if self._items_are_logged or not self.is_rank0:
            return
        self._items_are_logged = True
        for item in items:
            also = f" (also {', '.join(item.aliases)})" if item.aliases else ""
            skipped = (
                item.kind in ("optimizer", "lr_scheduler") and not self._planner.save_optimizer
            )
            differs = len({of_rank.get(item.name) for of_rank in digests}) > 1
            place = "not saved" if skipped else f"{item.name}/" if differs else item.path
            log.info("  state: %s%s, %s -> %s", item.name, also, item.kind, place)

    def _save_now(self, save: Save, proposals: list[Proposal]) -> SaveReport:
        report, name, planner = None, save.name, self._planner
        try:
            with self._raise_on_all_ranks(f"saving {name}"):
                written, jobs, objects = planner.plan(save, proposals)
                self._writing = name.step, METER.nbytes, sum(job.size for job in (*jobs, *objects))
                run_all([*jobs, *objects], save.staging.path, written)
                if self.is_rank0:
                    planner.write_common(save, written)
                commit.write_file(
                    save.staging.path / layout.part_file(self._ranks.rank), written.to_bytes()
                )
            with self._raise_on_all_ranks(f"publishing {name}"):
                if self.is_rank0:
                    report = self._publish(save)
        finally:
            self._writing = None
        report = planner.report(save) if report is None else report
        report = self._with_export(report, save) if planner.exports(save.last) else report
        if save.on_saved is not None and self.is_rank0:
            save.on_saved(report)
        return report

    def _publish(self, save: Save) -> SaveReport:
        """Merge the rank manifests and publish the checkpoint. Called by rank 0 after all ranks have written."""
        rank_manifests = read_rank_manifests(save.staging.path, self._ranks.world_size)
        metadata = self._planner.write_metadata(save, lambda: rank_manifests)
        rank_manifests[0].files.update(metadata)
        if save.before_publishing is not None:
            save.before_publishing()
        nbytes = finalize(save.staging.path, self._planner.partial_manifest(save), rank_manifests)
        return self._planner.publish(save, nbytes)

    # ---------------------------------------------------------------- what is under way

    def saving(self) -> Saving | None:
        """The progress of the save in progress; None where there is none. Can be called from any thread."""
        writing, in_background = self._writing, self._async
        if writing is not None:
            step, before, total = writing
            return Saving(step, METER.nbytes - before, total)
        progress = in_background.progress if in_background is not None else None
        return Saving(*progress) if progress is not None else None

    @property
    def upload_failed(self) -> bool:
        """Whether this rank knows that the run cannot continue to save: all ranks should then call :meth:`settle`.

        True after a failed background save, or when another run took over the directory.
        """
        return self._run.is_lost or (self._async is not None and self._async.has_failed)

    def await_copies(self) -> None:
        """Call this before state on the device is changed: its copy may not be complete yet."""
        if self._async is not None:
            self._async.await_copies()

    def settle(self) -> bool:
        """Wait for the background save; return True if one was in progress. Collective.

        Raises :class:`SaveFailed` on all ranks where it failed or made no progress on any rank; its files are then
        removed.
        """
        return self._async is not None and self._async.settle()

    def note_validation(self, resumed: Resumed, losses: Mapping[str, Any]) -> None:
        """Record the losses of a validation that ran after its checkpoint was published, so that it can be ranked."""
        if not self.is_rank0 or resumed.path.parent != self._run.root:
            return
        with contextlib.suppress(LeaseLost):  # raised on all ranks before the next step
            self._run.note_validation(resumed.path.name, resumed.manifest.digest, plain(losses))

    # ---------------------------------------------------------------- exports

    @property
    def exports_at_end(self) -> bool:
        """Whether the last checkpoint of a run is exported, and not each one."""
        return self._planner.exports(last=True) and not self._planner.exports(last=False)

    def leave_out_exports(self) -> None:
        """Disable exports from now on, including one that is in progress in the background. Collective."""
        self._planner.export_when = "never"
        if self._async is not None:
            self._async.leave_out_exports()

    def is_exported(self, path: Path) -> bool:
        """Whether a checkpoint has its Hugging Face export."""
        places = [
            path / layout.state_directory(attribute) / layout.CONSOLIDATED
            for attribute in self.assets
        ]
        return all(place.is_dir() for place in places)

    def export_if_missing(self, resumed: Resumed, *, last: bool) -> None:
        """Export a checkpoint of this run whose export was prevented by a kill, a signal or a failure, where the recipe
        asks for one of this checkpoint, the *last* of a run or not. Called on all ranks."""
        if self._planner.exports(last) and resumed.path.parent == self._run.root:
            self._export_once(resumed.path.name)

    def export_best(self) -> None:
        """Export the checkpoint that LOWEST_VAL points to, unless it is already exported. Collective.

        Raises :class:`ExportFailed` on all ranks. In the layouts hf and adapter nothing is written: the checkpoint's
        model files are the export.
        """
        name = self._run.best() if self.is_rank0 else None
        if self.is_rank0 and name is None:
            log.warning("export_best: no checkpoint was validated, so there is no best one")
        if self._planner.model_files_are_the_export:
            if name is not None:
                log.info(
                    "export_best: nothing to export, the model files of %s are already in Hugging Face format",
                    self._run.path / name,
                )
            return
        self._export_once(name)

    def _export_once(self, name: str | None) -> None:
        """Export the checkpoint *name* (rank 0's value), unless it is None or already exported."""
        self.settle()
        if name is not None and self.is_exported(self._run.root / name):
            name = None
        name = agree.broadcast_object(self._group, name)
        parsed = layout.parse_checkpoint_name(name) if name else None
        if parsed is not None and (export := self._export(parsed)):
            log.info("Hugging Face export of %s: %s", parsed, export)

    def _export(self, name: layout.CheckpointName) -> Path | None:
        """Export a published checkpoint from its files, on rank 0. Returns the directory there, None elsewhere."""
        from automodel_ckpt.checkpoint.export.consolidate import consolidate

        def export() -> Path | None:
            if not self.is_rank0:
                return None
            self.check_lease()
            output = None
            for attribute in self.assets:
                directory = self._run.root / str(name) / layout.state_directory(attribute)
                output = consolidate(
                    directory, log=log.info, before_publishing=self.check_lease
                ).output
            return output

        with self._raise_on_all_ranks(
            f"exporting {name} (the checkpoint itself is safe)", ExportFailed
        ):
            return agree.while_working(self._group, export)

    def _with_export(self, report: SaveReport, save: Save) -> SaveReport:
        """Export the model from memory and add the result to *report*. Collective: every rank writes its slices.

        If the export fails, the published checkpoint is unchanged and the failure is in the report. :class:`LeaseLost`
        is raised.
        """
        name, snapshot = save.name, save.snapshot
        together: Callable[..., AbstractContextManager[None]] = partial(
            self._raise_on_all_ranks,
            f"exporting {name} (the checkpoint itself is safe)",
            kind=ExportFailed,
        )
        try:
            with together():
                self.check_lease()
            for attribute, assets in self.assets.items():
                export = export_from_memory(
                    snapshot.trees[attribute],
                    self._run.root / str(name),
                    assets,
                    snapshot.tied[attribute],
                    rank=self._ranks.rank,
                    group=self._group,
                    together=together,
                    log=log.info,
                    before_publishing=self.check_lease,
                )
                report = replace(report, export=export)
        except LeaseLost:
            raise
        except AutomodelError as failure:
            report = replace(report, export_failure=failure)
        seconds = time.monotonic() - save.started
        return replace(report, stall_seconds=seconds, total_seconds=seconds)

    def export_command(self, path: Path) -> str | None:
        """The shell command that exports a checkpoint as Hugging Face files; None where there is nothing to export."""
        return self._planner.export_command(path)

    # ---------------------------------------------------------------- load

    def load(
        self,
        state: Mapping[str, Any],
        *,
        before_loading: Callable[[Path, Manifest], None] | None = None,
    ) -> Resumed | None:
        """Load the newest usable checkpoint, or the one that ``restore_from`` names, into *state*. Collective.

        Returns None in a new run. Skipped checkpoints are logged with the reason. Rank 0 calls *before_loading* with
        the chosen checkpoint; what that raises is raised on all ranks. Where the chosen checkpoint does not match
        *state*, was not named by the user, and *on_incompatible* is ``sibling``, the run continues in a sibling
        directory, which becomes :attr:`directory`.

        Raises :class:`CheckpointUnusable` on all ranks where no checkpoint can be used or the chosen one does not
        match.
        """
        choose = partial(self._chooser.choose, restore_from=self._options.restore_from)
        found = choose(self._run)
        while found is not None and (lines := self._incompatible(*found, state)):
            self._move_to_sibling(found[0], lines)
            found = choose(self._run)
        if found is None:
            return None
        path, manifest = found
        if self.is_rank0:
            log.info("Loading checkpoint from %s", self._run.display_path(path))
        with self._raise_on_all_ranks(f"loading {path.name}", CheckpointUnusable):
            if before_loading is not None and self.is_rank0:
                before_loading(path, manifest)
            self._check_base(path)
            items, loader = classify(state), self._loader(path, manifest)
            if manifest.left_out and not self._planner.save_optimizer and self.is_rank0:
                message = "checkpoint.save_optimizer is false: %s was saved without %s, which start with new state"
                log.warning(message, path.name, ", ".join(sorted(manifest.left_out)))
            if not loader.incompatibilities(
                items
            ):  # else loading names the tensors that do not fit
                self._check_same_model(path)
            loader.load(items)
        self._run.went_back_to = manifest.step
        self._planner.resumed_from = path.name
        return Resumed(path, manifest.step, manifest.epoch, manifest)

    def _loader(self, path: Path, manifest: Manifest) -> Loader:
        """A loader that allows the state to be missing which the checkpoint was saved without.

        Applies with ``save_optimizer: false``: otherwise the same command could not resume.
        """
        implied = frozenset[str]() if self._planner.save_optimizer else manifest.left_out
        allowed = implied.union(self._options.allow_missing_state)
        return Loader(path, manifest, self._ranks, allowed)

    def _incompatible(self, path: Path, manifest: Manifest, state: Mapping[str, Any]) -> list[str]:
        """The differences for which the run continues in a sibling directory; empty where it does not."""
        if self._options.on_incompatible != "sibling" or self._options.restore_from is not None:
            return []
        with self._raise_on_all_ranks(f"comparing with {path.name}", CheckpointUnusable):
            loader = self._loader(path, manifest)
            lines = loader.incompatibilities(classify(state))
            return lines or (
                []
                if self._options.allow_changed_model
                else list(self._model_changes(path).function)
            )

    def _move_to_sibling(self, path: Path, lines: list[str]) -> None:
        """Continue in the next sibling directory (``checkpoints.sibling-1``, -2, ...); the current one is unchanged."""
        before = self._run
        self._planner.run = before.sibling()
        if self.is_rank0:
            message = (
                "THE CHECKPOINTS IN %s BELONG TO A DIFFERENT MODEL and are not changed: continuing in %s. "
                "Differences from %s:%s"
            )
            log.warning(message, before.path, self.directory, path.name, first_lines(lines))
        with self._raise_on_all_ranks(
            "opening a sibling of checkpoint.checkpoint_dir", RecipeError
        ):
            before.release()
            if self.is_rank0:
                self._run.hold()

    def _check_base(self, path: Path) -> None:
        for name, assets in self.assets.items():
            if isinstance(assets, AdapterAssets):
                assets.check_base(path, layout.state_directory(name))

    def _model_changes(self, path: Path) -> ConfigChanges:
        """How the models differ from those saved in *path*; the base of adapters is compared by its digests instead."""
        configs = {}
        for name, assets in self.assets.items():
            if not isinstance(assets, AdapterAssets) and CONFIG in assets.files:
                configs[name] = assets.files[CONFIG]
        return model_changes(path, configs)

    def _check_same_model(self, path: Path) -> None:
        """Raise :class:`CheckpointUnusable` where the checkpoint's weights would compute something else here."""
        changes = self._model_changes(path)
        if self.is_rank0 and changes.training:
            log.warning(
                "the model's config changed since %s was saved:%s",
                path.name,
                first_lines(list(changes.training)),
            )
        if not self._options.allow_changed_model:
            require_same_function(path, changes)
        elif self.is_rank0 and changes.function:
            message = (
                "checkpoint.allow_changed_model: the model computes "
                "a different function than the one saved in %s:%s"
            )
            log.warning(message, path.name, first_lines(list(changes.function)))

    # ---------------------------------------------------------------- both

    def wait(self) -> None:
        """Wait until this rank has no save or removal in progress."""
        if self._async is not None:
            self._async.wait()
        self._run.wait()

    def close(self) -> None:
        """Wait, then release the run directory."""
        self.wait()
        self._end_async()
        self._run.release()

    def _raise_on_all_ranks(
        self, doing: str, kind: type[AutomodelError] = SaveFailed
    ) -> AbstractContextManager[None]:
        return raise_on_all_ranks(self._group, doing, self.directory, kind)


def _validate_format(options: Options) -> None:
    if options.model_layout in (None, "shards") or options.model_save_format == "safetensors":
        return
    raise RecipeError(
        "Hugging Face files are always written as safetensors",
        where="checkpoint.model_save_format",
        value=options.model_save_format,
        hint="remove this key, or set checkpoint.model_layout to shards "
        f"(now {options.model_layout})",
    )


def _ranks_in(group: ProcessGroup | None) -> layout.DataParallelRanks:
    """This process's rank and the number of ranks of *group*; one process without a group."""
    if group is None:
        return layout.DataParallelRanks()
    return layout.DataParallelRanks(dist.get_rank(group), dist.get_world_size(group))
