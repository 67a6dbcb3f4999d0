"""Spikes of the loss or the gradient norm: when a step is one, and how many batches a run that goes back leaves out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from automodel_ckpt.config.keys.step_scheduler import OnSpikeConfig
from automodel_ckpt.training.counters.cadence import check_saved, is_count, is_number


@dataclass(frozen=True, slots=True)
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
        self._left_out: list[int] = []
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
        self._left_out = sorted({*self._left_out, *before})
        number = step + 1
        for each in self._left_out:
            # The batches of earlier steps are the ones that are not left out.
            number += each <= number
        for _ in range(self._num_to_skip):
            while number in self._left_out:
                number += 1
            self._left_out.append(number)
        self._left_out.sort()
        return self._num_to_skip

    def num_to_skip(self, step: int) -> int:
        """How many batches are left out next, if the newest step is *step*."""
        number = step + self.num_skipped + 1
        count = 0
        while number + count in self._left_out:
            count += 1
        return count

    def left_out(self) -> tuple[int, ...]:
        """The numbers of the batches that are left out, for :meth:`leave_out`."""
        return tuple(self._left_out)

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self._losses),
            "grad_norms": list(self._grad_norms),
            "num_rollbacks": self.num_rollbacks,
            "num_skipped": self.num_skipped,
            "left_out": list(self._left_out),
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore what a checkpoint stored. Raises :class:`CheckpointUnusable` for impossible values."""
        _check_plausible(state)
        self.num_rollbacks = state["num_rollbacks"]
        self.num_skipped = state.get("num_skipped", 0)
        self._left_out = sorted(state.get("left_out", ()))
        # Checkpoints written before 2026-11-25 contain the step after which batches are to be left out.
        if state.get("skip_after") is not None:
            self.leave_out(state["skip_after"])
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
        values = state.get(name, []) if is_valid else None
        is_valid = isinstance(values, list) and all(map(is_one, values))
    for name in ("num_rollbacks", "num_skipped"):
        is_valid = is_valid and is_count(state.get(name, 0))
    is_valid = is_valid and (state.get("skip_after") is None or is_count(state["skip_after"]))
    check_saved(is_valid and {"losses", "grad_norms", "num_rollbacks"} <= state.keys(), state)
