"""What a callable accepts as keyword arguments."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection
from typing import Any

from automodel_ckpt.config.callables.trust import called_function

CALLED_WITH = {"loss_fn": "(logits, labels)", "dataloader.collate_fn": "(samples)"}
"""Section whose plug-in may be the function itself, not its builder -> the positional arguments of its calls."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a callable accepts as keyword arguments."""

    required: dict[str, bool]
    """Parameter -> whether it is required."""
    takes_any: bool
    """Whether it also accepts other keywords."""
    types: dict[str, Any]
    """Parameter -> type, for the parameters with an annotation that can be evaluated."""
    positional_only: list[str]
    """Required parameters that cannot be given as keywords."""

    def accepts(self, name: str) -> bool:
        return name in self.required or self.takes_any

    def missing(self, given: Collection[str]) -> list[str]:
        """Required parameters that are not *given*, without positional-only ones."""
        return [
            name for name, is_required in self.required.items() if is_required and name not in given
        ]


def signature_of(function: Callable[..., Any]) -> Signature:
    types = _types(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some builtins have no signature
        return Signature({}, True, types, [])
    required = {}
    positional_only = []
    takes_any = False
    for parameter in parameters:
        is_required = parameter.default is parameter.empty
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            required[parameter.name] = is_required
        elif typing.get_origin(types.get(parameter.name)) is typing.Unpack:
            options = typing.get_type_hints(*typing.get_args(types[parameter.name]))
            types |= options
            required |= dict.fromkeys(options, False)
        elif parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind is parameter.POSITIONAL_ONLY and is_required:
            positional_only.append(parameter.name)
    return Signature(required, takes_any, types, positional_only)


def _types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters, without those that cannot be evaluated."""
    annotated: Any = called_function(function)
    if isinstance(annotated, type):
        annotated = getattr(annotated, "__init__")  # noqa: B009
    elif not inspect.isroutine(annotated):
        annotated = type(annotated).__call__
    try:
        return typing.get_type_hints(annotated)
    except Exception:  # an annotation uses a name that is imported for type checkers only
        raw = getattr(annotated, "__annotations__", {})
        return {name: hint for name, hint in raw.items() if not isinstance(hint, str)}


def is_called_directly(key: str, function: Callable[..., Any], given: Collection[str]) -> bool:
    """Whether the plug-in of section *key* is the function that training calls, such as ``loss(logits, labels)``.

    *given* are its other arguments. A function that lacks no argument, and a class, build what training calls.
    """
    if key not in CALLED_WITH or not inspect.isroutine(function):
        return False
    count = CALLED_WITH[key].count(",") + 1
    signature = signature_of(function)
    parameters = [*signature.positional_only, *signature.required]
    missing = [*signature.positional_only, *signature.missing(given)]
    return len(missing) == count and missing == parameters[:count]
