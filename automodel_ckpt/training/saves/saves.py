"""The checkpoints of a run: which is the best, what follows a failed save, what is exported, and how a run ends."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.checkpointer import Checkpointer, Resumed, Saving
from automodel_ckpt.checkpoint.export.next_steps import model_files_lines, try_command
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.parts.discovery import discover
from automodel_ckpt.checkpoint.parts.failures import text_while_running
from automodel_ckpt.checkpoint.run.links import TO_HUB, clear_links
from automodel_ckpt.checkpoint.run.notes import SAVES
from automodel_ckpt.checkpoint.run.resume import is_better, metric_of
from automodel_ckpt.checkpoint.saving.save import SaveReport
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.errors import (
    AutomodelError,
    ExportFailed,
    LeaseLost,
    RecipeError,
    SaveFailed,
)
from automodel_ckpt.parallel.ranks.agree import gather_objects
from automodel_ckpt.parallel.ranks.stop import StopRequest
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.values.run_log import RunLog

if TYPE_CHECKING:
    from automodel_ckpt.training.saves.after_saves import HubUploads
    from automodel_ckpt.training.saves.memory_saves import MemorySaves
    from automodel_ckpt.training.watch.replicas import ReplicaCheck

log = logging.getLogger("automodel_ckpt")

_BAR_CELLS = 10
_REQUEST_SECONDS = 1.0
"""How often a run looks for a request, which can be a file of a network: each step would wait for the answer."""


def saving_text(saving: Saving | None, num_ranks: int) -> str:
    """How far a save is, for the progress line; with several ranks, how far rank 0 is. Empty without one."""
    if saving is None:
        return ""
    written = min(saving.written_bytes, saving.total_bytes)
    bar = "#" * round(_BAR_CELLS * written / max(saving.total_bytes, 1))
    amount = f"{size_text(written)} of {size_text(saving.total_bytes)}"
    on_rank0 = " on rank 0" if num_ranks > 1 else ""
    return f"saving {saving.step} [{bar:.<{_BAR_CELLS}}] {amount}{on_rank0}"


def log_saved(report: SaveReport, figures: str, why: str) -> None:
    """Log a published checkpoint. *figures* describe training at its step, and *why* states what it was saved for."""
    size = size_text(report.nbytes)
    log.info(
        "%s  saved %s%s: %s in %.2f s", figures, report.path.name, why, size, report.total_seconds
    )
    rate = size_text(report.bytes_per_second)
    text = f"  training waited {report.stall_seconds:.2f} s; {rate}/s"
    if report.free_bytes is not None:
        text += f", {size_text(report.free_bytes)} free"
    if report.pruned:
        text += f", removed {' '.join(report.pruned)}"
    log.debug("%s", text)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _measured(method: _Method) -> _Method:
    """Count the time in a method of :class:`Saves` as time of saves."""

    @wraps(method)
    def measured(self: Saves, *arguments: Any, **keywords: Any) -> Any:
        with self.timeline.phase(SAVES):
            return method(self, *arguments, **keywords)

    return cast(_Method, measured)


class Saves:
    """Saves the state of a run, and applies ``checkpoint.on_save_failure`` if a save fails.

    A run without checkpoints (``checkpoint.enabled: false``) has no *checkpointer*: then nothing is saved. All methods
    are called on all ranks, except :meth:`note_saved`.
    """

    def __init__(self, recipe: Any) -> None:
        """*recipe* is the :class:`~automodel_ckpt.training.recipe.Recipe`. Its parts have been built."""
        config: RecipeConfig = recipe.config
        self.checkpointer: Checkpointer | None = recipe.checkpointer
        self.failure: AutomodelError | None = None
        """The last save's failure, if training continues after it. The run ends with it."""
        self.last_save: SaveReport | None = None
        """The newest checkpoint of this process. An asynchronous one may still fail, until :meth:`wait` returns."""
        self._save_before: SaveReport | None = None
        """The checkpoint before :attr:`last_save`, while that is being written."""
        self.resumed: Resumed | None = None
        """The checkpoint that this process resumed from, set by ``training/resume.py`` and :meth:`roll_back`."""
        self.memory: MemorySaves | None = None
        """The section ``checkpoint.memory``, set at the resume."""
        self.replica_check: ReplicaCheck | None = None
        """Compares the replicas of the model before each save (``checkpoint.verify_replicas``), set by the recipe."""
        self._compared_step: int | None = None
        self.hub_uploads: HubUploads | None = None
        if config.hub is not None and self.checkpointer is not None:
            from automodel_ckpt.training.saves.after_saves import HubUploads

            self.hub_uploads = HubUploads(config.hub, self.checkpointer)
        self._section = config.checkpoint
        self.recipe_yaml: str = recipe.config_yaml
        """The recipe that checkpoints contain. A resume sets in it the values that it takes from its checkpoint."""
        self._scheduler: StepScheduler = recipe.step_scheduler
        self._run_log: RunLog = recipe.run_log
        self.timeline = self._run_log.timeline
        self._recipe = recipe
        self._has_warned = self._is_stopping = False
        self._answers_request = False
        """Whether the outcome of the save in progress answers a request of ``ckpt save``."""
        self._look_after = 0.0
        """The monotonic clock's time of the next look for a request."""
        self._figures: dict[int, tuple[str, str]] = {}
        """What the line about the save of a step contains of training, and why it is saved, until it is published."""

    # ---------------------------------------------------------------- before the first step

    def check_space(self, state: Values) -> None:
        """Check that a checkpoint fits on the disk and in memory.

        Raises :class:`SaveFailed` if ``on_save_failure`` is ``stop``.
        """
        if self.checkpointer is None or self._scheduler.is_finished():
            return
        if self.memory is not None:
            self.memory.check_space(state)
        try:
            self.checkpointer.check_disk_space(state)
        except SaveFailed as failure:
            self._handle(failure)

    def start_hub_uploads(self, resources: contextlib.ExitStack) -> None:
        """Start the process of the section ``hub``, which *resources* close. Collective.

        Raises :class:`SaveFailed` on all ranks if it cannot be started.
        """
        if self.hub_uploads is not None:
            self.hub_uploads.start(None if self.resumed is None else self.resumed.step)
            resources.callback(self.hub_uploads.close)
        elif self.checkpointer is not None:
            # A run without the section must not keep checkpoints for earlier uploads.
            forget = partial(clear_links, self.checkpointer.directory, TO_HUB)
            self.checkpointer.call_on_rank0("removing the links of earlier uploads", forget)

    @_measured
    def make_missing_export(self) -> None:
        """Export the checkpoint that the run continues from, where each checkpoint is to have an export."""
        if self.checkpointer is None or self.resumed is None or self._scheduler.is_finished():
            return
        # A checkpoint in memory has no export: the next one on disk will.
        if self.resumed.in_memory:
            return
        try:
            self.checkpointer.exports.export_if_missing(self.resumed.path, last=False)
        except SaveFailed as failure:
            self._handle(failure)

    # ---------------------------------------------------------------- during training

    def is_requested(self) -> bool:
        """Whether a save is requested of this rank: by a signal, or on rank 0 by ``ckpt save``. Local.

        A file is looked for only once in a while, and the answer is False in between.
        """
        is_signaled: bool = self._recipe.stop_request.save_requested
        now = time.monotonic()
        if is_signaled or self._answers_request or now < self._look_after:
            return is_signaled
        self._look_after = now + _REQUEST_SECONDS
        return _has_request(self.checkpointer)

    def _answer_request(self, checkpoint: str, error: str = "") -> None:
        """Answer the requests that the save in progress was for with the name of its *checkpoint*, or an *error*."""
        if self.checkpointer is None or not self._answers_request:
            return
        # If the request cannot be removed, none is answered any more, instead of one after every step.
        with contextlib.suppress(OSError, LeaseLost):
            self.checkpointer.run.answer_save_request(checkpoint, error)
            self._answers_request = False

    def _answer_last_requests(self) -> None:
        """Answer requests after the last save of the run: its checkpoint has the state of now."""
        newest = self.last_save or self.resumed
        self._answers_request = self._answers_request or _has_request(self.checkpointer)
        if newest is None or self._scheduler.unsaved:
            self._answer_request("", "the run ended before it saved")
        else:
            self._answer_request(newest.path.name)

    def await_copies(self) -> None:
        """Call this before state on the device is changed: an asynchronous save may still be copying it."""
        if self.checkpointer is not None:
            self.checkpointer.await_copies()
        if self.memory is not None and self.memory.checkpointer is not None:
            self.memory.checkpointer.await_copies()

    def roll_back(self, step: int) -> Resumed | None:
        """Load the newest checkpoint of *step* or an earlier one, on disk or in memory. A collective.

        Returns None, with no effect, if there is none.
        """
        if self.checkpointer is None:
            return None
        self.wait()
        if self.memory is not None:
            self.memory.finish_save()
            self.memory.find()
        state = discover(self._recipe)
        resumed = self.checkpointer.roll_back(state, step)
        if resumed is None:
            return None
        self._compared_step = None
        if self.hub_uploads is not None:
            self.hub_uploads.roll_back(resumed.step)
        # It may be of a step after this one, and is renamed by the next save.
        self.last_save = self._save_before = None
        self.resumed = resumed
        if resumed.in_memory:
            # A stop must save this step on disk.
            self._scheduler.note_lost_save()
        if self.memory is not None:
            self.memory.start(resumed, resumed.step)
        return resumed

    def note_if_best(self, losses: Values) -> bool:
        """Whether *losses* of the present step are the best so far, by ``best_metric_key`` and ``best_mode``, and a
        better value is to be saved (``ckpt_on_best``)."""
        key = self._section.best_metric_key
        # A benchmark, or a loop of the user, names its metrics only when it has measured them.
        if key not in losses and not self._has_warned:
            self._has_warned = True
            log.warning(
                "no best checkpoint: checkpoint.best_metric_key is %s, and there are only %s",
                key,
                ", ".join(losses),
            )
        value = metric_of(losses, key)
        if value is None or not is_better(value, self._scheduler.best, self._section.best_mode):
            return False
        self._scheduler.best = value
        return self._scheduler.settings.ckpt_on_best

    def note_late_validation(self, losses: Values) -> None:
        """Record *losses* of the resumed step for its checkpoint. A signal had prevented this step's validation."""
        is_wanted = self.note_if_best(losses) or self._scheduler.save_was_due
        if is_wanted and self.checkpointer is not None and self.resumed is not None:
            measured = {key: value for key, value in losses.items() if value is not None}
            if self.checkpointer.is_rank0:
                self.resumed.note_validation(self.checkpointer.run, measured)

    def _check_lease(self) -> None:
        assert self.checkpointer is not None
        # If the holder cannot be determined now, the next write fails instead.
        with contextlib.suppress(OSError):
            self.checkpointer.run.check_lease()

    @_measured
    def save(self, losses: Values, *, validated: bool, started: float, last: bool) -> None:
        """Save the present step, with *losses* in its ``losses.json``.

        *validated*: the losses include a validation. *started* is when the step's validation began, in seconds of
        ``time.monotonic``. *last*: the run ends with this step.

        If ``on_save_failure`` is ``stop``, raises :class:`SaveFailed`, and :class:`RecipeError` for state that cannot
        be stored. Raises :class:`LeaseLost` if another run took over the run directory.
        """
        self._recipe.stop_request.save_requested = False
        if self.checkpointer is None:
            self._scheduler.note_save(0.0)
            return
        self.wait()
        self._answers_request = self._answers_request or _has_request(self.checkpointer)
        try:
            report = self.save_now(self.checkpointer, losses, validated=validated, last=last)
        # A RecipeError: state that cannot be stored, which the run has had only since its start.
        except (SaveFailed, RecipeError) as failure:
            # Before _handle(), which may raise. A failed save must not be retried after every step.
            self._scheduler.note_attempt()
            self._handle(failure)
            return
        self._scheduler.note_save(time.monotonic() - started)
        self.last_save, self._save_before = report, self.last_save
        # An asynchronous save is not published yet: wait() clears an earlier failure then.
        if report.published:
            self.failure = None
        if report.export_failure is not None:
            self._handle(report.export_failure)

    def save_now(
        self, checkpointer: Checkpointer, losses: Values, *, validated: bool, last: bool
    ) -> SaveReport:
        """Write the checkpoint of the present step, or with ``is_async`` begin to. Raises :class:`SaveFailed`."""
        scheduler = self._scheduler
        # Now: when an asynchronous save is published, training is at a later step.
        why = ""
        if scheduler.saves_for_epoch:
            every = scheduler.settings.ckpt_every_epochs
            why = f" at the end of epoch {scheduler.epoch} (ckpt_every_epochs {every})"
        self._figures = {scheduler.step: (self._run_log.figures(scheduler.step), why)}
        self._run_log.progress.follow(self._in_progress)
        return self.write(
            checkpointer, losses, validated=validated, last=last, on_saved=self.note_saved
        )

    def _in_progress(self) -> str:
        """How far the save or the upload is that is in progress, for the live line."""
        assert self.checkpointer is not None
        num_ranks = self._recipe.layout.world_size
        saving = saving_text(self.checkpointer.saving(), num_ranks)
        uploading = "" if self.hub_uploads is None else self.hub_uploads.uploading
        return saving or self.checkpointer.transfers.uploading or uploading

    @_measured
    def write(
        self,
        checkpointer: Checkpointer,
        losses: Values,
        *,
        validated: bool = False,
        last: bool = False,
        on_saved: Callable[[SaveReport], None] | None = None,
    ) -> SaveReport:
        """Pass the state and the counters of the present step to *checkpointer*, on disk or in memory.

        Raises :class:`SaveFailed`.
        """
        scheduler = self._scheduler
        if self.replica_check is not None and scheduler.step != self._compared_step:
            self.replica_check.check(scheduler.step)
            self._compared_step = scheduler.step
        # Discovered for each save: a recipe may have replaced an attribute.
        state = discover(self._recipe)
        for value in state.values():
            if isinstance(value, GlobalBatchLoader):
                value.gather_state(partial(gather_objects, self._recipe.layout.gloo_group))
        return checkpointer.save(
            state,
            step=scheduler.step,
            epoch=scheduler.epoch,
            config_yaml=self.recipe_yaml,
            losses=losses,
            progress={
                f"consumed_{self._recipe.sample_noun}s": scheduler.consumed_samples,
                "consumed_tokens": scheduler.consumed_tokens,
                "elapsed_seconds": scheduler.elapsed_seconds,
            },
            validated=validated,
            last=last,
            # A resume truncates the logs to the checkpoint's step; it cannot restore lines.
            before_publishing=self._run_log.flush,
            on_saved=on_saved,
        )

    def note_saved(self, report: SaveReport) -> None:
        """Log a published checkpoint. Called on rank 0, by a save in the background from another thread."""
        reasoning = self._scheduler.note_published(report.stall_seconds, report.total_seconds)
        self._run_log.progress.note_saved(report.step)
        log_saved(report, *self._figures.get(report.step, (f"step {report.step}", "")))
        if report.export_command and not report.export:
            level = logging.INFO if self._is_stopping else logging.DEBUG
            log.log(level, "  to export it: %s", report.export_command)
        if reasoning is not None:
            log.info("%s", reasoning)
        self._run_log.log_save(report)
        self._answer_request(report.path.name)
        if self.hub_uploads is not None:
            self.hub_uploads.note_saved(report.path.name)

    @_measured
    def wait(self) -> None:
        """Wait for a save in the background, and handle its failure.

        Raises :class:`LeaseLost` if another run took over the run directory, and :class:`SaveFailed` if
        ``on_save_failure`` is ``stop``, the same on all ranks.
        """
        if self.checkpointer is None:
            return
        doing = "checking which run holds the run directory"
        self.checkpointer.call_on_rank0(doing, self._check_lease)
        try:
            if self.checkpointer.wait_for_save():
                self.failure = None
        except SaveFailed as failure:
            # If only the export failed, the checkpoint is published, and the step counts as saved.
            if not isinstance(failure, ExportFailed):
                self._scheduler.note_lost_save()
                self.last_save = self._save_before
            self._handle(failure)

    def _handle(self, failure: AutomodelError) -> None:
        """Apply ``checkpoint.on_save_failure``: raise *failure* now, or continue and raise it at the end of the run."""
        self._answer_request("", failure.problems[0].what)
        if self._section.on_save_failure == "stop":
            raise failure
        self.failure = failure
        if not isinstance(failure, SaveFailed):
            # For the exit code: the recipe was right when the run started.
            self.failure = SaveFailed.all_of(failure.problems)
        log.warning("%s", text_while_running(failure))
        log.warning("training continues, since checkpoint.on_save_failure is continue")

    # ---------------------------------------------------------------- the end

    @_measured
    def stop(self, losses: Values) -> None:
        """Save the last completed step unless it is saved, without an export. Raises the failure of that save."""
        self._is_stopping = True
        if self.checkpointer is not None:
            # An export may take longer than a scheduler's grace period. The next start makes it.
            self.checkpointer.disable_exports()
        if self._scheduler.unsaved:
            self.save(losses, validated=False, started=time.monotonic(), last=False)
        self.wait()
        self._answer_last_requests()
        if self.failure is not None:
            raise self.failure

    @_measured
    def upload_before_stop(self, request: StopRequest) -> None:
        """Wait for uploads after the signal of *request*, as long as there is time. A collective."""
        if self.checkpointer is None:
            return
        with request.waiting() as is_repeated:
            self.checkpointer.transfers.finish_before_stop(
                request.seconds_since_request,
                is_repeated.is_set,
                grace_seconds=request.grace_seconds,
            )

    @_measured
    def end(self, request: StopRequest) -> None:
        """Log the newest checkpoint, export the best, average the last ones, and wait for the uploads.

        The second signal of *request* ends that wait. Raises the failure of the last save.
        """
        self._answer_last_requests()
        if self.last_save is not None:
            lines: list[str] = []
            if self.last_save.export is not None:
                export = self.last_save.export
                lines = [f"Hugging Face export: {export}", f"try it: {try_command(Path(export))}"]
            elif self.checkpointer is not None:
                files = self.checkpointer.exports.own_files(self.last_save.path)
                lines = [] if files is None else model_files_lines(files)
            level = logging.DEBUG if lines else logging.INFO
            log.log(level, "newest checkpoint: %s", self.last_save.path)
            for line in lines:
                log.info("%s", line)
        if self.checkpointer is not None:
            self._make_final_exports(self.checkpointer)
        if self.failure is not None:
            raise self.failure
        if self.checkpointer is not None:
            self._finish_uploads(self.checkpointer, request)

    def _make_final_exports(self, checkpointer: Checkpointer) -> None:
        """Export the best model, and the averages that the recipe asks for, unless these exports exist.

        Raises :class:`ExportFailed` on all ranks.
        """
        section, newest = self._section, self.last_save or self.resumed
        if section.export_best:
            checkpointer.exports.export_best()
        if section.export_ema and newest is not None:
            checkpointer.exports.export_average(newest.path)
        count = section.average_last
        if count is None:
            return
        self.wait()

        def average() -> Path | None:
            checkpointer.run.check_lease()
            from automodel_ckpt.training.saves.after_saves import average_last

            return average_last(checkpointer.directory, count)

        checkpointer.exports.run_on_rank0(
            f"averaging the last {count} checkpoints (the checkpoints themselves are safe)", average
        )

    def _finish_uploads(self, checkpointer: Checkpointer, request: StopRequest) -> None:
        """Wait for the uploads of models and of checkpoints, until the second signal of *request* at the latest.

        Raises :class:`SaveFailed` for required ones.
        """
        newest = self.last_save or self.resumed
        text = "%s: training is done, and uploads are not; %s to stop waiting for them"
        request.on_request = lambda number: log.info(text, signal_name(number), again(number))
        self._run_log.progress.follow(self._in_progress)
        try:
            with request.waiting() as is_repeated:
                if newest is not None and self.hub_uploads is not None:
                    self.hub_uploads.finish(newest.path.name, is_repeated.is_set)
                checkpointer.transfers.finish(is_repeated.is_set)
        finally:
            request.on_request = None

    @_measured
    def export_finished(self, request: StopRequest) -> None:
        """Make the exports and uploads of a finished run that a kill or a signal had prevented, as :meth:`end` does.

        Raises :class:`SaveFailed`.
        """
        if self.checkpointer is not None and self.resumed is not None:
            self.checkpointer.exports.export_if_missing(self.resumed.path, last=True)
            self._make_final_exports(self.checkpointer)
            self._finish_uploads(self.checkpointer, request)


def _has_request(checkpointer: Checkpointer | None) -> bool:
    """Whether ``ckpt save`` waits for rank 0, and this is rank 0."""
    if checkpointer is None or not checkpointer.is_rank0:
        return False
    return checkpointer.run.save_is_requested


def signal_name(number: int | None) -> str:
    """How messages name the signal *number*. It is 0 or None when another rank received the signal."""
    return signal.Signals(number).name if number else "a signal to another rank"


def again(number: int) -> str:
    """How messages say that the signal *number* can be repeated."""
    return "press Ctrl-C again" if number == signal.SIGINT else "send it again"
