"""The options of an average: the weights of its sources. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from automodel_ckpt.base.units import counted
from automodel_ckpt.errors import RecipeError

Integers = Literal["equal", "first", "last"]


@dataclass(frozen=True, slots=True)
class AverageOptions:
    """How sources are combined.

    *weights* has one entry per source and is divided by its sum. Without it, the weights are equal. *ema* is the decay
    of an exponential moving average instead; the sources are then in the order of training. *integers*: tensors that
    cannot be averaged (integers, bool, 8-bit floats) must be ``equal``, or are copied from the ``first`` or ``last``
    source.
    """

    weights: Sequence[float] | None = None
    ema: float | None = None
    integers: Integers = "equal"


def weights_of(options: AverageOptions, count: int) -> list[float]:
    """Return the weight of each of *count* sources; they sum to 1.

    Raises:
        RecipeError: The options contradict each other, or do not fit the number of sources.
    """
    if count < 2:
        raise _invalid("at least two checkpoints are needed", "SOURCE", f"{count} given")
    if options.weights is not None and options.ema is not None:
        raise _invalid("weights and a moving average exclude each other", "--ema", options.ema)
    if options.ema is not None:
        if not 0 <= options.ema < 1:
            raise _invalid("the decay must be at least 0 and less than 1", "--ema", options.ema)
        return _ema_weights(options.ema, count)
    weights = list(options.weights or [1.0] * count)
    if len(weights) != count:
        what = f"there must be one weight for each of the {count} sources"
        raise _invalid(what, "--weights", counted(len(weights), "weight"))
    total = math.fsum(weights)
    if not math.isfinite(total) or total <= 0 or min(weights) < 0:
        what = "weights must be finite and not negative, and at least one must be positive"
        raise _invalid(what, "--weights", weights)
    return [weight / total for weight in weights]


def _ema_weights(decay: float, count: int) -> list[float]:
    """Return the weights of m_1 = x_1, m_i = decay * m_(i-1) + (1 - decay) * x_i, the oldest first."""
    weights = [decay ** (count - 1)]
    for position in range(1, count):
        weights.append((1 - decay) * decay ** (count - 1 - position))
    return weights


def _invalid(what: str, where: str, value: object) -> RecipeError:
    return RecipeError(what, where=where, value=value, hint="`ckpt average --help` describes it")
