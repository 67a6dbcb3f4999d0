"""Checks of saved counters, which may come from an untrusted file."""

from __future__ import annotations

import math

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
