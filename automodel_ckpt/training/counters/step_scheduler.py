"""The counters of a run, which checkpoints contain, and what is due by them and by the clock.

Steps are optimizer steps and count from 1. Epochs count from 0. A step that ends an epoch belongs to that epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.config.keys.monitoring import HarnessConfig
from automodel_ckpt.config.keys.ranks_and_steps import StepSchedulerConfig
from automodel_ckpt.training.counters.rules import (
    AutoInterval,
    EarlyStopping,
    SpikeDetector,
    StoppingRule,
    check_saved,
    is_count,
    is_number,
)
from automodel_ckpt.training.values.records import ClockReading, Control


@dataclass(frozen=True)
class Due:
    """The actions after a step, in this order: validate, run the benchmark, save, end. With *stop* (a signal), none of
    them is due."""

    validate: bool
    save: bool
    last: bool
    stop: bool
    benchmark: bool = False

    @property
    def anything(self) -> bool:
        """Whether there is anything to do before the next step."""
        return self.stop or self.validate or self.benchmark or self.save or self.last


def total_steps(settings: StepSchedulerConfig, steps_per_epoch: int | None) -> int | None:
    """The number of steps of the run. Returns None when it depends on a stream (*steps_per_epoch* is None)."""
    limits = [] if settings.max_steps is None else [settings.max_steps]
    num_epochs = settings.effective_num_epochs
    if num_epochs is not None and steps_per_epoch is not None:
        limits.append(num_epochs * steps_per_epoch)
    return min(limits, default=None)


def planned_end(settings: StepSchedulerConfig, steps_per_epoch: int | None) -> str:
    """A sentence about what will end the run. *steps_per_epoch* is None for a stream."""
    limits, num_epochs = [], settings.effective_num_epochs
    if settings.max_steps is not None:
        limits.append(f"max_steps {settings.max_steps}")
    if num_epochs is not None:
        last = "" if steps_per_epoch is None else f" (step {num_epochs * steps_per_epoch})"
        limits.append(f"num_epochs {num_epochs}{last}")
    if settings.max_time_seconds:
        limits.append(f"max_time ({settings.max_time_seconds:g} s)")
    first = ", whichever comes first" if len(limits) > 1 else ""
    return f"{' or '.join(limits)} will end the run{first}"


def divides(every: int | None, count: int) -> bool:
    """Whether an interval ends at *count*. None is no interval."""
    return every is not None and count % every == 0


_COUNTERS = ("step", "epoch", "epochs_done", "consumed_samples", "consumed_tokens")


def _check_plausible(state: Values) -> None:
    """Validate the values of a saved state, which may come from an untrusted file."""
    # Only a run that counts them has the second.
    counts = [*(state[name] for name in _COUNTERS), state.get("nonfinite_steps", 0)]
    is_valid = all(map(is_count, counts)) and is_number(state["elapsed_seconds"])
    check_saved(is_valid and (state["best"] is None or is_number(state["best"])), state)


class StepScheduler:
    """The counters of a run, which each checkpoint contains, and the decisions that depend on them.

    Clocks differ between ranks. After a step, :meth:`finish_step` decides what follows from counters.
    :meth:`apply_clock` decides what follows from :meth:`read_clock` of rank 0. All ranks pass that reading to it, so
    that all have the same state.
    """

    saves_for_epoch = False
    """Whether the current step is saved only because an epoch ends with it."""

    def __init__(
        self,
        settings: StepSchedulerConfig,
        *,
        planned_steps: int | None = None,
        has_validation: bool = False,
        benchmark: HarnessConfig | None = None,
        stopping_rule: StoppingRule | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*settings* is the section ``step_scheduler``. *stopping_rule* is its ``early_stopping`` with the metric."""
        self.settings, self.num_epochs = settings, settings.effective_num_epochs
        self._max_time_seconds = settings.max_time_seconds
        self.has_validation = has_validation
        self._benchmark = benchmark
        self.planned_steps = planned_steps
        self.planned_before = planned_steps
        self.step = self.epoch = self.epochs_done = 0
        self.consumed_samples = self.consumed_tokens = 0
        self.elapsed_seconds = 0.0
        self.best: float | None = None
        """The best metric so far."""
        self.ended_early = False
        self.ran_out_of_time = False
        self.validation_is_due = False
        """Whether the current step is to be validated after a resume, because a signal had prevented it."""
        self.benchmark_is_due = False
        self.save_was_due = False
        self.nonfinite_steps = 0
        """Consecutive steps, up to the newest one, with a loss or gradient norm that was not finite, if counted."""
        self.early_stopping = None if stopping_rule is None else EarlyStopping(stopping_rule)
        self.spikes = None if settings.on_spike is None else SpikeDetector(settings.on_spike)
        self._auto: AutoInterval | None = None
        if settings.ckpt_every_steps == "auto":
            self._auto = AutoInterval(3600 * settings.mtbf_hours)
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
        self.clock_is_known = True
        """Whether the clock of rank 0 after the newest step is known: false from finish_step() to apply_clock()."""
        self._longest_step_seconds = 0.0
        self._longest_save_seconds = 0.0

    def is_finished(self) -> bool:
        """Whether the run has no further step."""
        return self.ended_early or self.has_stopped_improving or self._has_reached_limit

    @property
    def _has_reached_limit(self) -> bool:
        max_steps, num_epochs = self.settings.max_steps, self.num_epochs
        if max_steps is not None and self.step >= max_steps:
            return True
        return num_epochs is not None and self.epochs_done >= num_epochs

    @property
    def has_stopped_improving(self) -> bool:
        """Whether early stopping ends the run."""
        return self.early_stopping is not None and self.early_stopping.is_over

    def note_metrics(self, metrics: Values) -> None:
        """Pass the *metrics* of a validation after the current step to early stopping."""
        if self.early_stopping is not None:
            self.early_stopping.note(self.step, metrics)

    def note_finite(self, is_finite: bool) -> bool:
        """Count a step by whether its loss and gradient norm are finite. Returns whether the run has to stop.

        Nothing is counted without ``stop_after_nonfinite_steps``.
        """
        limit = self.settings.stop_after_nonfinite_steps
        if limit is None:
            return False
        self.nonfinite_steps = 0 if is_finite else self.nonfinite_steps + 1
        return self.nonfinite_steps >= limit

    @property
    def unsaved(self) -> bool:
        """Whether steps were completed since the last save of this session or the checkpoint that was resumed from."""
        return self.step != self._saved_step

    def start_step(self) -> None:
        """Start to measure the duration of a step. Optional. It makes the end by ``max_time`` more precise."""
        self._step_start = self._clock()

    def finish_step(
        self, *, epoch: int, epochs_done: int, num_samples: int, num_tokens: int
    ) -> Due:
        """Count one optimizer step on a global batch of *epoch*, and return what is due by the counters.

        *epochs_done* is the number of complete epochs. :meth:`apply_clock` adds what is due by the clock.
        """
        self._epoch_ended = epochs_done > self.epochs_done
        self.is_in_step = False
        self.clock_is_known = False
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
        settings, now = self.settings, self._clock()
        minutes, limit = settings.ckpt_every_minutes, self._max_time_seconds
        # Failed saves count like successful ones.
        save_is_wanted = minutes is not None and now - self._attempt_time >= 60 * minutes
        if self._auto is not None:
            save_is_wanted |= self.step - self._attempted_step >= self._auto.steps
        # One more step and two saves: the step that ends now may have to be saved, and the next one, too.
        ahead = self._longest_step_seconds + 2 * self._longest_save_seconds
        seconds = now - self._session_start
        time_is_up = limit is not None and seconds + ahead >= limit
        return ClockReading(self._elapsed_before + seconds, save_is_wanted, time_is_up)

    def apply_new_clock(self, control: Control) -> Due | None:
        """Return what is due after the newest step by what all ranks agreed on.

        Returns None when the clock of the step was known before.
        """
        if self.clock_is_known:
            return None
        return self.apply_clock(control.clock, stop=control.stop)

    def apply_clock(self, clock: ClockReading, *, stop: bool) -> Due:
        """Return what is due after the newest step, by counters and by the *clock* of rank 0.

        *stop* is whether a signal requested a stop.
        """
        self.clock_is_known = True
        self.elapsed_seconds = clock.elapsed_seconds
        self.ended_early = self.ran_out_of_time = clock.time_is_up
        due = self._due(clock, stop=stop)
        if due.anything:
            # Also if the ranks had begun to agree on the next step: they agree again after what is due.
            self.is_in_step = False
        return due

    def _due(self, clock: ClockReading, *, stop: bool) -> Due:
        settings, step = self.settings, self.step
        last = clock.time_is_up or self._has_reached_limit
        by_epochs = self._epoch_ended and divides(settings.ckpt_every_epochs, self.epochs_done)
        every_steps = settings.ckpt_every_steps
        by_steps = every_steps != "auto" and divides(every_steps, step)
        save = last or clock.save_is_wanted or by_steps or by_epochs
        self.saves_for_epoch = by_epochs and not (last or clock.save_is_wanted or by_steps)
        # Saved steps are also validated, except on request: it must not delay the save, or count for early stopping.
        validate = save or divides(settings.val_every_steps, step)
        due = Due(
            validate and self.has_validation,
            save or clock.save_is_requested,
            last,
            stop,
            self._benchmark is not None and (last or divides(self._benchmark.every_steps, step)),
        )
        self.validation_is_due, self.save_was_due = due.validate, due.save
        self.benchmark_is_due = due.benchmark
        return due

    def end_early(self) -> None:
        """Make the current step the last one, because the data ended earlier than expected."""
        self.ended_early = True
        self.benchmark_is_due = self._benchmark is not None

    def benchmark_is_wanted(self) -> bool:
        """Whether the benchmark is run after the current step by its interval, or because the run ends."""
        every_steps = None if self._benchmark is None else self._benchmark.every_steps
        return self.is_finished() or divides(every_steps, self.step)

    def reason_of_end(self) -> str:
        """A sentence about what ended the run. Call it when :meth:`is_finished` is true."""
        num_epochs, max_steps = self.num_epochs, self.settings.max_steps
        if max_steps is not None and self.step >= max_steps:
            return f"max_steps {max_steps} ended the run"
        of_steps = f" of max_steps {max_steps}" if max_steps is not None else ""
        if num_epochs is not None and self.epochs_done >= num_epochs:
            return f"num_epochs {num_epochs} ended the run at step {self.step}{of_steps}"
        if self.early_stopping is not None and self.early_stopping.is_over:
            return f"{self.early_stopping.reason()}: the run ended at step {self.step}{of_steps}"
        if self.ran_out_of_time:
            limit = f"max_time ({self._max_time_seconds:g} s)"
            return f"{limit} ended the run at step {self.step}{of_steps}; the same command continues it"
        return f"no full batch is left of num_epochs {num_epochs}: the run ended at step {self.step}{of_steps}"

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

    def state_dict(self) -> ValueDict:
        # Not ended_early and ran_out_of_time: max_time limits one start, and the same command
        # continues.
        names = [*_COUNTERS, "elapsed_seconds", "planned_steps", "best", "validation_is_due"]
        names.append("save_was_due")
        if self.settings.stop_after_nonfinite_steps is not None:
            names.append("nonfinite_steps")
        state = {name: getattr(self, name) for name in names}
        if self._benchmark is not None:
            state["benchmarks_are_due"] = self.benchmark_is_due
        return state | {name: rule.state_dict() for name, rule in self._rules.items()}

    @property
    def _rules(self) -> dict[str, EarlyStopping | SpikeDetector]:
        """What follows the rules of the recipe and has state."""
        rules = {"early_stopping": self.early_stopping, "spikes": self.spikes}
        return {name: rule for name, rule in rules.items() if rule is not None}

    def load_state_dict(self, state: Values) -> None:
        """Restore the counters of a checkpoint. ``planned_steps`` keeps the value of this run.

        Raises :class:`CheckpointUnusable` for impossible values.
        """
        _check_plausible(state)
        self.planned_before = state["planned_steps"]
        for name in (*_COUNTERS, "elapsed_seconds", "best"):
            setattr(self, name, state[name])
        self.validation_is_due = bool(state["validation_is_due"]) and self.has_validation
        self.save_was_due = bool(state["save_was_due"])
        self.nonfinite_steps = state.get("nonfinite_steps", 0)
        was_due = bool(state.get("benchmarks_are_due", False))
        self.benchmark_is_due = was_due and self._benchmark is not None
        for name, rule in self._rules.items():
            if name in state:
                rule.load_state_dict(state[name])
        # For a run that goes back: the clock decides again after the next step.
        self.ended_early = self.ran_out_of_time = False
        # Subtracts the start-up of this session, so that it does not count as training time.
        self._elapsed_before = self.elapsed_seconds - (self._clock() - self._session_start)
        self._saved_step = self.step
        self._attempted_step = self.step
