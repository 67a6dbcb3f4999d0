"""Code that a recipe names: what may run, what it is called with, and building it.

A recipe file is data that may come from anywhere. What it names runs only if it is on the list of callables for this
purpose (``allowlist.py``), or if whoever starts the run trusts its package by ``--trust`` or AUTOMODEL_CKPT_TRUST. This
is decided by names before anything is imported, and again by the type and the module of the object that was found.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from automodel_ckpt.config import allowlist
from automodel_ckpt.config.allowlist import CUSTOM
from automodel_ckpt.config.bind import INVALID, REMOTE_CODE, Binder, closest, join
from automodel_ckpt.config.builders import missing_argument, unknown_argument
from automodel_ckpt.config.canonical_yaml import settle
from automodel_ckpt.config.load import LoadedRecipe, distinct, load_recipe
from automodel_ckpt.config.references import ReferenceFailed, is_reference
from automodel_ckpt.config.references import resolve as resolve_reference
from automodel_ckpt.config.registry import registered
from automodel_ckpt.config.schema import OptionsGroup, RecipeConfig, Target, own_keys
from automodel_ckpt.config.yaml_tree import Node
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.user_code import location_in_user_code, register_user_code

ENVIRONMENT = "AUTOMODEL_CKPT_TRUST"
LIBRARIES = ("torch.optim", "torch.nn", "transformers", "datasets", "peft")
"""Libraries whose errors about arguments are reported as mistakes in the recipe."""
_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation")
"""Settings of transformers for which ``owner/repository`` means code that is loaded from the Hub."""
_OWN_PACKAGES = ("torch", "transformers", "datasets", "peft", "automodel_ckpt")
_NEVER = sys.stdlib_module_names | {"builtins", "__main__"}
_NEEDED_BY = {"lr_scheduler": "transformers.optimization", "peft": "peft"}
"""What some recipes need and takes a moment to import: imported before ranks are forked, once for all of them."""
_SECTIONS = frozenset(field.name for field in dataclasses.fields(RecipeConfig))
Entry = allowlist.Exact | allowlist.ClassesOf
_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>\w+)")

_checked: dict[
    str, Callable[..., Any]
] = {}  # what check_targets resolved, for build() in this process and its forks


class Rejected(Exception):
    """A name may not be used, or leads nowhere."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


class Trust:
    """What may run besides the allowlist: packages, ``.py`` files, and code from model repositories."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """The names of ``--trust``, to which those of the environment variable are added."""
        self.names = frozenset(
            filter(None, [*names, *re.split(r"[\s,:]+", os.environ.get(ENVIRONMENT, ""))])
        )

    def covers(self, name: str) -> bool:
        """Whether a module or a dotted name is trusted; never those of Python itself."""
        return name.partition(".")[0] not in _NEVER and _within(name, self.names)

    def covers_file(self, path: Path) -> bool:
        """Whether a ``.py`` file, or a directory above it, is trusted."""
        trusted = {Path(name).resolve() for name in self.names}
        return path.stem in self.names or not trusted.isdisjoint(
            [path.resolve(), *path.resolve().parents]
        )


def _within(name: str, packages: Sequence[str] | frozenset[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def resolve(name: str, trust: Trust, purpose: str = CUSTOM) -> Callable[..., Any]:
    """The callable of a dotted name. Raises :class:`Rejected` where trust or the callable is missing."""
    return _resolve(name, trust, purpose)[0]


def _resolve(name: str, trust: Trust, purpose: str) -> tuple[Callable[..., Any], Entry | None]:
    """The callable of a dotted name, and its entry on the allowlist; None where the name is trusted."""
    check_name(name, trust, purpose)
    found = _find(name, trust)
    if not callable(found):
        raise Rejected(f"{name} is not a class or function", "use the name of a callable")
    if not trust.covers(name):
        entry = allowlist.entry_of(purpose, name, found)
        if entry is None:
            raise _not_listed(name, purpose)
        return found, entry
    inner = _innermost(found)
    module = getattr(inner, "__module__", None)
    if not isinstance(module, str) or not (
        trust.covers(module) or allowlist.is_listed(purpose, inner)
    ):
        raise Rejected(
            f"{name} is defined in {module or 'no module'}, which is not trusted", _hint(module)
        )
    return typing.cast(Callable[..., Any], found), None


def _innermost(function: Any) -> Any:
    """What a partial calls in the end: that decides whether it may run."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def check_name(name: str, trust: Trust, purpose: str = CUSTOM) -> None:
    """Check a dotted name before anything is imported. Raises :class:`Rejected`."""
    parts = name.split(".")
    if len(parts) < 2 or not all(
        part.isidentifier() and not part.startswith("__") for part in parts
    ):
        raise Rejected(f"{name!r} is not a dotted name", "use the form package.module.callable")
    if trust.covers(name):
        if parts[0] not in _OWN_PACKAGES:
            register_user_code(parts[0])
    elif parts[0] in _NEVER or not allowlist.may_name(purpose, name):
        raise _not_listed(name, purpose)


