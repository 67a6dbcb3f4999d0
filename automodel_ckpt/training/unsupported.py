"""Keys that a recipe class does not support, as one table for each class, and the check of a recipe file with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import Problem


@dataclass(frozen=True)
class Unsupported:
    """A key that a recipe does not support, and why. A key with a whole number as its value is supported up to 1."""

    key: str
    reason: str
    hint: str = ""
    """What to do instead; by default, to remove the key."""


def unsupported_keys(config: RecipeConfig, table: Iterable[Unsupported]) -> list[Problem]:
    """Describe each key of *table* that is set in *config*."""
    problems = []
    for row in table:
        value = _value_of(config, row.key)
        is_size = isinstance(value, int)
        if value is None or (is_size and value <= 1):
            continue
        what = f"the recipe {config.recipe} does not support {row.key}: {row.reason}"
        hint = row.hint or f"remove {row.key}"
        problems.append(Problem(what, row.key, _as_text(value), hint))
    return problems


def _value_of(config: RecipeConfig, key: str) -> Any:
    """The value of *key*. Returns None when a section of it is missing, or is another kind of section."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _as_text(value: Any) -> str:
    if isinstance(value, int | str):
        return str(value)
    return value._target_ if isinstance(value, Target) else "a section"


NEEDS_HEAD = Unsupported(
    "model._target_",
    "the head of the model depends on the recipe",
    "set model.from_pretrained or model.from_config",
)
NO_GENERATION = Unsupported(
    "generation",
    "a model with a classification head generates no text",
    "remove generation; name metrics of a validation_dataset instead",
)
WITH_HEAD = (
    NEEDS_HEAD,
    NO_GENERATION,
    Unsupported("packed_sequence", "a row has one label or score"),
    Unsupported("loss_fn", "the recipe's own section describes the loss"),
    Unsupported(
        "distributed.pp_size",
        "a model with a classification head cannot be divided into pipeline stages",
        "remove pp_size: fsdp2 shards the model over the same ranks",
    ),
    Unsupported(
        "distributed.cp_size",
        "the head needs complete rows, which context parallel ranks divide",
    ),
)
"""What recipes do not support that train a classification head instead of an output layer."""
