"""Arguments that several builders of data sets have, and their checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.errors import RecipeError


class RowOptions(TypedDict, total=False):
    """Which rows a builder reads, and when. :data:`ROW_DEFAULTS` has the defaults."""

    max_samples: int | None
    name: str | None
    split: str
    revision: str | None
    streaming: bool
    shuffle_block: int


ROW_DEFAULTS = RowOptions(
    max_samples=None, name=None, split="train", revision=None, streaming=False, shuffle_block=1000
)


def at_most(max_samples: int | None, num_samples: int) -> int:
    """Return the smaller of both numbers; None is no limit. Raises :class:`RecipeError` if *max_samples* is below 1."""
    if max_samples is None:
        return num_samples
    require_range("max_samples", max_samples, 1)
    return min(num_samples, max_samples)


def require_range(
    name: str, value: float, least: float, most: float = math.inf, *, section: str = "dataset"
) -> None:
    """Raise :class:`RecipeError` unless *value*, the argument *name*, is from *least* to *most*."""
    if least <= value <= most and math.isfinite(value):
        return
    bounds = f"{least} or more" if most == math.inf else f"from {least} to {most}"
    raise RecipeError(
        f"{name} is out of range", where=f"{section}.{name}", value=value, hint=f"give {bounds}"
    )


def require_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """Return *tokenizer*; raise :class:`RecipeError` if it is None."""
    if tokenizer is None:
        raise RecipeError(
            "text data requires a tokenizer, but the recipe has none",
            where="tokenizer",
            value="none",
            hint="set tokenizer.from_pretrained to a directory or Hub name; "
            "only model.from_pretrained provides one, not a model with _target_ or from_config",
        )
    return tokenizer


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise :class:`RecipeError` unless *value*, the data set's argument *name*, is one of *choices*."""
    if value not in choices:
        what = f"unknown value for {name}"
        raise RecipeError(
            what, where=f"dataset.{name}", value=value, hint=f"use one of: {', '.join(choices)}"
        )
