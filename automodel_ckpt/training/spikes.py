"""Spikes of the loss or the gradient norm: when a step is one, and how many batches a run that goes back leaves out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from automodel_ckpt.errors import CheckpointUnusable


@dataclass(frozen=True, slots=True)
class SpikeRule:
    """A step is a spike if its loss or gradient norm is not finite, or exceeds the median of the last *window* steps.

    The limit is *loss_factor* or *grad_norm_factor* times the median; None: no limit. The run then goes back by
    *rollback* steps and leaves out the next *skip* batches. It ends after *max_rollbacks*.
    """

    loss_factor: float | None
    grad_norm_factor: float | None
    window: int
    rollback: int
    skip: int
    max_rollbacks: int


@dataclass(frozen=True, slots=True)
class Spike:
    """The step that was a spike, and why, in words."""

    step: int
    reason: str


class SpikeDetector:
    """The losses and gradient norms of the last steps, and what follows a spike. Checkpoints contain all of it.

    Decisions depend on the stored values only, so that a run which is killed and resumed makes the same ones.
    """

    def __init__(self, rule: SpikeRule) -> None:
        self.rule = rule
        self.num_rollbacks = 0
        self.skip_after: int | None = None
        """The step after which ``rule.skip`` batches are left out; None if none are."""
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
            if len(values) == rule.window and value > factor * median(values):
                return Spike(
                    step,
                    f"the {name} {value:.4g} is above {factor:g} times the median {median(values):.4g} "
                    f"of {rule.window} steps",
                )
        # Without a limit, a value may be infinite or NaN, which no checkpoint may contain.
        if rule.loss_factor is not None:
            self._losses.append(loss)
        if rule.grad_norm_factor is not None:
            self._grad_norms.append(grad_norm)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self._losses),
            "grad_norms": list(self._grad_norms),
            "num_rollbacks": self.num_rollbacks,
            "skip_after": self.skip_after,
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore what a checkpoint stored. Raises :class:`CheckpointUnusable` for impossible values."""
        _check_plausible(state)
        self.num_rollbacks = state["num_rollbacks"]
        self.skip_after = state["skip_after"]
        self._losses = deque(state["losses"], self.rule.window)
        self._grad_norms = deque(state["grad_norms"], self.rule.window)


def _check_plausible(state: Any) -> None:
    """Validate a saved state, which may come from an untrusted file."""
    is_valid = isinstance(state, Mapping)
    for name in ("losses", "grad_norms"):
        values = state.get(name) if is_valid else None
        is_valid = isinstance(values, list) and all(_is_number(value) for value in values)
    for name in ("num_rollbacks", "skip_after"):
        count = state.get(name) if is_valid else None
        # Not isinstance, which accepts booleans.
        is_count = type(count) is int and 0 <= count < 2**53
        is_valid = is_valid and (is_count or (name == "skip_after" and count is None))
    if not is_valid:
        raise CheckpointUnusable(
            "the saved state of step_scheduler.on_spike is invalid",
            where="step_scheduler",
            value=str(state)[:200],
            hint="resume from another checkpoint (checkpoint.restore_from)",
        )


def _is_number(value: object) -> bool:
    return type(value) is float and math.isfinite(value)
