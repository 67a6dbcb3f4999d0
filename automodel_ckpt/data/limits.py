"""How many of a data set's samples are used."""

from __future__ import annotations

from automodel_ckpt.errors import RecipeError


def at_most(max_samples: int | None, num_samples: int) -> int:
    """*num_samples*, or *max_samples* where that is less; :class:`RecipeError` where it is none at all."""
    if max_samples is None:
        return num_samples
    if max_samples < 1:
        what = "max_samples must be at least 1"
        raise RecipeError(
            what,
            where="dataset.max_samples",
            value=max_samples,
            hint="omit it to use all samples",
        )
    return min(num_samples, max_samples)