def _not_listed(name: str, purpose: str) -> Rejected:
    allowed = allowlist.suggestion(purpose, name)
    section = {"": "an argument", CUSTOM: "a recipe"}.get(purpose, purpose)
    what = f"{name} is not trusted, and not on the allowlist for {section}"
    return Rejected(what, f"{f'without trust: {allowed}; ' if allowed else ''}{_hint(name)}")


def _hint(module: str | None) -> str:
    root = (module or "builtins").partition(".")[0]
    if root in _NEVER:
        return "recipes cannot call functions of the standard library; write a wrapper in your own package and trust it"
    return f"if you trust this code, allow it with --trust {root} or {ENVIRONMENT}={root}"


def _find(name: str, trust: Trust) -> Any:
    root, *rest = name.split(".")
    if _within(root, trust.names) and importlib.util.find_spec(root) is None:
        sys.path.append(os.getcwd())  # last, so that nothing installed is shadowed
    path, found = root, _import(root)
    if found is None:
        raise Rejected(
            f"package {root} not found",
            "install it, or run ckpt-train in the directory that contains it",
        )
    for part in rest:
        parent, found = found, _attribute(found, part)
        is_package = getattr(parent, "__name__", None) == path and hasattr(parent, "__path__")
        path = f"{path}.{part}"
        if found is None and is_package:
            found = _import(path)
        if found is None:
            meant = closest(part, dir(parent))
            raise Rejected(
                f"{path} not found", f"did you mean {meant}?" if meant else "correct the name"
            )
    return found


