"""Code that a recipe names: what may run, what it is called with, and building it.

A recipe file is data that may come from anywhere, so what it names runs only if it is part of a few libraries, or if
whoever starts the run trusts it by ``--trust`` or AUTOMODEL_CKPT_TRUST. That is decided from names, before anything is
imported, and once more from where the object found was really defined.
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

from automodel_ckpt.config.bind import INVALID, Binder, closest, join
from automodel_ckpt.config.convert import FALSE_WORDS
from automodel_ckpt.config.load import LoadedRecipe, load_recipe
from automodel_ckpt.config.nodes import Node
from automodel_ckpt.config.references import is_reference
from automodel_ckpt.config.references import resolve as resolve_reference
from automodel_ckpt.config.registry import registered
from automodel_ckpt.config.schema import RecipeConfig, Target
from automodel_ckpt.config.settled import settle
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.own_code import note_own_code, place_in_own_code

ENVIRONMENT = "AUTOMODEL_CKPT_TRUST"
REMOTE_CODE = "trust_remote_code"
LIBRARIES = ("torch.optim", "torch.nn", "transformers", "datasets", "peft")
ALLOWED = (*LIBRARIES, "automodel_ckpt")
# Parts of them whose business is to start programs, import files, or delete things.
EXCLUDED = (
    "transformers.dynamic_module_utils",
    "transformers.testing_utils",
    "transformers.commands",
    "transformers.cli",
    "datasets.commands",
    "automodel_ckpt.cli",
    "automodel_ckpt.config",
    "automodel_ckpt.checkpoint",
    "automodel_ckpt.consolidate",
)
_NEVER = sys.stdlib_module_names | {"builtins", "__main__"}
_NEEDED_BY = {"lr_scheduler": "transformers.optimization", "peft": "peft"}
"""What some recipes need and takes a moment to import: imported before ranks are forked, once for all of them."""
_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>\w+)")

_checked: dict[str, Callable[..., Any]] = {}  # what check_targets resolved, for build() in this process and its forks


class Refused(Exception):
    """A name may not be used, or leads nowhere."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class Trust:
    """What may run besides the allowed libraries: packages, ``.py`` files, and code from model repositories."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """The names of ``--trust``, to which those of the environment variable are added."""
        self.names = frozenset(filter(None, [*names, *re.split(r"[\s,:]+", os.environ.get(ENVIRONMENT, ""))]))

    def covers(self, module: str) -> bool:
        """Whether objects defined in a module may be used; never those of Python itself."""
        if module.partition(".")[0] in _NEVER:
            return False
        return _within(module, self.names) or (_within(module, ALLOWED) and not _within(module, EXCLUDED))

    def may_import(self, name: str) -> bool:
        """Whether the module of a dotted name may be imported to see what is there."""
        roots = {allowed.partition(".")[0] for allowed in ALLOWED}
        return name.partition(".")[0] not in _NEVER and _within(name, self.names | roots)

    def covers_file(self, path: Path) -> bool:
        """Whether a ``.py`` file, or a directory above it, is trusted."""
        trusted = {Path(name).resolve() for name in self.names}
        return path.stem in self.names or not trusted.isdisjoint([path.resolve(), *path.resolve().parents])


def _within(name: str, packages: Sequence[str] | frozenset[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def resolve(name: str, trust: Trust) -> Callable[..., Any]:
    """The callable of a dotted name. Raises :class:`Refused` where trust or the callable is missing."""
    check_name(name, trust)
    found = _find(name, trust)
    module = getattr(_innermost(found), "__module__", None)
    if not callable(found):
        raise Refused(f"{name} is not a class or function", "name something that can be called")
    if not isinstance(module, str) or not trust.covers(module):
        raise Refused(f"{name} is defined in {module or 'no module'}, which recipes may not use", _remedy(module))
    return typing.cast(Callable[..., Any], found)


def _innermost(function: Any) -> Any:
    """What a partial calls in the end: that decides whether it may run."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def check_name(name: str, trust: Trust) -> None:
    """What can be said of a dotted name before anything is imported."""
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() and not part.startswith("__") for part in parts):
        raise Refused(f"{name!r} is not a dotted name", "write package.module.callable")
    if not trust.may_import(name):
        raise Refused(f"{name} is code that nobody trusted", _remedy(parts[0]))
    if _within(name, trust.names) and not _within(name, ALLOWED):
        note_own_code(parts[0])


def _remedy(module: str | None) -> str:
    root = (module or "builtins").partition(".")[0]
    if root in _NEVER:
        return "Python's own functions are not for recipes; write one in a package of yours and trust that"
    return f"if you know this code and want it to run: --trust {root}, or {ENVIRONMENT}={root}"


