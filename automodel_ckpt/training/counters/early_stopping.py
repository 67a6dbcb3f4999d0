"""Early stopping: end a run when its metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from automodel_ckpt.training.counters.cadence import check_saved, is_count, is_number


@dataclass(frozen=True, slots=True)
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

    def note(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Count a validation after *step* if it measured the metric. A value that is not finite improves nothing."""
        value = metrics.get(self.rule.metric)
        if value is None:
            return
        if self._improves(value):
            self.best, self.best_step = float(value), step
            self.num_without_improvement = 0
        else:
            self.num_without_improvement += 1

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.rule.mode == "min" else value - self.best
        return gain > self.rule.min_delta

    def reason(self) -> str:
        """Why the run ended, for the log."""
        rule = self.rule
        validations = "validation" if rule.patience == 1 else f"{rule.patience} validations"
        since = "was never finite"
        if self.best is not None:
            by = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
            since = f"did not improve{by} on {self.best:.6g} of step {self.best_step}"
        return f"early stopping: {rule.metric} {since} in the last {validations}"

    def state_dict(self) -> dict[str, Any]:
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
