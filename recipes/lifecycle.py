"""What happens around the steps of any recipe: join the ranks, resume, log, validate, save, stop, end, close."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from automodel_ckpt.checkpoint import Checkpointer, SaveReport, discover, policy
from automodel_ckpt.checkpoint.checkpointer import Resumed, Saving
from automodel_ckpt.checkpoint.discovery import left_out
from automodel_ckpt.checkpoint.layout import CONFIG, TRAINING_LOG, VALIDATION_LOG
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.checkpoint.saving.forecast import Forecast
from automodel_ckpt.checkpoint.state.loading import first_lines
from automodel_ckpt.checkpoint.wording import size_text
from automodel_ckpt.config.bind import unused_without_checkpoints
from automodel_ckpt.config.changes import changed_keys, check_overrides, ignored_by_resume, recipe_of, saved_recipe
from automodel_ckpt.config.nodes import DEFAULT
from automodel_ckpt.config.schema import InitFromConfig, ModelConfig, RecipeConfig
from automodel_ckpt.data.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.distributed.mesh import RankLayout, close_distributed, init_distributed
from automodel_ckpt.distributed.stop import PeerStop, StopRequest, stop_request
from automodel_ckpt.errors import (
    AutomodelError,
    ExportFailed,
    LeaseLost,
    RecipeError,
    SaveFailed,
    Stopped,
    without_hidden,
)
from automodel_ckpt.recipes.alike import refuse_unlike
from automodel_ckpt.recipes.disk_use import still_to_come
from automodel_ckpt.recipes.kept import RecipeOptions
from automodel_ckpt.recipes.records import Control, StepResult, Validation
from automodel_ckpt.recipes.starting import start_from
from automodel_ckpt.training.metrics import JsonlLog, PeakMemory
from automodel_ckpt.training.progress import Progress, SavingView, StepView, set_up_logging, tear_down_logging
from automodel_ckpt.training.rng import StatefulRNG, seed_everything
from automodel_ckpt.training.step_scheduler import StepScheduler
from automodel_ckpt.training.tracking import Tracking, require_trackers

log = logging.getLogger("automodel_ckpt")


class Lifecycle:
    """A run from its beginning to its end, except for what it trains, which ``recipes.base.FinetuneRecipe`` adds."""

    config: RecipeConfig
    layout: RankLayout
    stop_request: StopRequest
    model: nn.Module
    optimizer: Optimizer
    lr_scheduler: LRScheduler | None
    dataloader: GlobalBatchLoader
    step_scheduler: StepScheduler
    rng: StatefulRNG
    checkpointer: Checkpointer | None
    untracked: Collection[str] = ()
    """Names of attributes with state that is not saved; a class may set it, and so may :meth:`build`."""
    vocabulary: Sequence[str] = ()
    """Names of the model's parameters that ``model.vocab_size`` gives another number of rows."""

    def __init__(self, config: RecipeConfig, *, config_yaml: str) -> None:
        self.config = config
        self.config_yaml = config_yaml
        self.untracked: set[str] = set(self.untracked)
        self.checkpointer = None
        self.resumed: Resumed | None = None
        self.peer_stop: PeerStop | None = None
        self.save_failure: AutomodelError | None = None
        self.progress = Progress(enabled=False)
        self.last_step: StepResult | None = None
        self.last_save: SaveReport | None = None
        self.tracking: Tracking | None = None
        self._unknown_metrics: set[str] = set()
        self.origins: Mapping[str, str] = {}
        """Where each value of the recipe comes from, by dotted key; set by the command ``ckpt-train``."""
        self.overridden: Collection[str] = ()
        """The dotted keys that the command line gives, set likewise."""

    # ---------------------------------------------------------------- begin

    def join_ranks(self) -> RankLayout:
        """Process groups, log output, determinism, and the seed that makes all ranks draw the same fresh weights."""
        config = self.config
        require_trackers(config.logging.trackers, has_logs=config.checkpoint.enabled)
        ranks = config.distributed
        layout = init_distributed(
            backend=ranks.backend,
            timeout_minutes=ranks.timeout_minutes,
            dp_size=ranks.dp_size,
            dp_replicate_size=ranks.dp_replicate_size,
            tp_size=ranks.tp_size,
            pp_size=ranks.pp_size,
            cp_size=ranks.cp_size,
        )
        refuse_unlike(self.config_yaml, layout.gloo_group)
        self.stop_request = stop_request()
        if layout.world_size > 1:
            self.peer_stop = PeerStop(self.stop_request, dist.distributed_c10d._get_default_store())
        self.progress = Progress(every_seconds=config.logging.log_every_seconds, enabled=layout.is_leader)
        self.log_handler = set_up_logging(self.progress, config.logging.level, layout.rank)
        if unused := unused_without_checkpoints(config):
            log.info("nothing is saved, because checkpoint.enabled is false; no effect: %s", ", ".join(unused))
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(config.deterministic)
        seed_everything(config.seed)
        self.peak_memory = PeakMemory(layout.device)
        self.place_logs(Path(config.checkpoint.checkpoint_dir))
        return layout

    def place_logs(self, directory: Path) -> None:
        """The logs of the run are in its directory; nothing is written to them before the first step."""
        self.training_log = JsonlLog(directory / TRAINING_LOG, before_writing=self._check_lease)
        self.validation_log = JsonlLog(directory / VALIDATION_LOG, before_writing=self._check_lease)

    def _check_lease(self) -> None:
        """Raise :class:`LeaseLost` where another run took over the run directory."""
        if self.checkpointer is not None:
            self.checkpointer.check_lease()

    def resume(self) -> None:
        """Load the newest usable checkpoint, if there is one, else what ``init_from`` names; ends ``setup``.

        Afterwards nothing may draw random numbers before the first step.
        """
        self._refuse_hidden_methods()
        state = discover(self)
        if self.checkpointer is not None:
            self._resume(self.checkpointer, state)
        if self.resumed is None and self.config.init_from is not None:
            self.start_from_weights(self.config.init_from, state)

    def start_from_weights(self, section: InitFromConfig, state: Mapping[str, Any]) -> None:
        """``init_from``: the weights of all modules among the state, in a run that is not resumed."""
        model = self.config.model
        start_from(
            section,
            {name: value for name, value in state.items() if isinstance(value, nn.Module)},
            ranks=self.layout,
            group=self.layout.gloo_group,
            resizable=self.vocabulary,
            new_rows=model.new_tokens if isinstance(model, ModelConfig) else "mean",
            verify=self.config.checkpoint.verify,
        )

    def _resume(self, checkpointer: Checkpointer, state: Mapping[str, Any]) -> None:
        self._say_what_is_left_out()
        checkpointer.check(state)
        from_recipe = self.config.optimizer.on_resume == "recipe"
        recipe_options = RecipeOptions(
            self.optimizer, self.lr_scheduler, from_recipe=from_recipe, overridden=self.overridden
        )
        self.resumed = checkpointer.load(state, before_loading=self._compare_recipes)
        self.place_logs(checkpointer.directory)
        if self.resumed is not None:
            self.progress.note_saved(self.resumed.step, time.time() - self.resumed.manifest.created)
            recipe_options.compare(self.step_scheduler, self.resumed.manifest.saved, self.resumed.path)
        self.make_sure_of_space(checkpointer, state)
        if not self.step_scheduler.is_finished():
            checkpointer.prepare(state)
        if self.layout.is_leader:
            self._cut_back_logs(self.step_scheduler)
        self._make_missing_export(checkpointer)

    def _compare_recipes(self, checkpoint: Path, manifest: Manifest) -> None:
        """Report, on rank 0, which settings changed since *checkpoint* was saved.

        Raises :class:`RecipeError` for overrides on the command line that the resume would ignore.
        """
        saved = saved_recipe(checkpoint / CONFIG)
        if not saved or not self.config_yaml:
            return  # imported from another program, or by a script without a recipe file
        given = {key for key, origin in self.origins.items() if origin != DEFAULT}
        changes = changed_keys(saved, recipe_of(self.config_yaml), given)
        ignored = ignored_by_resume(changes, manifest.saved, self.config.optimizer.on_resume)
        check_overrides(ignored, self.overridden, checkpoint)
        lines = [f"{change} (not applied: the checkpoint has it)" if change in ignored else str(change)
                 for change in changes]  # fmt: skip
        if lines:
            log.warning("settings changed since %s was saved:%s", checkpoint.name, first_lines(lines))

    def _refuse_hidden_methods(self) -> None:
        """An attribute that :meth:`build` named like a method would be called in its place, perhaps hours from now."""
        methods = {name for name in vars(self) if callable(getattr(type(self), name, None))}
        hidden = sorted(name for name in methods if not callable(vars(self)[name]))
        if hidden:
            raise RecipeError(
                "an attribute hides a method of the recipe",
                where=f"{type(self).__name__}.build",
                value=", ".join(hidden),
                remedy="give the attribute another name",
            )

    def _say_what_is_left_out(self) -> None:
        passed_over = dict(left_out(self))
        for name, why in passed_over.items():
            log.info("not saved, since %s: %s", why, name)
        for name in sorted(set(self.untracked) - passed_over.keys()):
            log.warning("untracked names %r, but the recipe has no such attribute", name)

    def _cut_back_logs(self, scheduler: StepScheduler) -> None:
        """Let the logs end with the step resumed from; without its validation where that is made up for."""
        if scheduler.validation_is_missing:
            self.validation_log.truncate_after(scheduler.step - 1)
        is_finished = scheduler.is_finished()
        for jsonl in (self.training_log, self.validation_log):
            # A finished run may have gone back to an earlier checkpoint: the lines of its later ones stay.
            jsonl.truncate_after(math.inf if is_finished else scheduler.step)
        if not is_finished:
            self._log_resume()
        self._follow_logs()

    def _follow_logs(self) -> None:
        """Of a finished run too: a kill at its end may have kept its last lines from the trackers."""
        trackers, run, step = self.config.logging.trackers, self.training_log.path.parent, self.step_scheduler.step
        if trackers:
            went_back = any(name.step > step for name in checkpoint_names(run))
            self.tracking = Tracking(run, trackers, step, went_back=went_back)

    def _log_resume(self) -> None:
        """A line in training.jsonl, so that a plot can show where the run went on."""
        if self.resumed is not None:
            event = {"event": "resume", "step": self.resumed.step, "timestamp": time.time()}
            self.append(
                self.training_log,
                {**event, "from": self.resumed.path.name, "world_size": self.layout.world_size},
            )

    def make_sure_of_space(self, checkpointer: Checkpointer, state: Mapping[str, Any]) -> None:
        """Before the first step: a checkpoint has to fit on the disk, and all that the run will keep should."""
        if self.step_scheduler.is_finished():
            return
        try:
            forecast = checkpointer.check_disk_space(state)
        except SaveFailed as failure:
            self.note_failure(failure)
            return
        if forecast is not None:
            self._warn_of_little_space(checkpointer, forecast)

    def _warn_of_little_space(self, checkpointer: Checkpointer, forecast: Forecast) -> None:
        """A disk may hold one checkpoint, and not the number that this run will have at one time, or the exports."""
        existing = [name.step for name in checkpoint_names(checkpointer.directory)]
        num_more = still_to_come(self.config, self.step_scheduler.planned_steps, self._steps_per_epoch(), existing) or 1
        num_exports = 0
        if forecast.export_bytes and checkpointer.exports_at_end:
            num_exports = 1 + self.config.checkpoint.export_best
        needed = num_more * forecast.nbytes + num_exports * forecast.export_bytes
        if needed > forecast.free_bytes:
            exports = f" and {num_exports} exports of about {size_text(forecast.export_bytes)}" if num_exports else ""
            message = (
                "the disk of %s cannot hold what this run will save: %d more checkpoints of about %s%s take %s, and %s "
                "are free; free space, or keep fewer (checkpoint.keep_last, step_scheduler.ckpt_every_steps)"
            )
            log.warning(message, checkpointer.directory, num_more, size_text(forecast.nbytes), exports,
                        size_text(needed), size_text(forecast.free_bytes))  # fmt: skip

    def _steps_per_epoch(self) -> int | None:
        """Optimizer steps of a whole epoch; None for a stream."""
        try:
            return len(self.dataloader)
        except TypeError:
            return None

    def _make_missing_export(self, checkpointer: Checkpointer) -> None:
        """The export of the checkpoint that the run continues from, where each checkpoint is to have one."""
        if self.resumed is None or self.step_scheduler.is_finished():
            return
        try:
            checkpointer.export_if_missing(self.resumed, last=False)
        except SaveFailed as failure:
            self.note_failure(failure)

    # ---------------------------------------------------------------- log

    def log_step(self, batch: GlobalBatch, control: Control, result: StepResult, seconds: float) -> None:
        """A line of training.jsonl and of the progress, on the leader."""
        self.last_step = result
        if not self.layout.is_leader:
            return
        scheduler = self.step_scheduler
        record: dict[str, Any] = {
            "step": scheduler.step,
            "epoch": scheduler.epoch,
            "timestamp": time.time(),
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": control.num_tokens,
            "label_tokens": control.num_label_tokens,
            "tps": control.num_tokens / seconds,
            "mem": self.peak_memory.nbytes,
        }
        if result.aux_loss is not None:
            record["aux_loss"] = result.aux_loss
        if self.config.logging.sample_ids:
            record["samples"] = batch.sample_ids
        self.append(self.training_log, record, soon=True)
        self.progress.update(
            StepView(
                scheduler.step, scheduler.epoch, result.loss, result.lr, control.num_tokens, seconds, result.aux_loss
            )
        )

    def append(self, jsonl: JsonlLog, record: dict[str, Any], *, soon: bool = False) -> None:
        """Write a log line, unless this run leaves nothing on disk (``checkpoint.enabled: false``) or is no leader.

        Nothing is written where another run took over the run directory. The control vector of the next step tells
        all ranks, which then raise :class:`LeaseLost` together.
        """
        if self.layout.is_leader and self.checkpointer is not None:
            with contextlib.suppress(LeaseLost):
                jsonl.append(record, soon=soon)

    def flush_logs(self) -> None:
        """Have every line up to this step on disk."""
        self.training_log.flush()
        self.validation_log.flush()

    # ---------------------------------------------------------------- validate and save

    def validate(self) -> Validation | None:
        """The validation loss; None when a stop was asked for meanwhile. Subclasses define it."""
        raise NotImplementedError

    def validate_and_save(self, *, validate: bool, save: bool, last: bool = False) -> None:
        """What is due after a step, or before the next one, in the order that makes a save hold its own validation.

        Raises :class:`Stopped` where a signal cut that off: then :meth:`stop` saves.
        """
        started = time.monotonic()
        validation = self._validated() if validate else None
        if validate and validation is None:
            self.stop()
        wanted = validation is not None and self._is_best(validation)
        if (save or wanted) and self.step_scheduler.unsaved:
            self.save(validation, started, last=last)

    def _validated(self) -> Validation | None:
        validation = self.validate()
        if validation is None:
            return None
        scheduler = self.step_scheduler
        scheduler.note_validated()
        log.info("step %d: validation loss %.4f", scheduler.step, validation.loss)
        record = {"step": scheduler.step, "epoch": scheduler.epoch, "timestamp": time.time()}
        self.append(
            self.validation_log,
            {**record, "val_loss": validation.loss, "label_tokens": validation.num_label_tokens},
        )
        return validation

    def make_up_validation(self) -> None:
        """The validation that a signal cut off before the present start; a resumed step has its checkpoint already.

        Afterwards the best value so far, and which checkpoint has it, are what they are in a run without signals.
        """
        scheduler = self.step_scheduler
        if not scheduler.validation_is_missing:
            return
        log.info("validating step %d, which a signal had prevented", scheduler.step)
        validation = self._validated()
        if validation is None:
            self.stop()
        if (self._is_best(validation) or scheduler.save_was_due) and self.checkpointer is not None and self.resumed:
            measured = {key: value for key, value in self.losses(validation).items() if value is not None}
            self.checkpointer.note_validation(self.resumed, measured)

    def losses(self, validation: Validation | None) -> dict[str, Any]:
        """What losses.json holds of the present step; null where nothing was measured at this very step."""
        return {
            "step": self.step_scheduler.step,
            "epoch": self.step_scheduler.epoch,
            "train_loss": self.last_step.loss if self.last_step else None,
            "val_loss": validation.loss if validation else None,
        }

    def _warn_of_unknown_metric(self, losses: Mapping[str, Any]) -> None:
        key = self.config.checkpoint.best_metric_key
        if key not in losses and key not in self._unknown_metrics:
            self._unknown_metrics.add(key)
            log.warning(
                "no best checkpoint: checkpoint.best_metric_key is %s, and there are only %s", key, ", ".join(losses)
            )

    def _is_best(self, validation: Validation) -> bool:
        key, mode = self.config.checkpoint.best_metric_key, self.config.checkpoint.best_mode
        value = policy.metric_of(self.losses(validation), key)
        if value is None or not policy.is_better(value, self.step_scheduler.best, mode):
            return False
        return self.step_scheduler.note_best(value)

    def save(self, validation: Validation | None, started: float, *, last: bool) -> None:
        """Save all state as the checkpoint of the present step. *started* is when its validation began."""
        if self.checkpointer is None:
            self.step_scheduler.note_save(0.0)
            return
        self.settle()
        scheduler = self.step_scheduler
        try:
            report = self.save_now(self.checkpointer, validation, last=last)
        except SaveFailed as failure:
            scheduler.note_failed_save()
            self.note_failure(failure)
            return
        scheduler.note_save(time.monotonic() - started)
        self.last_save = report
        if report.published:
            self.save_failure = None
        if report.export_failure is not None:
            self.note_failure(report.export_failure)

    def settle(self) -> None:
        """Wait for a save in the background, and take note of how it ended.

        Called on all ranks. Raises :class:`LeaseLost`, on all ranks, where another run took over the run directory.
        """
        if self.checkpointer is None:
            return
        self.checkpointer.check_lease_together()
        try:
            if self.checkpointer.settle():
                self.save_failure = None
        except SaveFailed as failure:
            if not isinstance(failure, ExportFailed):
                self.step_scheduler.note_lost_save()
            self.note_failure(failure)

    def note_saved(self, report: SaveReport) -> None:
        """On the leader, when a checkpoint is published, perhaps in another thread: a line of each log."""
        reasoning = self.step_scheduler.note_published(report.stall_seconds, report.total_seconds)
        self.progress.note_saved(report.step)
        log.info("%s", saved_line(report))
        if reasoning is not None:
            log.info("%s", reasoning)
        event = {
            "event": "save",
            "step": report.step,
            "stall_seconds": report.stall_seconds,
            "total_seconds": report.total_seconds,
            "bytes": report.nbytes,
            "bytes_per_second": report.bytes_per_second,
            "free_bytes": report.free_bytes,
            "pruned": list(report.pruned),
            "export_command": report.export_command and without_hidden(report.export_command),
        }
        self.append(self.training_log, event)

    def save_now(self, checkpointer: Checkpointer, validation: Validation | None, *, last: bool) -> SaveReport:
        """The checkpoint of the present step."""
        scheduler, losses = self.step_scheduler, self.losses(validation)
        if validation is not None:
            self._warn_of_unknown_metric(losses)
        self.progress.follow(lambda: saving_view(checkpointer.saving(), self.layout.world_size))
        return checkpointer.save(
            discover(self),
            step=scheduler.step,
            epoch=scheduler.epoch,
            config_yaml=self.config_yaml,
            losses=losses,
            progress={
                "consumed_samples": scheduler.consumed_samples,
                "consumed_tokens": scheduler.consumed_tokens,
                "elapsed_seconds": scheduler.elapsed_seconds,
            },
            validated=validation is not None,
            last=last,
            before_publishing=self.flush_logs,
            on_saved=self.note_saved,
        )

    def note_failure(self, failure: AutomodelError) -> None:
        """What ``checkpoint.on_save_failure`` says: end here, or train on and end with this failure's code."""
        if self.config.checkpoint.on_save_failure == "stop":
            raise failure
        self.save_failure = failure
        log.warning("%s", failure)
        log.warning("training goes on, since checkpoint.on_save_failure is continue")

    # ---------------------------------------------------------------- end

    def acknowledge_stop(self, number: int) -> None:
        """Log that a signal was received and what follows; called by a thread while the step in progress goes on.

        The number is 0 if another rank received the signal.
        """
        name = signal.Signals(number).name if number else "a signal to another rank"
        again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
        saves = "saving" if self.checkpointer is not None else "nothing is saved, checkpoint.enabled is false"
        code = self.stop_request.exit_code
        then = f"{saves}, then exit {code}" if code else f"{saves}, then exit"
        step = self.step_scheduler.stops_after
        self.progress.write_above(
            f"{name}: stopping after step {step} at the latest: {then}; {again} to stop now without saving"
        )

    def stop(self) -> NoReturn:
        """End for a signal: save the last completed step unless it is saved. Raises :class:`Stopped`."""
        scheduler = self.step_scheduler
        if self.checkpointer is not None:
            self.checkpointer.leave_out_exports()
        if scheduler.unsaved:
            self.save(None, time.monotonic(), last=False)
        self.settle()
        if self.save_failure is not None:
            raise self.save_failure
        self._say_how_to_export()
        saved = self.checkpointer is not None and scheduler.step > 0
        number = self.stop_request.requested
        by = signal.Signals(number).name if number else "a signal to another rank"
        raise Stopped(
            f"stopped by {by} after step {scheduler.step}" + (", which is saved" if saved else "; nothing was saved"),
            where=str(self.checkpointer.directory) if self.checkpointer else "",
            value=self.last_save.path.name if self.last_save else "",
            remedy="the same command goes on from there" if saved else "the same command starts over",
        )

    def _say_how_to_export(self) -> None:
        newest = self.last_save or self.resumed
        if self.checkpointer is not None and newest is not None:
            command = self.checkpointer.export_command(newest.path)
            if command is not None and not self.checkpointer.is_exported(newest.path):
                log.info("not exported, since a signal leaves little time; to export it: %s", command)

    def end(self) -> None:
        """The last lines of a run that ended by itself. Raises what made its last save fail, if it went on then."""
        self.settle()
        scheduler = self.step_scheduler
        loss = f"training loss {self.last_step.loss:.4f}" if self.last_step else "no step was made"
        log.info("done: step %d, %s", scheduler.step, loss)
        log.info("%s", scheduler.reason_of_end())
        if self.last_save is not None:
            log.info("newest checkpoint: %s", self.last_save.path)
            if self.last_save.export is not None:
                log.info("Hugging Face export: %s", self.last_save.export)
        if self.checkpointer is not None and self.config.checkpoint.export_best:
            self.checkpointer.export_best()
        if self.save_failure is not None:
            raise self.save_failure

    def already_complete(self) -> None:
        """A finished run is started again: say so, and make the exports that a kill or a signal had prevented."""
        log.info("already complete at step %d: %s", self.step_scheduler.step, self.step_scheduler.reason_of_end())
        if self.checkpointer is not None and self.resumed is not None:
            self.checkpointer.export_if_missing(self.resumed, last=True)
            if self.config.checkpoint.export_best:
                self.checkpointer.export_best()

    def close(self) -> None:
        """Let go of logs, checkpointer and process groups; safe after a failed or missing ``setup``."""
        lost = self.checkpointer is not None and self.checkpointer.lease_is_lost
        if self.checkpointer is not None:
            self.checkpointer.wait()
        self.progress.close()
        # The logs close before the lease is released: their last lines are this run's.
        for name in ("training_log", "validation_log"):
            if name in vars(self):
                with contextlib.suppress(LeaseLost):
                    getattr(self, name).close()
        if self.checkpointer is not None:
            self.checkpointer.close()
        if self.tracking is not None and lost:
            self.tracking.abandon()
        elif self.tracking is not None:
            self.tracking.close()
        if self.peer_stop is not None:
            self.peer_stop.close()
        if "log_handler" in vars(self):
            tear_down_logging(self.log_handler)
        close_distributed()


def saving_view(saving: Saving | None, num_ranks: int) -> SavingView | None:
    """A save under way as the progress line shows it; of several ranks the leader's share."""
    if saving is None:
        return None
    written, total = min(saving.written_bytes, saving.total_bytes), max(saving.total_bytes, 1)
    amount = f"{size_text(written)} of {size_text(saving.total_bytes)}" + (" on rank 0" if num_ranks > 1 else "")
    return SavingView(saving.step, written / total, amount)


def saved_line(report: SaveReport) -> str:
    """What the log says of a published checkpoint."""
    seconds = f"{report.total_seconds:.2f} s, training waited {report.stall_seconds:.2f} s"
    size = f"{size_text(report.nbytes)} at {size_text(report.bytes_per_second)}/s"
    free = "" if report.free_bytes is None else f", {size_text(report.free_bytes)} free"
    pruned = f", removed {' '.join(report.pruned)}" if report.pruned else ""
    export = f"; to export it: {report.export_command}" if report.export_command and not report.export else ""
    return f"Saved {report.path.name} in {seconds}: {size}{free}{pruned}{export}"
