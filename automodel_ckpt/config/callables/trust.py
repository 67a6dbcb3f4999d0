"""Resolve the dotted names in a recipe to callables, if they are on the allowlist or trusted.

A recipe file is data that may come from anywhere. A callable that it names runs only if ``allowlist.py`` lists it for
the purpose of the section, or if the user trusts its package with ``--trust`` or AUTOMODEL_CKPT_TRUST. The name is
checked before anything is imported. After the import, the type and the module of the object are checked too.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from automodel_ckpt.base.user_code import location_in_user_code, register_user_code
from automodel_ckpt.config.bind import REMOTE_CODE
from automodel_ckpt.config.callables import allowlist
from automodel_ckpt.config.callables.allowlist import CUSTOM, Entry
from automodel_ckpt.config.schema_keys import closest
from automodel_ckpt.errors import limit_error

ENVIRONMENT = "AUTOMODEL_CKPT_TRUST"
LIBRARIES = ("torch", "transformers", "datasets", "peft", "automodel_ckpt")
"""Packages with code that is never user code, even if it is trusted."""
# Trust in os or builtins would be trust in every command.
_NEVER = sys.stdlib_module_names | {"builtins", "__main__"}


_trusts_remote_code: bool | None = None
"""Whether code of model repositories is trusted; None before :func:`record_remote_code` is called."""


class Rejected(Exception):
    """A name is not allowed, or does not exist. ``hint`` is the hint of the error message."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


class Trust:
    """What a recipe may do because the user allows it outside of the recipe.

    ``package``, ``FILE.py`` and ``DIRECTORY/`` are code that may run in addition to the allowlist, and
    ``trust_remote_code`` is code from model repositories. ``env:NAME`` is an environment variable with a value that may
    be sent, and ``host:NAME`` or ``host:NAME:PORT`` a host that gets requests with the user's credentials.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        """Trust the names of ``--trust``, and those in the environment variable."""
        in_environment = _words(os.environ.get(ENVIRONMENT, ""))
        self.names = frozenset(name for name in [*names, *in_environment] if name)

    def covers(self, name: str) -> bool:
        """Whether a module or a dotted name is trusted. The standard library never is."""
        root = name.partition(".")[0]
        packages = (each for each in self.names if not each.endswith(".py"))
        return root not in _NEVER and is_within(name, packages)

    def covers_file(self, path: Path) -> bool:
        """Whether a ``.py`` file or a directory, or a directory above it, is trusted by its path.

        The name of a package, without ``/`` and ``.py``, is no path: a recipe may name any file of that name.
        """
        # Links are resolved: a link in a trusted directory does not make its target trusted.
        resolved = path.resolve()
        paths = (name for name in self.names if "/" in name or name.endswith(".py") or name == ".")
        trusted = {Path(name).expanduser().resolve() for name in paths}
        return not trusted.isdisjoint([resolved, *resolved.parents])

    def allows_host(self, host: str, port: int | None) -> bool:
        """Whether requests with credentials may go to a host that a recipe names."""
        return not self.names.isdisjoint({f"host:{host}", f"host:{host}:{port}"})


def _words(text: str) -> list[str]:
    """Divide the value of the environment variable at spaces, commas, and colons that are not part of a permission."""
    words: list[str] = []
    for word in re.split(r"[\s,]+", text):
        words += [word] if word.startswith(("env:", "host:")) else word.split(":")
    return words


def record_remote_code(trust: Trust) -> None:
    """Record whether code of model repositories is trusted, for this process and the ranks forked from it."""
    global _trusts_remote_code
    _trusts_remote_code = REMOTE_CODE in trust.names
    if _trusts_remote_code:
        # The package that transformers imports such code into.
        register_user_code("transformers_modules")


def trusts_remote_code() -> bool:
    """Whether the user trusts code of model repositories, by ``--trust trust_remote_code`` or the environment.

    A recipe file cannot change the answer. It comes from the last :func:`record_remote_code`, or from the environment.
    """
    if _trusts_remote_code is not None:
        return _trusts_remote_code
    return REMOTE_CODE in Trust().names


def is_within(name: str, packages: Iterable[str]) -> bool:
    """Whether a dotted name is one of *packages* or below one of them."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def resolve(name: str, trust: Trust, purpose: str = CUSTOM) -> Callable[..., Any]:
    """Import the callable with a dotted name. Raises :class:`Rejected` if it is not allowed or does not exist."""
    function, _ = resolve_entry(name, trust, purpose)
    return function


