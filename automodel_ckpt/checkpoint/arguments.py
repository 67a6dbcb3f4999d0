"""Checks of what a program passes to :class:`~automodel_ckpt.checkpoint.checkpointer.Checkpointer`."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from automodel_ckpt.checkpoint.discovery import is_stateful
from automodel_ckpt.errors import RecipeError

_SAVE = "Checkpointer.save"


def check_state(state: object, where: str = _SAVE) -> None:
    """Raise :class:`RecipeError` unless *state* is a mapping from names to objects with state, and has any.

    Without an error, a checkpoint of nothing would be published. *where* is the method that got it.
    """
    example = '{"model": model, "optimizer": optimizer}'
    if not isinstance(state, Mapping) or not state:
        raise RecipeError(
            "the state must be a mapping from names to objects",
            where=where,
            value=f"an empty {type(state).__name__}" if not state else type(state).__name__,
            hint=f"pass {example}",
        )
    for name, value in state.items():
        if is_stateful(value):
            continue
        hint = "leave it out, or give it these methods; progress= takes plain numbers"
        if isinstance(value, Mapping):
            hint = f"pass the object itself, not its state_dict(): {example}"
        raise RecipeError(
            "an object of the state has no state_dict() and load_state_dict()",
            where=f"{where}, {name!r}",
            value=type(value).__name__,
            hint=hint,
        )


def count(name: str, value: Any) -> int:
    """Return *value*, the argument *name*, as a number from 0. Raises :class:`RecipeError` if it is none."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        hint = "pass a whole number from 0"
        raise RecipeError(f"{name} must be a count", where=_SAVE, value=repr(value), hint=hint)
    return number


def plain_numbers(argument: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return *numbers* with tensors and NumPy numbers as numbers of Python; *argument* is their name in messages.

    Raises :class:`RecipeError` for a tensor of several elements.
    """
    plain: dict[str, Any] = {}
    for name, value in numbers.items():
        plain[name] = value
        if callable(item := getattr(value, "item", None)):
            try:
                plain[name] = item()
            except (RuntimeError, ValueError) as error:
                raise RecipeError(
                    "a number has several elements",
                    where=f"{_SAVE}, {argument}[{name!r}]",
                    value=f"{type(value).__name__} of shape {list(value.shape)}",
                    hint="pass its mean or sum",
                ) from error
    return plain
