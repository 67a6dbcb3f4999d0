"""How often to save when the recipe leaves it to the run: the optimum for what a save really costs."""

from __future__ import annotations

import math

FIRST_STEPS = 10
"""Steps before the first save, which is the first to be measured."""
_WORTH_SAYING = 1.25


def best_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """The time between saves that loses least to saves and to work done again after failures.

    *cost_seconds* is what one save keeps the training, *mtbf_seconds* the mean time between failures. Source: J. T.
    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37, which
    refines J. W. Young's sqrt(2 x cost x MTBF), 1974.
    """
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = cost_seconds / (2 * mtbf_seconds)
    young = math.sqrt(2 * cost_seconds * mtbf_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


class AutoInterval:
    """The number of steps between saves, from the steps and saves of this start of the run so far. On the leader only:
    its wish to save travels to the others."""

    def __init__(self, mtbf_seconds: float) -> None:
        self.steps = FIRST_STEPS
        self._mtbf_seconds = mtbf_seconds
        self._step_seconds: list[float] = []
        self._told = 0

    def note_step(self, seconds: float) -> None:
        """A step took so long, saves and validations not counted."""
        self._step_seconds = [*self._step_seconds[-99:], seconds]

    def note_save(self, stall_seconds: float, total_seconds: float) -> str | None:
        """A save kept the training so long, and was there after so long. Returns the reasoning where it is news."""
        if not self._step_seconds:
            return None
        step_seconds = max(sorted(self._step_seconds)[len(self._step_seconds) // 2], 1e-6)
        best = best_interval_seconds(stall_seconds, self._mtbf_seconds)
        seconds = max(best, total_seconds)
        self.steps = max(1, round(seconds / step_seconds))
        if self._told and 1 / _WORTH_SAYING < self.steps / self._told < _WORTH_SAYING:
            return None
        self._told = self.steps
        return self._reasoning(step_seconds, stall_seconds, total_seconds, best)

    def _reasoning(self, step: float, stall: float, total: float, best: float) -> str:
        hours, interval = self._mtbf_seconds / 3600, self.steps * step
        lost = stall / interval + interval / 2 / self._mtbf_seconds
        limit = (
            f", but the next save waits for the {total:.3g} s that writing takes"
            if total > best
            else ""
        )
        return (
            f"saving every {self.steps} steps: a save stalls training for {stall:.3g} s, a step takes {step:.3g} s, "
            f"a failure is expected every {hours:.3g} hours; best is one every {best:.3g} s (Young/Daly){limit}. "
            f"Saves, and work done again after failures, will take {100 * lost:.2g} % of the time"
        )
