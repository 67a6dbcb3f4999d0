"""The counters of a run, which checkpoints contain, and what is due by them and by the clock.

Steps are optimizer steps and count from 1. Epochs count from 0. A step that ends an epoch belongs to that epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.training.counters.rules import (
    AutoInterval,
    EarlyStopping,
    SpikeDetector,
    check_saved,
    is_count,
    is_number,
)
from automodel_ckpt.training.values.records import ClockReading, Control


@dataclass(frozen=True, slots=True)
class Cadence:
    """The triggers of a run. None disables one.

    ``max_time_seconds`` counts from the start of this session. With ``mtbf_seconds``, a mean time between failures, the
    run chooses how often it saves. ``bench_every_steps`` has the interval of each benchmark.
    """

    max_steps: int | None = None
    num_epochs: int | None = None
    ckpt_every_steps: int | None = None
    ckpt_every_epochs: int | None = None
    ckpt_every_minutes: float | None = None
    ckpt_on_best: bool = False
    val_every_steps: int | None = None
    max_time_seconds: float | None = None
    mtbf_seconds: float | None = None
    has_validation: bool = False
    has_benchmarks: bool = False
    bench_every_steps: tuple[int | None, ...] = ()
    early_stopping: Any = None
    stop_after_nonfinite_steps: int | None = None
    on_spike: Any = None


@dataclass(frozen=True, slots=True)
class Due:
    """The actions after a step, in this order: validate, run benchmarks, save, end. With *stop* (a signal), none of
    them is due."""

    validate: bool
    save: bool
    last: bool
    stop: bool
    benchmarks: bool = False

    @property
    def anything(self) -> bool:
        """Whether there is anything to do before the next step."""
        return self.stop or self.validate or self.benchmarks or self.save or self.last


def total_steps(cadence: Cadence, steps_per_epoch: int | None) -> int | None:
    """The number of steps of the run. Returns None when it depends on a stream (*steps_per_epoch* is None)."""
    limits = []
    if cadence.max_steps is not None:
        limits.append(cadence.max_steps)
    if cadence.num_epochs is not None and steps_per_epoch is not None:
        limits.append(cadence.num_epochs * steps_per_epoch)
    return min(limits, default=None)


def planned_end(cadence: Cadence, steps_per_epoch: int | None) -> str:
    """A sentence about what will end the run. *steps_per_epoch* is None for a stream."""
    limits = []
    if cadence.max_steps is not None:
        limits.append(f"max_steps {cadence.max_steps}")
    if cadence.num_epochs is not None:
        last = "" if steps_per_epoch is None else f" (step {cadence.num_epochs * steps_per_epoch})"
        limits.append(f"num_epochs {cadence.num_epochs}{last}")
    if cadence.max_time_seconds:
        limits.append(f"max_time ({cadence.max_time_seconds:g} s)")
    first = ", whichever comes first" if len(limits) > 1 else ""
    return f"{' or '.join(limits) or 'nothing'} will end the run{first}"


def divides(every: int | None, count: int) -> bool:
    """Whether an interval ends at *count*. None is no interval."""
    return every is not None and count % every == 0


_COUNTERS = ("step", "epoch", "epochs_done", "consumed_samples", "consumed_tokens")


def _check_plausible(state: Mapping[str, Any]) -> None:
    """Validate the values of a saved state, which may come from an untrusted file."""
    found = {"nonfinite_steps": 0, **state}
    invalid = [name for name in (*_COUNTERS, "nonfinite_steps") if not is_count(found[name])]
    if not is_number(state["elapsed_seconds"]):
        invalid.append("elapsed_seconds")
    if state["best"] is not None and not is_number(state["best"]):
        invalid.append("best")
    check_saved(not invalid, {name: found[name] for name in invalid})


class StepScheduler:
    """The counters of a run, which each checkpoint contains, and the decisions that depend on them.

    Clocks differ between ranks. After a step, :meth:`finish_step` decides what follows from counters.
    :meth:`apply_clock` decides what follows from :meth:`read_clock` of rank 0. All ranks pass that reading to it, so
    that all have the same state.
    """

    def __init__(
        self,
        cadence: Cadence,
        *,
        planned_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cadence = cadence
        self.planned_steps = planned_steps
        self.planned_before = planned_steps
        self.step = 0
        self.epoch = 0
        self.epochs_done = 0
        self.consumed_samples = 0
        self.consumed_tokens = 0
        self.elapsed_seconds = 0.0
        self.best: float | None = None
        """The best metric so far."""
        self.ended_early = False
        self.ran_out_of_time = False
        self.validation_is_due = False
        """Whether the current step is to be validated after a resume, because a signal had prevented it."""
        self.benchmarks_are_due = False
        self.save_was_due = False
        self.nonfinite_steps = 0
        """Consecutive steps, up to the newest one, with a loss or gradient norm that was not finite, if counted."""
        stopping, spike, mtbf = cadence.early_stopping, cadence.on_spike, cadence.mtbf_seconds
        self.early_stopping = None if stopping is None else EarlyStopping(stopping)
        self.spikes = None if spike is None else SpikeDetector(spike)
        self._auto = None if mtbf is None else AutoInterval(mtbf)
        self._clock = clock
        self._session_start = clock()
        self._elapsed_before = 0.0
        self._saved_step = 0
        self._attempted_step = 0
        self._attempt_time = self._session_start
        self._step_start: float | None = None
        self.is_in_step = False
        """Whether the ranks have begun to agree on a step: a signal may be too late to prevent it."""
        self._epoch_ended = False
        self._clock_is_known = True
        """Whether the clock of rank 0 after the newest step is known: false from finish_step() to apply_clock()."""
        self._longest_step_seconds = 0.0
        self._longest_save_seconds = 0.0

    def is_finished(self) -> bool:
        """Whether the run has no further step."""
        return self.ended_early or self.has_stopped_improving or self._has_reached_limit

    @property
    def _has_reached_limit(self) -> bool:
        max_steps, num_epochs = self.cadence.max_steps, self.cadence.num_epochs
        if max_steps is not None and self.step >= max_steps:
            return True
        return num_epochs is not None and self.epochs_done >= num_epochs

    @property
    def has_stopped_improving(self) -> bool:
        """Whether early stopping ends the run."""
        return self.early_stopping is not None and self.early_stopping.is_over

    def note_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Pass the *metrics* of a validation after the current step to early stopping."""
        if self.early_stopping is not None:
            self.early_stopping.note(self.step, metrics)

    def note_finite(self, is_finite: bool) -> bool:
        """Count a step by whether its loss and gradient norm are finite. Returns whether the run has to stop.

        Nothing is counted without ``stop_after_nonfinite_steps``.
        """
        limit = self.cadence.stop_after_nonfinite_steps
        if limit is None:
            return False
        self.nonfinite_steps = 0 if is_finite else self.nonfinite_steps + 1
        return self.nonfinite_steps >= limit

    @property
    def unsaved(self) -> bool:
        """Whether steps were completed since the last save of this session or the checkpoint that was resumed from."""
        return self.step != self._saved_step

    def start_step(self) -> None:
        """Start to measure the duration of a step. Optional. It makes :meth:`time_is_up` more precise."""
        self._step_start = self._clock()

    @property
    def stops_after(self) -> int:
        """The last step of the run if a signal arrives now: the step in progress, or the last completed one."""
        return self.step + 1 if self.is_in_step else self.step

    def finish_step(
        self, *, epoch: int, epochs_done: int, num_samples: int, num_tokens: int
    ) -> Due:
        """Count one optimizer step on a global batch of *epoch*, and return what is due by the counters.

        *epochs_done* is the number of complete epochs. :meth:`apply_clock` adds what is due by the clock.
        """
        self._epoch_ended = epochs_done > self.epochs_done
        self.is_in_step = False
        self._clock_is_known = False
        self.step += 1
        self.epoch = epoch
        self.epochs_done = epochs_done
        self.consumed_samples += num_samples
        self.consumed_tokens += num_tokens
        if self._step_start is not None:
            seconds = self._clock() - self._step_start
            self._longest_step_seconds = max(self._longest_step_seconds, seconds)
            if self._auto is not None:
                self._auto.note_step(seconds)
        return self._due(ClockReading(), stop=False)

    def read_clock(self) -> ClockReading:
        """This rank's clock after the newest step."""
        now = self._clock()
        return ClockReading(
            self._elapsed_before + now - self._session_start,
            self._save_is_wanted(now),
            self._time_is_up(now),
        )

    def apply_new_clock(self, control: Control) -> Due | None:
        """Return what is due after the newest step by what all ranks agreed on.

        Returns None when the clock of the step was known before.
        """
        if self._clock_is_known:
            return None
        return self.apply_clock(control.clock, stop=control.stop)

    def apply_clock(self, clock: ClockReading, *, stop: bool) -> Due:
        """Return what is due after the newest step, by counters and by the *clock* of rank 0.

        *stop* is whether a signal requested a stop.
        """
        self._clock_is_known = True
        self.elapsed_seconds = clock.elapsed_seconds
        self.ended_early = self.ran_out_of_time = clock.time_is_up
        due = self._due(clock, stop=stop)
        if due.anything:
            # Also if the ranks had begun to agree on the next step: they agree again after what is due.
            self.is_in_step = False
        return due

    def _due(self, clock: ClockReading, *, stop: bool) -> Due:
        cadence, step = self.cadence, self.step
        last = clock.time_is_up or self._has_reached_limit
        by_epochs = self._epoch_ended and divides(cadence.ckpt_every_epochs, self.epochs_done)
        by_steps = divides(cadence.ckpt_every_steps, step)
        save = last or clock.save_is_wanted or by_steps or by_epochs
        # Saved steps are also validated.
        validate = save or divides(cadence.val_every_steps, step)
        benchmarks = last or any(divides(every, step) for every in cadence.bench_every_steps)
        due = Due(
            validate and cadence.has_validation,
            save,
            last,
            stop,
            benchmarks and cadence.has_benchmarks,
        )
        self.validation_is_due, self.save_was_due = due.validate, due.save
        self.benchmarks_are_due = due.benchmarks
        return due

    def end_early(self) -> None:
        """Make the current step the last one, because the data ended earlier than expected."""
        self.ended_early = True
        self.benchmarks_are_due = self.cadence.has_benchmarks

    def reason_of_end(self) -> str:
        """A sentence about what ended the run. Call it when :meth:`is_finished` is true."""
        num_epochs, max_steps = self.cadence.num_epochs, self.cadence.max_steps
        if max_steps is not None and self.step >= max_steps:
            return f"max_steps {max_steps} ended the run"
        of_steps = f" of max_steps {max_steps}" if max_steps is not None else ""
        if num_epochs is not None and self.epochs_done >= num_epochs:
            return f"num_epochs {num_epochs} ended the run at step {self.step}{of_steps}"
        if self.early_stopping is not None and self.early_stopping.is_over:
            return f"{self.early_stopping.reason()}: the run ended at step {self.step}{of_steps}"
        if self.ran_out_of_time:
            limit = f"max_time ({self.cadence.max_time_seconds:g} s)"
            return f"{limit} ended the run at step {self.step}{of_steps}; the same command continues it"
        return f"no full batch is left of num_epochs {num_epochs}: the run ended at step {self.step}{of_steps}"

    def benchmark_is_due(self, every_steps: int | None) -> bool:
        """Whether a benchmark with this interval is due after the current step, or because the run ends."""
        return self.is_finished() or divides(every_steps, self.step)

    def note_save(self, seconds: float) -> None:
        """Record that the current step is saved, which took *seconds* including its validation."""
        self._saved_step = self.step
        self.note_attempt()
        self._longest_save_seconds = max(self._longest_save_seconds, seconds)

    def note_attempt(self) -> None:
        """Record that a save was tried: if it failed, the next one is due as long after it as after a successful one.

        Otherwise, with a full disk, the run would validate and try to save after every step.
        """
        self._attempted_step = self.step
        self._attempt_time = self._clock()

    def note_published(self, stall_seconds: float, total_seconds: float) -> str | None:
        """Record how long a save paused training, and how long it took until its checkpoint was published.

        Called on rank 0, perhaps by another thread. Returns the reason for a new interval between saves, if the run
        chooses it, or None.
        """
        self._longest_save_seconds = max(self._longest_save_seconds, total_seconds)
        if self._auto is None:
            return None
        return self._auto.note_save(stall_seconds, total_seconds)

    def note_lost_save(self) -> None:
        """Record that the save of the last :meth:`note_save` failed afterwards."""
        # No step has this number, so the current one counts as unsaved.
        self._saved_step = -1

    def _save_is_wanted(self, now: float) -> bool:
        """Whether a save is due by time, or by the interval that the run has chosen, after the newest step.

        By this rank's clock, ``ckpt_every_minutes`` after the last save. Failed saves count like successful ones.
        """
        minutes = self.cadence.ckpt_every_minutes
        if minutes is not None and now - self._attempt_time >= 60 * minutes:
            return True
        return self._auto is not None and self.step - self._attempted_step >= self._auto.steps

    def _time_is_up(self, now: float) -> bool:
        """Whether ``max_time`` may not suffice for one more step and two saves, by this rank's clock."""
        limit = self.cadence.max_time_seconds
        # Two saves: the step that ends now may have to be saved, and the next one, too.
        ahead = self._longest_step_seconds + 2 * self._longest_save_seconds
        return limit is not None and now - self._session_start + ahead >= limit

    def state_dict(self) -> dict[str, Any]:
        # Not ended_early and ran_out_of_time: max_time limits one start, and the same command
        # continues.
        names = [*_COUNTERS, "elapsed_seconds", "planned_steps", "best", "validation_is_due"]
        names.append("save_was_due")
        if self.cadence.stop_after_nonfinite_steps is not None:
            names.append("nonfinite_steps")
        if self.cadence.has_benchmarks:
            names.append("benchmarks_are_due")
        state = {name: getattr(self, name) for name in names}
        return state | {name: rule.state_dict() for name, rule in self._rules.items()}

    @property
    def _rules(self) -> dict[str, EarlyStopping | SpikeDetector]:
        """What follows the rules of the recipe and has state."""
        rules = {"early_stopping": self.early_stopping, "spikes": self.spikes}
        return {name: rule for name, rule in rules.items() if rule is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters of a checkpoint. ``planned_steps`` keeps the value of this run.

        Raises :class:`CheckpointUnusable` for impossible values.
        """
        _check_plausible(state)
        self.planned_before = state["planned_steps"]
        for name in (*_COUNTERS, "elapsed_seconds", "best"):
            setattr(self, name, state[name])
        # Checkpoints written before 2026-11-21 contain neither.
        was_due = bool(state.get("validation_is_due", False))
        self.validation_is_due = was_due and self.cadence.has_validation
        self.save_was_due = state.get("save_was_due", was_due)
        self.nonfinite_steps = state.get("nonfinite_steps", 0)
        was_due = bool(state.get("benchmarks_are_due", False))
        self.benchmarks_are_due = was_due and self.cadence.has_benchmarks
        for name, rule in self._rules.items():
            if name in state:
                rule.load_state_dict(state[name])
        # For a run that goes back: the clock decides again after the next step.
        self.ended_early = self.ran_out_of_time = False
        # Subtracts the start-up of this session, so that it does not count as training time.
        self._elapsed_before = self.elapsed_seconds - (self._clock() - self._session_start)
        self._saved_step = self.step
        self._attempted_step = self.step