def _import(module: str) -> Any:
    """The module, or None where there is none of this name."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return None
        raise _broken(module, error) from error


def _attribute(parent: Any, name: str) -> Any:
    """The attribute, or None; libraries that load their parts lazily may fail to import it."""
    try:
        return getattr(parent, name, None)
    except Exception as error:
        raise _broken(name, error) from error


def _broken(name: object, error: Exception) -> Rejected:
    place = location_in_user_code(error)
    return Rejected(
        f"{name} cannot be imported: {type(error).__name__}: {error}",
        f"install its dependencies, or fix the error{f' at {place}' if place is not None else ''}",
    )


def prepare(loaded: LoadedRecipe, trust: Trust) -> type[Any]:
    """The class of a recipe, with all that the recipe names checked; imports torch and what is named.

    The sections of a custom recipe's own ``Config`` are typed here: ``loaded`` is completed in place.

    Raises:
        RecipeError: with all that is not trusted, does not exist, or would be called wrongly.
    """
    _check_names(loaded, trust)
    recipe = loaded.tree.at("recipe")
    assert recipe is not None
    try:
        recipe_class = resolve_recipe(loaded.config.recipe, trust, loaded.directory)
    except Rejected as error:
        raise RecipeError.all_of([_problem("recipe", error, recipe)]) from error
    complete = load_recipe(
        loaded.path, loaded.overrides, schema=getattr(recipe_class, "Config", RecipeConfig)
    )
    loaded.config, loaded.tree = complete.config, complete.tree
    check_targets(loaded, trust)
    for section, library in _NEEDED_BY.items():
        if getattr(loaded.config, section, None) is not None:
            importlib.import_module(library)
    return recipe_class


def resolve_recipe(name: str, trust: Trust, folder: Path = Path()) -> type[Any]:
    """The class of a registered name, of ``package.module.Class``, or of ``file.py:Class`` beside the recipe or here.

    Raises :class:`Rejected`.
    """
    if match := _FILE.fullmatch(name):
        found = _from_file(folder, match["path"], match["name"], trust)
    else:
        found = resolve(registered().get(name, name).replace(":", "."), trust, "recipe")
    missing = [
        method for method in ("setup", "run", "close") if not callable(getattr(found, method, None))
    ]
    if not isinstance(found, type) or missing:
        raise Rejected(
            f"{name} is not a recipe",
            "a recipe is a class with the methods setup, run and close; see recipes/base.py",
        )
    if not issubclass(getattr(found, "Config", RecipeConfig), RecipeConfig):
        raise Rejected(
            f"{name}.Config is not a RecipeConfig",
            "subclass automodel_ckpt.config.schema.RecipeConfig",
        )
    return found


def _from_file(folder: Path, written: str, name: str, trust: Trust) -> Any:
    path = next((path for path in (folder / written, Path(written)) if path.is_file()), None)
    if path is None:
        places = dict.fromkeys((str(folder.resolve()), str(Path.cwd())))
        raise Rejected(f"file {written} not found", f"searched {' and '.join(places)}")
    if not trust.covers_file(path):
        raise Rejected(
            f"{path} is not trusted", f"if you trust this code, allow it with --trust {path}"
        )
    module_name = f"_recipe_{path.stem}"
    register_user_code(module_name)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _broken(path, error) from error
    if not hasattr(module, name):
        raise Rejected(f"{path} has no {name}", f"did you mean {closest(name, dir(module))}?")
    return getattr(module, name)


def check_targets(loaded: LoadedRecipe, trust: Trust) -> None:
    """Resolves every plug-in and checks its keyword arguments, which take the types of the parameters in place.

    Raises:
        RecipeError: with all problems found.
    """
    _check_names(loaded, trust)
    checker = _Checker(loaded, trust)
    for key, target, supplied in _targets(loaded.config):
        checker.check(key, target, supplied, allowlist.purpose_of(key, _SECTIONS))
    if problems := distinct([*loaded.problems, *checker.problems]):
        raise RecipeError.all_of(problems)
    settle(loaded.tree, loaded.config, with_arguments=True)


def _check_names(loaded: LoadedRecipe, trust: Trust) -> None:
    """Check everything that is known before code is imported. Raises :class:`RecipeError`."""
    problems = untrusted_names(loaded.tree, trust)
    if REMOTE_CODE not in trust.names:
        problems += _remote_code(loaded)
    if problems:
        raise RecipeError.all_of(distinct([*loaded.problems, *problems]))


def untrusted_names(tree: Node, trust: Trust) -> list[Problem]:
    """The ``_target_`` names in a recipe's tree that may not be used; nothing is imported."""
    problems: list[Problem] = []
    for key, node, purpose in _names(tree, trust):
        try:
            check_name(resolve_reference(str(node.value)) or "", trust, purpose)
        except Rejected as error:
            problems.append(_problem(key, error, node))
        except ReferenceFailed:  # the schema's check reports it
            continue
    return problems


def _names(
    node: Node, trust: Trust, key: str = "", purpose: str | None = None
) -> Iterator[tuple[str, Node, str]]:
    """(key, node of ``_target_``, purpose) of every plug-in.

    *purpose* is that of the parameter of an enclosing plug-in; None outside of plug-ins.
    """
    target = node.value.get("_target_") if isinstance(node.value, dict) else None
    is_trusted = False
    if target is not None:
        yield key, target, allowlist.purpose_of(key, _SECTIONS) if purpose is None else purpose
        is_trusted = trust.covers(resolve_reference(str(target.value)) or "")
    for name, child in node.children():
        child_key = join(key, name)
        child_purpose = purpose
        if target is not None:
            # A trusted callable may take any object of the allowlist, others only those of certain parameters.
            nested = CUSTOM if is_trusted else allowlist.NESTED.get(name, "")
            child_purpose = allowlist.PURPOSES.get(child_key) or nested
        yield from _names(child, trust, child_key, child_purpose)


def _remote_code(loaded: LoadedRecipe) -> Iterator[Problem]:
    """A problem for each converted value that would run code from a model's repository."""
    for key, value in _values(loaded.config):
        parts = key.split(".")
        runs_code = parts[-1] == REMOTE_CODE and value is not None and value is not False
        if isinstance(value, str) and "/" in value:
            runs_code = runs_code or not set(parts).isdisjoint(_KERNELS)
        if runs_code:
            node = loaded.tree.at(key)
            what = f"{key}: this runs code from a model repository, which is not trusted"
            hint = f"if you trust this code, allow it with --trust {REMOTE_CODE}"
            yield Problem(what, node.origin if node else "", str(node) if node else "", hint)


