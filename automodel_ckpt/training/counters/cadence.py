"""When to validate, save and end: pure functions over counters.

Steps are optimizer steps and count from 1. Epochs count from 0. A step that ends an epoch belongs to that epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.errors import CheckpointUnusable


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


def run_is_over(cadence: Cadence, step: int, epochs_done: int) -> bool:
    """Whether the run is complete after *step* steps and *epochs_done* complete epochs."""
    if cadence.max_steps is not None and step >= cadence.max_steps:
        return True
    return cadence.num_epochs is not None and epochs_done >= cadence.num_epochs


def due_after(
    cadence: Cadence,
    step: int,
    epochs_done: int,
    *,
    epoch_ended: bool,
    save_is_wanted: bool = False,
    time_is_up: bool = False,
    stop: bool = False,
) -> Due:
    """What is due after *step*; *epochs_done* includes an epoch that the step ended. Saved steps are also validated."""
    last = time_is_up or run_is_over(cadence, step, epochs_done)
    by_steps = divides(cadence.ckpt_every_steps, step)
    by_epochs = epoch_ended and divides(cadence.ckpt_every_epochs, epochs_done)
    save = last or save_is_wanted or by_steps or by_epochs
    validate = save or divides(cadence.val_every_steps, step)
    benchmarks = last or any(divides(every, step) for every in cadence.bench_every_steps)
    return Due(
        validate and cadence.has_validation, save, last, stop, benchmarks and cadence.has_benchmarks
    )


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


def is_count(value: object) -> bool:
    """Whether a value is a whole number that ranks can sum in float64, which is exact below 2**53."""
    # Not isinstance, which accepts booleans.
    return type(value) is int and 0 <= value < 2**53


def is_number(value: object) -> bool:
    """Whether a value is a finite float."""
    return type(value) is float and math.isfinite(value)


def check_saved(is_valid: bool, state: object) -> None:
    """Raise :class:`CheckpointUnusable` for a *state* that is not valid."""
    if not is_valid:
        raise CheckpointUnusable(
            "the saved step counters are invalid",
            where="step_scheduler",
            value=ascii(state)[:200],
            hint="resume from another checkpoint (checkpoint.restore_from)",
        )
