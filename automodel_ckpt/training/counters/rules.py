"""Rules that metrics and losses start: early stopping, and the reaction to spikes of loss or gradient norm."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median, median_high
from typing import Any, Literal

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.config.keys.ranks_and_steps import OnSpikeConfig
from automodel_ckpt.errors import CheckpointUnusable


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


@dataclass(frozen=True)
class StoppingRule:
    """End the run after *patience* consecutive validations without an improvement of *metric*.

    A value improves the metric if it is better than the best one so far by more than *min_delta*. *mode* states whether
    a lower (min) or a higher (max) value is better.
    """

    metric: str
    mode: Literal["min", "max"]
    patience: int
    min_delta: float


class EarlyStopping:
    """The best value of a metric, and how many validations since then did not improve it. Checkpoints contain both."""

    def __init__(self, rule: StoppingRule) -> None:
        self.rule = rule
        self.best: float | None = None
        self.best_step = 0
        self.num_without_improvement = 0

    @property
    def is_over(self) -> bool:
        """Whether the rule ends the run. A resume with a higher patience continues it."""
        return self.num_without_improvement >= self.rule.patience

    def note(self, step: int, metrics: Values) -> None:
        """Count a validation after *step* if it measured the metric. A value that is not finite improves nothing."""
        value = metrics.get(self.rule.metric)
        if value is None:
            return
        gain = math.inf
        if self.best is not None:
            gain = self.best - value if self.rule.mode == "min" else value - self.best
        if math.isfinite(value) and gain > self.rule.min_delta:
            self.best, self.best_step = float(value), step
            self.num_without_improvement = 0
        else:
            self.num_without_improvement += 1

    def reason(self) -> str:
        """Why the run ended, for the log."""
        rule = self.rule
        validations = "validation" if rule.patience == 1 else f"{rule.patience} validations"
        since = "was never finite"
        if self.best is not None:
            by = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
            since = f"did not improve{by} on {self.best:.6g} of step {self.best_step}"
        return f"early stopping: {rule.metric} {since} in the last {validations}"

    def state_dict(self) -> ValueDict:
        return {
            "metric": self.rule.metric,
            "mode": self.rule.mode,
            "best": self.best,
            "best_step": self.best_step,
            "num_without_improvement": self.num_without_improvement,
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore what a checkpoint stored. Counting begins again if that was about another metric.

        Raises :class:`CheckpointUnusable` for impossible values.
        """
        is_valid = isinstance(state, dict) and all(
            isinstance(state.get(name), str) for name in ("metric", "mode")
        )
        counts = ("best_step", "num_without_improvement")
        is_valid = is_valid and all(is_count(state.get(name)) for name in counts)
        check_saved(is_valid and (state.get("best") is None or is_number(state["best"])), state)
        if (state["metric"], state["mode"]) != (self.rule.metric, self.rule.mode):
            return
        self.best = state["best"]
        self.best_step = state["best_step"]
        self.num_without_improvement = state["num_without_improvement"]


@dataclass(frozen=True)
class Spike:
    """The step that was a spike, and why, in words."""

    step: int
    reason: str