def _values(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, converted value) of every scalar of a recipe, arguments of plug-ins included."""
    if dataclasses.is_dataclass(value):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        value = held | held.pop("kwargs", {}) if getattr(value, "takes_any", False) else held
    if isinstance(value, dict | list | tuple):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _values(item, join(key, str(name)))
    else:
        yield key, value


def _targets(
    value: Any, key: str = "", supplied: tuple[str, ...] = ()
) -> Iterator[tuple[str, Target, tuple[str, ...]]]:
    """(key, plug-in, names of the arguments that the recipe adds) of each plug-in that is in no other one."""
    if isinstance(value, Target):
        yield key, value, supplied
        for field in dataclasses.fields(value):
            if field.name in own_keys(value):
                added = field.metadata.get("supplied", ())
                yield from _targets(getattr(value, field.name), join(key, field.name), added)
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from _targets(item, join(key, str(name)), supplied)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            added = field.metadata.get("supplied", ())
            yield from _targets(getattr(value, field.name), join(key, field.name), added)


def _problem(key: str, error: Rejected, node: Node | None) -> Problem:
    assert node is not None
    if is_reference(str(node.value)):  # what is wrong with it would show what it resolved to
        return Problem(
            f"{key}: the referenced value is not allowed here",
            node.origin,
            str(node),
            "correct the environment variable",
        )
    return Problem(f"{key}: {error}", node.origin, str(node), error.hint)


class _Checker:
    """Resolves plug-ins and gives their keyword arguments the types of the parameters."""

    def __init__(self, loaded: LoadedRecipe, trust: Trust) -> None:
        self.tree, self.trust = loaded.tree, trust
        self.problems: list[Problem] = []
        self.binder = Binder(type(loaded.config), self.problems)

    def check(self, key: str, target: Target, supplied: tuple[str, ...], purpose: str) -> None:
        try:
            function, entry = _resolve(target._target_, self.trust, purpose)
        except Rejected as error:
            self.problems.append(_problem(key, error, self.tree.at(join(key, "_target_"))))
            return
        _checked[target._target_] = function
        self._check_positional_only(key, target, _without_keyword(function))
        parameters, takes_any = _parameters(function)
        hints = _hints(function)
        for name in list(target.kwargs):
            node = self.tree.at(join(key, name))
            assert node is not None
            if name in parameters or takes_any:
                self._check_allowed(target, name, node, join(key, name), entry)
                inner = CUSTOM if entry is None else allowlist.NESTED.get(name, "")
                self._argument(
                    target, name, hints.get(name, Any), node, join(key, name), supplied, inner
                )
            else:
                self._unknown(target, key, name, node, parameters)
        given = {*target.kwargs, *supplied}
        for number, group in enumerate(getattr(target, "groups", ())):
            if isinstance(group, OptionsGroup):
                self._options(
                    target, group, parameters, hints, takes_any, join(key, "groups", str(number))
                )
        for name in [name for name, needed in parameters.items() if needed and name not in given]:
            self.problems.append(missing_argument(key, target._target_, name, self.tree.at(key)))

    def _options(
        self,
        target: Target,
        group: OptionsGroup,
        parameters: dict[str, bool],
        hints: dict[str, Any],
        takes_any: bool,
        key: str,
    ) -> None:
        """The options of a parameter group have the names and types of the optimizer's arguments."""
        for name in list(group.kwargs):
            node = self.tree.at(join(key, name))
            assert node is not None
            if name not in parameters and not takes_any:
                self._unknown(target, key, name, node, parameters)
                continue
            value = self.binder.value(hints.get(name, Any), node, join(key, name))
            group.kwargs[name] = None if value is INVALID else value

    def _check_positional_only(self, key: str, target: Target, unnamed: Sequence[str]) -> None:
        if unnamed:
            what = f"{key}: {target._target_} has positional-only parameters ({', '.join(unnamed)})"
            where = self.tree.at(join(key, "_target_"))
            hint = "write a wrapper with keyword arguments in your own package, and trust it"
            self.problems.append(Problem(what, where.origin if where else "", "", hint))

    def _check_allowed(
        self, target: Target, name: str, node: Node, key: str, entry: Entry | None
    ) -> None:
        """Note an argument that a callable of the allowlist may not have without trust."""
        reason = (
            allowlist.argument_problem(entry, name, target.kwargs[name])
            if entry is not None
            else None
        )
        if reason is not None:
            what = f"{key}: {target._target_} does not allow this argument without trust: {reason}"
            self.problems.append(Problem(what, node.origin, str(node), _hint(target._target_)))

    def _argument(
        self,
        target: Target,
        name: str,
        annotation: Any,
        node: Node,
        key: str,
        supplied: tuple[str, ...],
        inner: str,
    ) -> None:
        """Convert one argument in place, and check the plug-ins in it for the purpose *inner*."""
        if not isinstance(target.kwargs[name], Target):
            value = self.binder.value(annotation, node, key)
            target.kwargs[name] = None if value is INVALID else value
        for inner_key, plug_in, _ in _targets(target.kwargs[name], key):
            self.check(inner_key, plug_in, supplied, inner)

    def _unknown(
        self, target: Target, key: str, name: str, node: Node, parameters: dict[str, bool]
    ) -> None:
        self.problems.append(unknown_argument(key, target._target_, name, node, parameters))


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Keyword parameters of a callable with whether each is required, and whether it takes any other keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # a builtin that does not say
        return {}, True
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {p.name: p.default is p.empty for p in parameters if p.kind in kinds}
    return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _without_keyword(function: Callable[..., Any]) -> list[str]:
    """Parameters that must be given and have no name to give them by."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return []
    return [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Types of the parameters, as far as they can be known."""
    annotated: Any = _innermost(function)
    if isinstance(annotated, type):
        annotated = getattr(annotated, "__init__")  # noqa: B009
    elif not inspect.isroutine(annotated):
        annotated = type(annotated).__call__
    try:
        return typing.get_type_hints(annotated)
    except Exception:  # a name that exists only while type checking
        raw = getattr(annotated, "__annotations__", {})
        return {name: hint for name, hint in raw.items() if not isinstance(hint, str)}


