"""Choose how often to save (``ckpt_every_steps: auto``): the optimum for the measured cost of a save."""

from __future__ import annotations

import math

from automodel_ckpt.base.units import counted

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
        median = sorted(self._step_seconds)[len(self._step_seconds) // 2]
        step_seconds = max(median, 1e-6)
        best = best_interval_seconds(stall_seconds, self._mtbf_seconds)
        seconds = max(best, total_seconds)
        self.steps = max(1, round(seconds / step_seconds))
        if self._logged_steps:
            ratio = self.steps / self._logged_steps
            if 1 / _LOGGED_RATIO < ratio < _LOGGED_RATIO:
                return None
        self._logged_steps = self.steps
        return self._reasoning(step_seconds, stall_seconds, total_seconds, best)

    def _reasoning(self, step: float, stall: float, total: float, best: float) -> str:
        hours, limit = self._mtbf_seconds / 3600, ""
        if total > best:
            # A save waits for the one in progress, so that a shorter interval would only stall training.
            limit = f", but the next save waits for the {total:.3g} s that writing takes"
        steps = counted(self.steps, "step")
        return (
            f"saving every {steps}: a save stalls training for {stall:.3g} s, a step takes {step:.3g} s, "
            f"a failure is expected every {hours:.3g} hours; best is one every {best:.3g} s (Young/Daly){limit}"
        )