class SpikeDetector:
    """The losses and gradient norms of the last steps, and what follows a spike. Checkpoints contain all of it.

    The global batches are numbered from 1 in the order of the data. Those that are left out stay so when the run goes
    back again and repeats the steps around them: batches with damaged data are often neighbors. Decisions depend on the
    stored values only, so that a run which is killed and resumed makes the same ones.
    """

    def __init__(self, rule: OnSpikeConfig) -> None:
        """*rule* is the section ``step_scheduler.on_spike``.

        A median below zero, which some losses have, may be exceeded by factor - 1 times its size. A median of zero
        states no scale, so there is no limit.
        """
        self.rule = rule
        self._num_to_skip = rule.skip or rule.rollback
        self.num_rollbacks = 0
        self.num_skipped = 0
        """How many batches were left out before the present step."""
        self.left_out: list[int] = []
        """The numbers of all batches that are left out, in ascending order."""
        self._losses: deque[float] = deque(maxlen=rule.window)
        self._grad_norms: deque[float] = deque(maxlen=rule.window)

    def note(self, step: int, loss: float, grad_norm: float) -> Spike | None:
        """Add the values of *step*, or return that it is a spike. Limits apply once the window is full."""
        rule = self.rule
        for name, value, values, factor in (
            ("loss", loss, self._losses, rule.loss_factor),
            ("gradient norm", grad_norm, self._grad_norms, rule.grad_norm_factor),
        ):
            if factor is None:
                continue
            if not math.isfinite(value):
                return Spike(step, f"the {name} is {value}")
            if len(values) == rule.window and (limit := _exceeded(value, median(values), factor)):
                return Spike(
                    step, f"the {name} {value:.4g} is above {limit} of {rule.window} steps"
                )
        # Without a limit, a value may be infinite or NaN, which no checkpoint may contain.
        if rule.loss_factor is not None:
            self._losses.append(loss)
        if rule.grad_norm_factor is not None:
            self._grad_norms.append(grad_norm)
        return None

    def leave_out(self, step: int, before: Iterable[int] = ()) -> int:
        """Leave out the next batches after *step*, as many as the rule asks for. Returns their number.

        Those that are left out already are not among them: so are the batches *before*, which a checkpoint that was
        loaded does not contain yet.
        """
        self.left_out = sorted({*self.left_out, *before})
        number = step + 1
        for each in self.left_out:
            # The batches of earlier steps are the ones that are not left out.
            number += each <= number
        for _ in range(self._num_to_skip):
            while number in self.left_out:
                number += 1
            self.left_out.append(number)
        self.left_out.sort()
        return self._num_to_skip

    def num_to_skip(self, step: int) -> int:
        """How many batches are left out next, if the newest step is *step*."""
        number = step + self.num_skipped + 1
        count = 0
        while number + count in self.left_out:
            count += 1
        return count

    def state_dict(self) -> ValueDict:
        return {
            "losses": list(self._losses),
            "grad_norms": list(self._grad_norms),
            "num_rollbacks": self.num_rollbacks,
            "num_skipped": self.num_skipped,
            "left_out": list(self.left_out),
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore what a checkpoint stored. Raises :class:`CheckpointUnusable` for impossible values."""
        _check_plausible(state)
        self.num_rollbacks = state["num_rollbacks"]
        self.num_skipped = state["num_skipped"]
        self.left_out = sorted(state["left_out"])
        self._losses = deque(state["losses"], self.rule.window)
        self._grad_norms = deque(state["grad_norms"], self.rule.window)


def _exceeded(value: float, middle: float, factor: float) -> str:
    """The limit that *value* is above, in words. Empty if it is not. *middle* is the median of the values before."""
    if middle == 0:
        return ""
    # Twice a negative median is below it, so that an improvement would exceed it.
    limit = middle + (factor - 1) * abs(middle)
    if value <= limit:
        return ""
    if middle > 0:
        return f"{factor:g} times the median {middle:.4g}"
    return f"{limit:.4g}, the limit at the median {middle:.4g}"


def _check_plausible(state: Any) -> None:
    """Validate a saved state, which may come from an untrusted file."""
    is_valid = isinstance(state, Mapping)
    for name, is_one in (("losses", is_number), ("grad_norms", is_number), ("left_out", is_count)):
        values = state.get(name) if is_valid else None
        is_valid = isinstance(values, list) and all(map(is_one, values))
    for name in ("num_rollbacks", "num_skipped"):
        is_valid = is_valid and is_count(state.get(name))
    check_saved(is_valid, state)


FIRST_STEPS = 10
"""Steps before the first save. The cost of that save is then measured."""
# A new interval is logged if it differs from the logged one by more than this factor.
_LOGGED_RATIO = 1.25


def best_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds between saves that minimize the time lost to saves and to work repeated after failures.

    *cost_seconds* is how long a save stalls training, *mtbf_seconds* the mean time between failures. Source: J. T.
    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37, which
    refines J. W. Young's sqrt(2 x cost x MTBF), 1974.
    """
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = cost_seconds / (2 * mtbf_seconds)
    young = math.sqrt(2 * cost_seconds * mtbf_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


class AutoInterval:
    """The number of steps between saves, computed from the steps and saves since this start of the run.

    Only rank 0 has one. The other ranks receive its decision to save with the reduction of each step.
    """

    def __init__(self, mtbf_seconds: float) -> None:
        self.steps = FIRST_STEPS
        self._mtbf_seconds = mtbf_seconds
        self._step_seconds: list[float] = []
        self._logged_steps = 0

    def note_step(self, seconds: float) -> None:
        """Record the duration of a step, without saves and validations."""
        self._step_seconds = [*self._step_seconds[-99:], seconds]

    def note_save(self, stall_seconds: float, total_seconds: float) -> str | None:
        """Record how long a save stalled training, and after how many seconds its checkpoint was published.

        Returns the reasoning for the log if the interval changed noticeably; else None.
        """
        if not self._step_seconds:
            return None
        # Not the mean: the first step of a process is slow.
        step_seconds = max(median_high(self._step_seconds), 1e-6)
        best = best_interval_seconds(stall_seconds, self._mtbf_seconds)
        seconds = max(best, total_seconds)
        self.steps = max(1, round(seconds / step_seconds))
        if self._logged_steps:
            ratio = self.steps / self._logged_steps
            if 1 / _LOGGED_RATIO < ratio < _LOGGED_RATIO:
                return None
        self._logged_steps = self.steps
        limit = ""
        if total_seconds > best:
            # A save waits for the one in progress, so that a shorter interval would only stall training.
            limit = f", but the next save waits for the {total_seconds:.3g} s that writing takes"
        return (
            f"saving every {counted(self.steps, 'step')}: a save stalls training for {stall_seconds:.3g} s, a step "
            f"takes {step_seconds:.3g} s, a failure is expected every {self._mtbf_seconds / 3600:.3g} hours; best is "
            f"one every {best:.3g} s (Young/Daly){limit}"
        )
