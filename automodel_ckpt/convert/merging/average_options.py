"""The options of an average: which weights the sources have, and what the methods need. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from automodel_ckpt.base.units import counted
from automodel_ckpt.convert.merging.average_methods import METHODS, ema_weights
from automodel_ckpt.errors import RecipeError

Integers = Literal["equal", "first", "last"]
_DENSITY = {"ties": 0.2, "dare": 0.5}
_DEFAULTS = {"--scale": 1.0, "--seed": 0}


@dataclass(frozen=True, slots=True)
class AverageOptions:
    """How sources are combined.

    *weights* has one entry per source and is divided by its sum; None for equal weights. *ema* is the decay of an
    exponential moving average instead; the sources are then in the order of training. *base*, *density* (the share of
    elements that are kept, None for the method's default), *scale* and *seed* are used by the methods ``ties`` and
    ``dare``. *integers*: tensors that cannot be averaged (integers, bool, 8-bit floats) must be ``equal``, or are
    copied from the ``first`` or ``last`` source.
    """

    weights: Sequence[float] | None = None
    ema: float | None = None
    method: str = "linear"
    base: Path | None = None
    density: float | None = None
    scale: float = 1.0
    seed: int = 0
    integers: Integers = "equal"


def weights_of(options: AverageOptions, count: int) -> list[float]:
    """Return the weight of each source; they sum to 1. Raises :class:`RecipeError`."""
    if options.weights is not None and options.ema is not None:
        raise _invalid("weights and a moving average exclude each other", "--ema", options.ema)
    if options.ema is not None:
        if not 0 <= options.ema < 1:
            raise _invalid("the decay must be at least 0 and less than 1", "--ema", options.ema)
        return ema_weights(options.ema, count)
    weights = list(options.weights or [1.0] * count)
    if len(weights) != count:
        what = f"there must be one weight for each of the {count} sources"
        raise _invalid(what, "--weights", counted(len(weights), "weight"))
    total = math.fsum(weights)
    if not math.isfinite(total) or total <= 0 or min(weights) < 0:
        what = "weights must be finite and not negative, and at least one must be positive"
        raise _invalid(what, "--weights", weights)
    return [weight / total for weight in weights]


def check_options(options: AverageOptions, count: int) -> None:
    """Raise :class:`RecipeError` for options that contradict each other, or *count* sources that do not fit."""
    needs_base = METHODS[options.method].needs_base
    if count < 2 and not needs_base:
        raise _invalid("at least two checkpoints are needed", "SOURCE", f"{count} given")
    if options.method == "slerp" and count != 2:
        raise _invalid("slerp interpolates between exactly two checkpoints", "--method", count)
    if needs_base and options.base is None:
        what = f"{options.method} averages differences to a base model, which is missing"
        raise _invalid(what, "--base", "not given")
    unused: dict[str, object] = {}
    if not needs_base:
        unused |= {"--base": options.base, "--density": options.density, "--scale": options.scale}
    if options.method != "dare":
        unused["--seed"] = options.seed
    for flag, value in unused.items():
        if value not in (None, _DEFAULTS.get(flag)):
            raise _invalid(f"the method {options.method} does not use this option", flag, value)
    if options.density is not None and not 0 < options.density <= 1:
        what = "the density must be greater than 0 and at most 1"
        raise _invalid(what, "--density", options.density)
    if not math.isfinite(options.scale):
        raise _invalid("the scale must be a finite number", "--scale", options.scale)


def _invalid(what: str, where: str, value: object) -> RecipeError:
    return RecipeError(what, where=where, value=value, hint="`ckpt average --help` describes it")


def density_of(options: AverageOptions) -> float:
    """Return the share of elements that the methods ``ties`` and ``dare`` keep; 1 for other methods."""
    if options.density is not None:
        return options.density
    return _DENSITY.get(options.method, 1.0)
