"""What a run reports: its two logs on disk, the progress line, log messages, and the trackers that follow the logs."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.layout import TEXT_LOG, TRAINING_LOG, VALIDATION_LOG
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.parts.failures import raise_on_all_ranks
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.checkpoint.saving.save import SaveReport
from automodel_ckpt.config.keys.monitoring import LoggingConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import LeaseLost, without_hidden
from automodel_ckpt.logs.metrics import JsonlLog, PeakMemory
from automodel_ckpt.logs.progress import Progress, TextLog, set_up_logging, tear_down_logging
from automodel_ckpt.logs.timeline import Timeline
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.model.sections import logs_mfu
from automodel_ckpt.training.values.records import (
    LABEL_TOKENS,
    Validation,
)
from automodel_ckpt.training.values.step_numbers import LaunchedStep, StepResult

if TYPE_CHECKING:
    from automodel_ckpt.logs.step_profiler import StepProfiler
    from automodel_ckpt.logs.trackers import Tracking
    from automodel_ckpt.models.measure.harness import TaskMetric
    from automodel_ckpt.training.counters.rules import Spike

log = logging.getLogger("automodel_ckpt")

_PROFILE = "profile"
BEAT_SECONDS = 1.0
"""How often the time of a run is written while a phase lasts."""

STEP_FIELDS = frozenset(
    {"step", "epoch", "timestamp", "loss", "grad_norm", "lr", "tokens", "label_tokens"}
    | {"tps", "tps_per_gpu", "mfu", "mem", "seconds", "aux_loss", "samples", "event"}
)
"""Fields of a line of ``training.jsonl`` that are not metrics of the objective."""


class RunLog:
    """The logs of a run. Rank 0 writes ``training.jsonl``, ``validation.jsonl`` and its messages to ``log.txt``.

    The other ranks only print errors.

    Nothing is written to disk before :meth:`open`, which a run without checkpoints never calls.
    """

    def __init__(self, settings: LoggingConfig, layout: RankLayout) -> None:
        """Show log messages and the progress line as *settings* asks, until :meth:`close`."""
        self._settings = settings
        self._layout = layout
        self.progress = Progress(
            every_seconds=settings.log_every_seconds,
            every_steps=settings.log_every_steps,
            enabled=layout.is_rank0,
            num_ranks=layout.world_size,
            device_word="gpu" if layout.device.type == "cuda" else "rank",
            has_timestamps=True,
        )
        self._text_log = TextLog()
        self._check_lease: Callable[[], None] = lambda: None
        self.timeline = Timeline()
        """Measures the phases of this start on each rank. Rank 0 writes them."""
        self.terms = LABEL_TOKENS
        """What the loss is a mean over. Both logs have the count under this name."""
        self.training: JsonlLog | None = None
        """Rank 0's ``training.jsonl``. None before :meth:`open`, and on other ranks."""
        self.validation: JsonlLog | None = None
        """Rank 0's ``validation.jsonl``. None before :meth:`open`, and on other ranks."""
        self._tracking: Tracking | None = None
        self._peak_memory = PeakMemory(layout.device)
        self._measured = ""
        self.device_rate: float | None = None
        """What the logged MFU is relative to, in FLOP/s. None when it is unknown."""
        self._handler = set_up_logging(self.progress, settings.level, layout.rank, self._text_log)

    def measure_device(self, dtype: torch.dtype) -> None:
        """Measure the rate that the logged MFU is relative to, for products in *dtype*. Call it on all ranks."""
        if logs_mfu(self._settings, self._layout):
            from automodel_ckpt.logs.device_rate import device_rate

            self.device_rate = device_rate(self._layout.device, dtype, self._settings.peak_tflops)

    def open(self, directory: Path, check_lease: Callable[[], None]) -> None:
        """Write the logs in *directory* from here on.

        *check_lease* is called before each change of a file. It raises :class:`LeaseLost` if another run took over
        the directory.
        """
        if self._layout.is_rank0:
            self.training = JsonlLog(directory / TRAINING_LOG, before_writing=check_lease)
            self.validation = JsonlLog(directory / VALIDATION_LOG, before_writing=check_lease)
            self._check_lease = check_lease

    def resume(self, scheduler: StepScheduler, resumed_from: str | None) -> None:
        """Remove the lines of steps after the present one, and start the trackers. Call it after :meth:`open`.

        *resumed_from* is the name of the checkpoint that was loaded, which is logged. It is None for a new run.
        Collective. Raises :class:`SaveFailed` on all ranks if a file cannot be rewritten.
        """
        with self._changing_on_rank0("continuing the logs of the run") as logs:
            if logs is None:
                return
            training, validation = logs
            run = training.path.parent
            if scheduler.validation_is_due:
                # The validation of this step is made up for, and logged then.
                validation.truncate_after(scheduler.step - 1)
            is_finished = scheduler.is_finished()
            if not is_finished:
                # The start of a finished run changes no file.
                self._text_log.open(run / TEXT_LOG, self._check_lease)
                self.timeline.open(
                    run,
                    self._check_lease,
                    step=scheduler.step,
                    resumed_from=resumed_from,
                    world_size=self._layout.world_size,
                    beat_seconds=BEAT_SECONDS,
                )
            # A finished run may resume from an earlier checkpoint; the lines of its later steps are not removed.
            last_kept = math.inf if is_finished else scheduler.step
            # A rollback that the loaded checkpoint does not know is repeated: the run was killed before its next save.
            known = (
                math.inf if is_finished or not scheduler.spikes else scheduler.spikes.num_rollbacks
            )
            removed = training.truncate_after(last_kept, max_rollbacks=known)
            validation.truncate_after(last_kept)
            if removed is not None:
                lost = counted(removed - scheduler.step, "logged step")
                log.info("%s after step %d will be repeated", lost, scheduler.step)
            if resumed_from is not None and not is_finished:
                record = {"from": resumed_from, "world_size": self._layout.world_size}
                self.log_event("resume", scheduler.step, record)
            # Also for a finished run: a kill at its end may have prevented the trackers from getting its last lines.
            self.start_trackers(run, scheduler.step)

    @contextlib.contextmanager
    def _changing_on_rank0(self, doing: str) -> Iterator[tuple[JsonlLog, JsonlLog] | None]:
        """Yield both logs on rank 0, else None, also before :meth:`open`. All ranks raise what the block raises."""
        where = "" if self.training is None else self.training.path.parent
        with raise_on_all_ranks(self._layout.gloo_group, doing, where):
            has_logs = self.training is not None and self.validation is not None
            yield (self.training, self.validation) if has_logs else None  # type: ignore[misc]

    def roll_back(self, scheduler: StepScheduler, spike: Spike, num_skipped: int) -> None:
        """Remove the lines of steps after the present one, to which the run went back because of *spike*.

        *num_skipped* is the number of global batches that are left out. Trackers continue after the present step.
        Collective. Raises :class:`SaveFailed` on all ranks if a file cannot be rewritten.
        """
        with self._changing_on_rank0("removing what the run went back from in its logs") as logs:
            if logs is None:
                return
            training, _ = logs
            if self._tracking is not None:
                self._tracking.close()
                self._tracking = None
            # Not resume(): this start continues, with its entry in timeline.jsonl.
            for jsonl in logs:
                jsonl.truncate_after(scheduler.step)
            self.start_trackers(training.path.parent, scheduler.step)
            record = {
                "spike_step": spike.step,
                "reason": spike.reason,
                "skipped_batches": num_skipped,
            }
            self.log_event("rollback", scheduler.step, record)

    def start_trackers(self, run: Path, step: int) -> None:
        """Start the process that sends the logs in the directory *run*, after *step*, to ``logging.trackers``."""
        if self._settings.trackers:
            from automodel_ckpt.logs.trackers import Tracking

            went_back = any(name.step > step for name in checkpoint_names(run))
            self._tracking = Tracking(
                run,
                self._settings.trackers,
                step,
                went_back=went_back,
                every_steps=self._settings.log_every_steps or 1,
            )

    def log_step(self, step: LaunchedStep, result: StepResult, *, is_followed: bool) -> None:
        """Log a *step* that is done. On a GPU, the next step may have been queued before.

        *is_followed*: the message about its validation or its save has its figures.
        """
        self._measured = ""
        if not self._layout.is_rank0:
            return
        control, seconds = step.control, step.seconds
        rate = control.num_tokens / seconds
        record: ValueDict = {
            "step": step.step,
            "epoch": step.batch.epoch,
            "timestamp": time.time(),
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": control.num_tokens,
            "label_tokens": control.num_label_tokens,
            "tps": rate,
            "tps_per_gpu": rate / self._layout.world_size,
            "mem": self._peak_memory.nbytes,
            "seconds": self.timeline.seconds_of_step(step.step),
        }
        if self.terms != LABEL_TOKENS:
            record[self.terms] = control.count
        if control.flops and self.device_rate is not None:
            record["mfu"] = control.flops / seconds / self._layout.world_size / self.device_rate
        if result.aux_loss is not None:
            record["aux_loss"] = result.aux_loss
        record.update(result.metrics)
        if self._settings.sample_ids:
            record["samples"] = step.batch.sample_ids
        # Not fsynced for each step: flush() does that before a checkpoint is published.
        self._append(self.training, record, soon=True)
        is_shown = self._handler.shown_level <= logging.INFO
        self.progress.update(record, seconds, is_followed=is_followed and is_shown)

    def log_validation(
        self, scheduler: StepScheduler, validation: Validation, text: str, *, is_followed: bool
    ) -> None:
        """Show a *validation*, with its metrics as *text*, and write a line of ``validation.jsonl``.

        *is_followed*: the message about the save of this step has them.
        """
        self._measured = text
        if not is_followed:
            log.info("%s", self.figures(scheduler.step))
        record = {"step": scheduler.step, "epoch": scheduler.epoch, "timestamp": time.time()}
        record |= {**validation.metrics, "label_tokens": validation.num_label_tokens}
        if self.terms != LABEL_TOKENS:
            record[self.terms] = validation.count
        self._append(self.validation, record)

    def log_completions(self, scheduler: StepScheduler, completions: Sequence[Values]) -> None:
        """Show completions of the section ``generation``, and write them as one line of ``training.jsonl``."""
        for each in completions:
            log.info("step %d: %r -> %r", scheduler.step, each["prompt"], each["text"])
        self.log_event("completions", scheduler.step, {"completions": completions})

    def log_benchmarks(self, scheduler: StepScheduler, metrics: Sequence[TaskMetric]) -> None:
        """Write the metrics of the section ``evaluation`` as a line of ``validation.jsonl``."""
        record: ValueDict = {"event": "evaluation", "step": scheduler.step}
        record |= {"epoch": scheduler.epoch, "timestamp": time.time()}
        for each in metrics:
            record[each.name] = each.value
            if each.stderr is not None:
                record[f"{each.name}_stderr"] = each.stderr
        self._append(self.validation, record)

    def log_event(self, event: str, step: int, record: Values) -> None:
        """Write a line of ``training.jsonl`` that is not a step."""
        begin = {"event": event, "step": step, "timestamp": time.time()}
        self._append(self.training, {**begin, **record})

    def log_save(self, report: SaveReport) -> None:
        """Write a line of ``training.jsonl`` about a published checkpoint. Called from any thread."""
        record = {
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
        self._append(self.training, record)

    def _append(self, jsonl: JsonlLog | None, record: ValueDict, *, soon: bool = False) -> None:
        """Write a line, unless another run took over the directory.

        The control vector of the next step carries that to all ranks, which then raise :class:`LeaseLost` together.
        """
        if jsonl is not None:
            with contextlib.suppress(LeaseLost):
                jsonl.append(record, soon=soon)

    def flush(self) -> None:
        """Return when every line up to this step is on disk. Raises OSError if one cannot be written."""
        for jsonl in (self.training, self.validation):
            if jsonl is not None:
                jsonl.flush()

    def close_files(self, *, lease_is_lost: bool) -> None:
        """Write the last lines, before the lease of the directory is released.

        With *lease_is_lost* another run owns the logs, and sends them to the trackers itself.
        """
        self.progress.close()
        self.timeline.close(lease_is_lost=lease_is_lost)
        for jsonl in (self.training, self.validation):
            if jsonl is not None:
                with contextlib.suppress(LeaseLost):
                    jsonl.close()
        self._text_log.close()
        if lease_is_lost and self._tracking is not None:
            self._tracking.abandon()
            self._tracking = None

    def close(self) -> None:
        """End the progress line and the trackers, and show log messages no more."""
        self.progress.close()
        if self._tracking is not None:
            self._tracking.close()
            self._tracking = None
        self._text_log.close()
        tear_down_logging(self._handler)

    def log_failure(self, text: str) -> None:
        """Write the error that ends the run to ``log.txt`` of rank 0. The launcher prints it."""
        self._text_log.write(text)

    def figures(self, step: int) -> str:
        """The present *step* in a line: its figures, and the metrics of its validation if there was one."""
        parts = self.progress.figures() or [f"step {step}"]
        return "  ".join(filter(None, [*parts, self._measured]))


def build_profiler(config: RecipeConfig, layout: RankLayout) -> StepProfiler | None:
    """Build what traces the steps of the ``profile`` section on this rank. Returns None when nothing is traced."""
    section = config.profile
    if section is None:
        return None
    directory = Path(_PROFILE)
    if config.checkpoint.enabled:
        directory = Path(config.checkpoint.checkpoint_dir) / _PROFILE
    if section.directory is not None:
        directory = Path(section.directory).expanduser()
    missing = [rank for rank in section.ranks if rank >= layout.world_size]
    if missing:
        # Not an error: an elastic run may restart with fewer ranks.
        log.warning("profile.ranks: this run has no rank %s", ", ".join(map(str, missing)))
    if layout.rank not in section.ranks:
        return None
    from automodel_ckpt.logs.step_profiler import StepProfiler

    return StepProfiler(section, directory, layout.rank, layout.device)
