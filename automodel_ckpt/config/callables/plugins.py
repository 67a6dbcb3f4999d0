"""Call what ``_target_`` names: what a callable accepts, which values a recipe may give it, and building it.

``trust.py`` decides which names are allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import typing
from collections.abc import Callable, Collection
from typing import Any

from automodel_ckpt.config.callables import allowlist
from automodel_ckpt.config.callables.allowlist import CUSTOM, NESTED, Entry, suggestion
from automodel_ckpt.config.callables.trust import (
    Rejected,
    Trust,
    called_function,
    is_within,
    resolve_entry,
)
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import RecipeError

CALLED_WITH = {"loss_fn": "(logits, labels)", "dataloader.collate_fn": "(samples)"}
"""Section with a plug-in that may be the function itself, not its builder -> the positional arguments of its calls."""


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


# Builders of `datasets` that read plain tables. Others unpickle (pandas), run SQL or load classes by name (iceberg).
SAFE_READERS = frozenset({"arrow", "csv", "imagefolder", "json", "parquet", "text"})
_SCHEMES = frozenset({"gs", "hf", "http", "https", "s3"})
_LOCATIONS = frozenset(
    {"path", "data_dir", "data_files", "dataset_path", "pretrained_model_name_or_path"}
)


def argument_problem(entry: Entry, name: str, value: Any) -> str | None:
    """Return why *value* is not allowed for the argument *name* without trust. Returns None when it is allowed."""
    if entry.arguments is not None:
        if name not in entry.arguments and not _is_numbers(value):
            return f"only these arguments are allowed: {', '.join(sorted(entry.arguments))}"
        if name in NESTED and isinstance(value, dict):
            return f"write it as a section with _target_: {suggestion(NESTED[name], '')}"
    if name in _LOCATIONS:
        return wrong_location(name, value)
    return None


def wrong_location(name: str, value: Any) -> str | None:
    """Return why a text, or a text in a list or mapping, is not a path, Hub name or URL. Returns None when all are.

    fsspec reads chains of file systems (``reference::...``), some of which execute templates or start programs, and
    the name of a builder of `datasets` takes precedence over a directory.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            reason = wrong_location(name, item)
            if reason is not None:
                return reason
        return None
    if not isinstance(value, str | os.PathLike):
        return None
    text = os.fspath(value)
    scheme, is_url, _ = text.partition("://")
    if "::" in text or (is_url and scheme not in _SCHEMES):
        schemes = ", ".join(sorted(_SCHEMES))
        return f"only local paths, Hub names, and URLs with the scheme {schemes} are allowed"
    may_be_reader = name == "path" and text.isidentifier() and text not in SAFE_READERS
    if may_be_reader and text in _readers():
        return f"only these builders of `datasets` are allowed: {', '.join(sorted(SAFE_READERS))}"
    return None


@functools.cache
def _readers() -> frozenset[str]:
    """Names that ``datasets.load_dataset`` parses as one of its readers, not as a path."""
    modules = importlib.import_module("datasets.packaged_modules")
    # Private, in datasets 2.0 to 4.x; without it, the names below remain, which are the dangerous ones.
    known = getattr(modules, "_PACKAGED_DATASETS_MODULES", {})
    return frozenset(known) | {"pandas", "sql", "webdataset", "generator", "spark", "cache"}


def _is_numbers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_numbers(item) for item in value)
    # bool is a subclass of int, but a boolean may switch something on, such as force_download.
    return isinstance(value, int | float) and not isinstance(value, bool)


LIBRARIES = ("torch.optim", "torch.nn", "transformers", "datasets", "peft")
"""Errors of these libraries about arguments are reported as mistakes in the recipe."""
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
            f"_target_: {target._target_}",
            f"{', '.join(supplied) or 'nothing'} {verb} supplied",
            "use a builder for this kind of training, or a recipe that supplies the argument",
        )
    try:
        return function(**arguments)
    except Exception as error:
        module = getattr(function, "__module__", None) or ""
        if not is_within(module, LIBRARIES):
            raise
        raise RecipeError(
            f"calling {target._target_} failed",
            f"_target_: {target._target_}",
            f"{type(error).__name__}: {error}",
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
        raise RecipeError(str(error), "_target_", name, error.hint) from error
    if entry is None:
        return function
    for argument, value in target.kwargs.items():
        reason = argument_problem(entry, argument, value)
        if reason is not None:
            raise RecipeError(
                reason,
                f"_target_: {name}",
                f"{argument}: {value}",
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