def resolve_entry(name: str, trust: Trust, purpose: str) -> tuple[Callable[..., Any], Entry | None]:
    """Import the callable with a dotted name.

    Returns it with its entry in the allowlist, or with None when the name is trusted. Raises :class:`Rejected`.
    """
    check_name(name, trust, purpose)
    found = _import_object(name, trust)
    if not callable(found):
        raise Rejected(f"{name} is not a class or function", "use the name of a callable")
    if not trust.covers(name):
        entry = allowlist.entry_of(purpose, name, found)
        if entry is None:
            raise _not_listed(name, purpose)
        return found, entry
    # A trusted module may import functions from elsewhere, such as os.system: these are not trusted with it.
    module = getattr(called_function(found), "__module__", None)
    if not isinstance(module, str) or not trust.covers(module):
        raise Rejected(
            f"{name} is defined in {module or 'no module'}, which is not trusted",
            trust_hint(module),
        )
    return typing.cast(Callable[..., Any], found), None


def called_function(function: Any) -> Any:
    """Return the function that a ``functools.partial`` calls, and any other object unchanged."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def check_name(name: str, trust: Trust, purpose: str = CUSTOM) -> None:
    """Check a dotted name before anything is imported. Raises :class:`Rejected` if it is not allowed."""
    parts = name.split(".")
    # Names such as __globals__ and __subclasses__ lead from any object to all loaded code.
    are_public = all(part.isidentifier() and not part.startswith("__") for part in parts)
    if len(parts) < 2 or not are_public:
        hint = "use the form package.module.callable"
        allowed = allowlist.suggestion(purpose, name)
        if allowed:
            hint += f", such as {allowed}"
        raise Rejected(f"{name!r} is not a dotted name", hint)
    root = parts[0]
    if trust.covers(name):
        if root not in LIBRARIES:
            register_user_code(root)
    elif root in _NEVER or not allowlist.may_name(purpose, name):
        raise _not_listed(name, purpose)


def _not_listed(name: str, purpose: str) -> Rejected:
    names_of_purposes = {"": "an argument", CUSTOM: "a recipe"}
    section = names_of_purposes.get(purpose, purpose)
    hint = trust_hint(name)
    if allowed := allowlist.suggestion(purpose, name):
        hint = f"without trust: {allowed}; {hint}"
    return Rejected(f"{name} is not trusted, and not on the allowlist for {section}", hint)


def trust_hint(name: str | None) -> str:
    """Return the hint how to trust a module or a dotted name; None is an object without a module."""
    root = (name or "builtins").partition(".")[0]
    if root in _NEVER:
        return "recipes cannot call functions of the standard library; write a wrapper in your own package and trust it"
    return f"if you trust this code, allow it with --trust {root} or {ENVIRONMENT}={root}"


def _import_object(name: str, trust: Trust) -> Any:
    """Import the object with a dotted name. Raises :class:`Rejected` if it does not exist."""
    root, *rest = name.split(".")
    if is_within(root, trust.names) and importlib.util.find_spec(root) is None:
        # Appended, so that a file in the working directory does not shadow an installed package.
        sys.path.append(os.getcwd())
    path = root
    found = _import_module(root)
    if found is None:
        raise Rejected(
            f"package {root} not found",
            "install it, or run ckpt-train in the directory that contains it",
        )
    for part in rest:
        parent = found
        try:
            found = getattr(parent, part, None)
        except Exception as error:  # a library imports it when it is accessed
            raise import_failure(part, error) from error
        is_package = getattr(parent, "__name__", None) == path and hasattr(parent, "__path__")
        path = f"{path}.{part}"
        if found is None and is_package:
            found = _import_module(path)
        if found is None:
            meant = closest(part, dir(parent))
            hint = f"did you mean {meant}?" if meant else "correct the name"
            raise Rejected(f"{path} not found", hint)
    return found


def _import_module(module: str) -> Any:
    """Import a module. Returns None when no module has this name. Raises :class:`Rejected` if the import fails."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        # Another name means that the module exists, and that one of its imports is missing.
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return None
        raise import_failure(module, error) from error


def import_failure(name: object, error: Exception) -> Rejected:
    """Describe a failed import, with the line of user code that raised the error."""
    hint = "install its dependencies, or fix the error"
    location = location_in_user_code(error)
    if location is not None:
        hint += f" at {location}"
    what = f"{name} cannot be imported: {type(error).__name__}: {error}"
    limit = limit_error(error)
    if limit is not None:
        problem = limit.problems[0]
        what = f"{name} cannot be imported: {problem.what} ({problem.value})"
        hint = problem.hint
    return Rejected(what, hint)