def build(target: Target, /, **supplied: Any) -> Any:
    """Calls what a plug-in names, plug-ins among its arguments first.

    ``supplied`` is passed where the signature has the parameter and the recipe gave none.

    Raises:
        RecipeError: for a plug-in that was not checked before and is not from an allowed library, and for arguments
            that a library's callable refuses. What the user's own code raises stays as it is.
    """
    function = callable_of(target)
    parameters, _ = _parameters(function)
    added = {
        name: value
        for name, value in supplied.items()
        if name in parameters and name not in target.kwargs
    }
    arguments = {**allowlist.defaults(target._target_), **_built(target.kwargs, supplied), **added}
    try:
        return function(**arguments)
    except Exception as error:
        if not _within(getattr(function, "__module__", None) or "", LIBRARIES):
            raise
        value = f"{type(error).__name__}: {error}"
        hint = "correct the arguments of this section"
        what = f"calling {target._target_} failed"
        raise RecipeError(
            what, where=f"_target_: {target._target_}", value=value, hint=hint
        ) from error


def callable_of(target: Target) -> Callable[..., Any]:
    """The class or function that a plug-in names. Raises :class:`RecipeError` where it may not be used."""
    return _checked.get(target._target_) or _allowed(target)


def _allowed(target: Target) -> Callable[..., Any]:
    """The callable of a plug-in that is no part of a checked recipe. Raises :class:`RecipeError`."""
    try:
        function, entry = _resolve(target._target_, Trust(()), CUSTOM)
    except Rejected as error:
        raise RecipeError(
            str(error), where="_target_", value=target._target_, hint=error.hint
        ) from error
    for name, value in target.kwargs.items():
        reason = allowlist.argument_problem(entry, name, value) if entry is not None else None
        if reason is not None:
            raise RecipeError(
                reason,
                where=f"_target_: {target._target_}",
                value=f"{name}: {value}",
                hint="remove the argument",
            )
    return function


def _built(value: Any, supplied: dict[str, Any]) -> Any:
    if isinstance(value, Target):
        return build(value, **supplied)
    if isinstance(value, dict):
        return {key: _built(item, supplied) for key, item in value.items()}
    return (
        type(value)(_built(item, supplied) for item in value)
        if isinstance(value, list | tuple)
        else value
    )
