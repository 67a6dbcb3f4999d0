"""Call what ``_target_`` names: build the plug-ins of a recipe.

``trust.py`` decides which names are allowed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from automodel_ckpt.config.callables import allowlist
from automodel_ckpt.config.callables.allowlist import CUSTOM
from automodel_ckpt.config.callables.argument_values import argument_problem
from automodel_ckpt.config.callables.signatures import is_called_directly, signature_of
from automodel_ckpt.config.callables.trust import Rejected, Trust, is_within, resolve_entry
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import RecipeError

LIBRARIES = ("torch.optim", "torch.nn", "transformers", "datasets", "peft")
"""Libraries whose errors about arguments are reported as mistakes in the recipe."""
# Callables that check_targets has resolved.
_resolved: dict[str, Callable[..., Any]] = {}


def remember(name: str, function: Callable[..., Any]) -> None:
    """Note which callable *name* is, for :func:`build` in this process and in the ranks that are forked from it."""
    _resolved[name] = function


def build(target: Target, /, **supplied: Any) -> Any:
    """Call what a plug-in names. Plug-ins among its arguments are built first.

    An argument in ``supplied`` is passed if the callable has this parameter and the recipe does not set it.

    Raises:
        RecipeError: for a plug-in that :func:`check_targets` has not checked and that is not on the allowlist, for a
            required argument that is missing, and for arguments that a library's callable does not accept. Exceptions
            of user code are not converted.
    """
    function = callable_of(target)
    arguments = _arguments(target, function, supplied)
    for name in signature_of(function).missing(arguments):
        # The checks before the build do not know what a recipe supplies, only what some recipe does.
        verb = "are" if len(supplied) > 1 else "is"
        raise RecipeError(
            f"{name} is missing: {target._target_} requires it, and this recipe does not supply it",
            where=f"_target_: {target._target_}",
            value=f"{', '.join(supplied) or 'nothing'} {verb} supplied",
            hint="use a builder for this kind of training, or a recipe that supplies the argument",
        )
    try:
        return function(**arguments)
    except Exception as error:
        module = getattr(function, "__module__", None) or ""
        if not is_within(module, LIBRARIES):
            raise
        raise RecipeError(
            f"calling {target._target_} failed",
            where=f"_target_: {target._target_}",
            value=f"{type(error).__name__}: {error}",
            hint="correct the arguments of this section",
        ) from error


def build_function(key: str, target: Target, /, **supplied: Any) -> Any:
    """Return the function that training calls for section *key*: the plug-in itself, or what :func:`build` returns.

    The plug-in itself is returned with its other arguments (``functools.partial``).
    """
    function = callable_of(target)
    if not is_called_directly(key, function, {*target.kwargs, *supplied}):
        return build(target, **supplied)
    return functools.partial(function, **_arguments(target, function, supplied))


def _arguments(
    target: Target, function: Callable[..., Any], supplied: dict[str, Any]
) -> dict[str, Any]:
    """The keyword arguments of a plug-in, with what it takes of *supplied* and the recipe does not set."""
    accepted = signature_of(function).required
    # Defaults come first: a recipe may set trust_remote_code, which _remote_code has checked.
    arguments = {**allowlist.defaults(target._target_), **_built(target.kwargs, supplied)}
    for name, value in supplied.items():
        if name in accepted and name not in target.kwargs:
            arguments[name] = value
    return arguments


def callable_of(target: Target) -> Callable[..., Any]:
    """Return the class or function that a plug-in names. Raises :class:`RecipeError` if it is not allowed."""
    return _resolved.get(target._target_) or _allowed(target)


def _allowed(target: Target) -> Callable[..., Any]:
    """Import the callable of a plug-in that is not part of a checked recipe. Raises :class:`RecipeError`."""
    name = target._target_
    try:
        # Flags of --trust are not known here. Trust also reads the environment variable.
        function, entry = resolve_entry(name, Trust(()), CUSTOM)
    except Rejected as error:
        raise RecipeError(str(error), where="_target_", value=name, hint=error.hint) from error
    if entry is None:
        return function
    for argument, value in target.kwargs.items():
        reason = argument_problem(entry, argument, value)
        if reason is not None:
            raise RecipeError(
                reason,
                where=f"_target_: {name}",
                value=f"{argument}: {value}",
                hint="remove the argument",
            )
    return function


def _built(value: Any, supplied: dict[str, Any]) -> Any:
    """Replace the plug-ins in a value by the objects that they build."""
    if isinstance(value, Target):
        return build(value, **supplied)
    if isinstance(value, dict):
        return {key: _built(item, supplied) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_built(item, supplied) for item in value)
    return value