def _find(name: str, trust: Trust) -> Any:
    root, *rest = name.split(".")
    if _within(root, trust.names) and importlib.util.find_spec(root) is None:
        sys.path.append(os.getcwd())  # last, so that nothing installed is shadowed
    path, found = root, _import(root)
    if found is None:
        raise Refused(f"there is no package {root}", "install it, or start in the directory where it lies")
    for part in rest:
        parent, found = found, _attribute(found, part)
        is_package = getattr(parent, "__name__", None) == path and hasattr(parent, "__path__")
        path = f"{path}.{part}"
        if found is None and is_package:
            found = _import(path)
        if found is None:
            meant = closest(part, dir(parent))
            raise Refused(f"there is no {path}", f"did you mean {meant}?" if meant else "correct the name")
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


def _broken(name: object, error: Exception) -> Refused:
    place = place_in_own_code(error)
    return Refused(
        f"{name} cannot be imported: {type(error).__name__}: {error}",
        f"install what it needs, or correct it{f' at {place}' if place is not None else ''}",
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
    except Refused as error:
        raise RecipeError.all_of([_problem("recipe", error, recipe)]) from error
    complete = load_recipe(loaded.path, loaded.overrides, schema=getattr(recipe_class, "Config", RecipeConfig))
    loaded.config, loaded.tree = complete.config, complete.tree
    check_targets(loaded, trust)
    for section, library in _NEEDED_BY.items():
        if getattr(loaded.config, section, None) is not None:
            importlib.import_module(library)
    return recipe_class


def resolve_recipe(name: str, trust: Trust, folder: Path = Path()) -> type[Any]:
    """The class of a registered name, of ``package.module.Class``, or of ``file.py:Class`` beside the recipe or here.

    Raises :class:`Refused`.
    """
    if match := _FILE.fullmatch(name):
        found = _from_file(folder, match["path"], match["name"], trust)
    else:
        found = resolve(registered().get(name, name).replace(":", "."), trust)
    missing = [method for method in ("setup", "run", "close") if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        raise Refused(f"{name} is not a recipe", "a recipe is a class with setup, run and close; see recipes/base.py")
    if not issubclass(getattr(found, "Config", RecipeConfig), RecipeConfig):
        raise Refused(f"{name}.Config is not a RecipeConfig", "derive it from automodel_ckpt's RecipeConfig")
    return found


def _from_file(folder: Path, written: str, name: str, trust: Trust) -> Any:
    path = next((path for path in (folder / written, Path(written)) if path.is_file()), None)
    if path is None:
        places = dict.fromkeys((str(folder.resolve()), str(Path.cwd())))
        raise Refused(f"there is no file {written}", f"looked in {' and '.join(places)}")
    if not trust.covers_file(path):
        raise Refused(f"{path} is code that nobody trusted", f"if you know it and want it to run: --trust {path}")
    module_name = f"_recipe_{path.stem}"
    note_own_code(module_name)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _broken(path, error) from error
    if not hasattr(module, name):
        raise Refused(f"{path} has no {name}", f"did you mean {closest(name, dir(module))}?")
    return getattr(module, name)


def check_targets(loaded: LoadedRecipe, trust: Trust) -> None:
    """Resolves every plug-in and checks its keyword arguments, which take the types of the parameters in place.

    Raises:
        RecipeError: with all problems found.
    """
    _check_names(loaded, trust)
    checker = _Checker(loaded, trust)
    for key, target, supplied in _targets(loaded.config):
        checker.check(key, target, supplied)
    if checker.problems:
        raise RecipeError.all_of(checker.problems)
    settle(loaded.tree, loaded.config, with_arguments=True)


def _check_names(loaded: LoadedRecipe, trust: Trust) -> None:
    problems: list[Problem] = []
    for key, node in _entries(loaded.tree):
        name = key.rpartition(".")[2]
        if name == REMOTE_CODE and REMOTE_CODE not in trust.names and not _is_off(node):
            remedy = f"if you know this code and want it to run: --trust {REMOTE_CODE}"
            problems.append(Problem(f"{key}: runs code that nobody trusted", node.origin, str(node), remedy))
        if name == "_target_":
            _note_untrusted(key, node, trust, problems)
    if problems:
        raise RecipeError.all_of(problems)


def _note_untrusted(key: str, node: Node, trust: Trust, problems: list[Problem]) -> None:
    try:
        check_name(resolve_reference(str(node.value)) or "", trust)
    except Refused as error:
        problems.append(_problem(key.removesuffix("._target_"), error, node))


def _is_off(node: Node) -> bool:
    return node.is_null or (isinstance(node.value, str) and node.value.lower() in FALSE_WORDS)


def _entries(node: Node, key: str = "") -> Iterator[tuple[str, Node]]:
    for name, child in node.children():
        yield join(key, name), child
        yield from _entries(child, join(key, name))


def _targets(
    value: Any, key: str = "", supplied: tuple[str, ...] = ()
) -> Iterator[tuple[str, Target, tuple[str, ...]]]:
    """(key, plug-in, names of the arguments that the recipe adds) of each plug-in that is in no other one."""
    if isinstance(value, Target):
        yield key, value, supplied
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from _targets(item, join(key, str(name)), supplied)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            added = field.metadata.get("supplied", ())
            yield from _targets(getattr(value, field.name), join(key, field.name), added)


def _problem(key: str, error: Refused, node: Node | None) -> Problem:
    assert node is not None
    if is_reference(str(node.value)):  # what is wrong with it would show what it resolved to
        return Problem(f"{key}: this reference names nothing that may be used", node.origin, str(node), "correct it")
    return Problem(f"{key}: {error}", node.origin, str(node), error.remedy)


class _Checker:
    """Resolves plug-ins and gives their keyword arguments the types of the parameters."""

    def __init__(self, loaded: LoadedRecipe, trust: Trust) -> None:
        self.tree, self.trust = loaded.tree, trust
        self.problems: list[Problem] = []
        self.binder = Binder(type(loaded.config), self.problems)

    def check(self, key: str, target: Target, supplied: tuple[str, ...]) -> None:
        try:
            function = resolve(target._target_, self.trust)
        except Refused as error:
            self.problems.append(_problem(key, error, self.tree.at(join(key, "_target_"))))
            return
        _checked[target._target_] = function
        self._refuse_unnamed(key, target, _without_keyword(function))
        parameters, takes_any = _parameters(function)
        hints = _hints(function)
        for name in list(target.kwargs):
            node = self.tree.at(join(key, name))
            assert node is not None
            if name in parameters or takes_any:
                self._argument(target, name, hints.get(name, Any), node, join(key, name), supplied)
            else:
                self._unknown(target, key, name, node, parameters)
        given = {*target.kwargs, *supplied}
        for name in [name for name, needed in parameters.items() if needed and name not in given]:
            where = self.tree.at(key)
            what = f"{join(key, name)} is missing: {target._target_} cannot be called without it"
            self.problems.append(Problem(what, where.origin if where else "", "", f"add {join(key, name)}"))

    def _refuse_unnamed(self, key: str, target: Target, unnamed: Sequence[str]) -> None:
        if unnamed:
            what = f"{key}: {target._target_} takes {', '.join(unnamed)} by position only, which a recipe cannot give"
            where = self.tree.at(join(key, "_target_"))
            remedy = "write a function around it that takes keywords, in a package of yours, and trust that"
            self.problems.append(Problem(what, where.origin if where else "", "", remedy))

    def _argument(
        self, target: Target, name: str, annotation: Any, node: Node, key: str, supplied: tuple[str, ...]
    ) -> None:
        if not isinstance(target.kwargs[name], Target):
            value = self.binder.value(annotation, node, key)
            target.kwargs[name] = None if value is INVALID else value
        for inner_key, inner, _ in _targets(target.kwargs[name], key):
            self.check(inner_key, inner, supplied)

    def _unknown(self, target: Target, key: str, name: str, node: Node, parameters: dict[str, bool]) -> None:
        meant = closest(name, parameters)
        takes = ", ".join(parameters) or "no keywords"
        remedy = f"did you mean {join(key, meant)}?" if meant else f"{target._target_} takes {takes}"
        self.problems.append(Problem(f"unknown key {join(key, name)}", node.origin, str(node), remedy))


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
    function = _checked.get(target._target_) or _allowed(target)
    parameters, _ = _parameters(function)
    added = {name: value for name, value in supplied.items() if name in parameters and name not in target.kwargs}
    arguments = {**_built(target.kwargs, supplied), **added}
    try:
        return function(**arguments)
    except Exception as error:
        if not _within(getattr(function, "__module__", None) or "", LIBRARIES):
            raise
        value = f"{type(error).__name__}: {error}"
        remedy = "correct the arguments in this section"
        what = f"{target._target_} cannot be called as the recipe says"
        raise RecipeError(what, where=f"_target_: {target._target_}", value=value, remedy=remedy) from error


def _allowed(target: Target) -> Callable[..., Any]:
    try:
        return resolve(target._target_, Trust())
    except Refused as error:
        raise RecipeError(str(error), where="_target_", value=target._target_, remedy=error.remedy) from error


def _built(value: Any, supplied: dict[str, Any]) -> Any:
    if isinstance(value, Target):
        return build(value, **supplied)
    if isinstance(value, dict):
        return {key: _built(item, supplied) for key, item in value.items()}
    return type(value)(_built(item, supplied) for item in value) if isinstance(value, list | tuple) else value
