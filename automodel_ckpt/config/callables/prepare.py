"""Check what a recipe names before anything is imported, import it, and check and convert its arguments."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from automodel_ckpt.base.user_code import register_user_code
from automodel_ckpt.config.bind import CORRECT, INVALID, REMOTE_CODE, Binder
from automodel_ckpt.config.callables import allowlist
from automodel_ckpt.config.callables.allowlist import CUSTOM, Entry
from automodel_ckpt.config.callables.plugins import (
    CALLED_WITH,
    Signature,
    argument_problem,
    is_called_directly,
    remember,
    signature_of,
)
from automodel_ckpt.config.callables.sent_values import sent_problems, values_of
from automodel_ckpt.config.callables.trust import (
    Rejected,
    Trust,
    check_name,
    import_failure,
    record_remote_code,
    resolve,
    resolve_entry,
    trust_hint,
)
from automodel_ckpt.config.keys.optimizer import OptionsGroup
from automodel_ckpt.config.load import LoadedRecipe, bind_recipe, distinct
from automodel_ckpt.config.other_names import OTHER_NAMES
from automodel_ckpt.config.registry import target_of
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import closest, join
from automodel_ckpt.config.tree.convert import FALSE_WORDS
from automodel_ckpt.config.tree.references import ReferenceFailed, is_reference
from automodel_ckpt.config.tree.references import resolve as resolve_reference
from automodel_ckpt.config.tree.rules import AT_LEAST_1, AT_LEAST_2, MISSING, Target
from automodel_ckpt.config.tree.yaml_tree import Node
from automodel_ckpt.errors import Problem, RecipeError

_RULES = {"seq_length": AT_LEAST_2, "max_samples": AT_LEAST_1, "shuffle_block": AT_LEAST_1}
"""Parameter -> its limit, in every builder of this package."""
_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation")
"""Settings of transformers for which ``owner/repository`` means code that is loaded from the Hub."""
SECTIONS = frozenset(field.name for field in dataclasses.fields(RecipeConfig))


def check_names(loaded: LoadedRecipe, trust: Trust) -> None:
    """Check everything that can be checked before code is imported. Raises :class:`RecipeError`."""
    problems = [*untrusted_names(loaded.tree, trust), *sent_problems(loaded.tree, trust)]
    if REMOTE_CODE not in trust.names:
        problems += _remote_code(loaded.tree)
    problems += _task_files(loaded, trust)
    RecipeError.check(distinct(problems))


def untrusted_names(tree: Node, trust: Trust) -> list[Problem]:
    """Return a problem for each ``_target_`` in a recipe's tree that is not allowed. Imports nothing."""
    problems: list[Problem] = []
    for key, node, purpose in _names(tree, trust):
        if node.value == MISSING:  # load_recipe reports it
            continue
        try:
            check_name(resolve_reference(str(node.value)) or "", trust, purpose)
        except Rejected as error:
            problems.append(problem_of(key, error, node))
        except ReferenceFailed:  # load_recipe reports it
            continue
    return problems


def _names(
    node: Node, trust: Trust, key: str = "", purpose: str | None = None
) -> Iterator[tuple[str, Node, str]]:
    """Yield (key, node of ``_target_``, purpose) for every plug-in.

    *purpose* is the purpose of the parameter of an enclosing plug-in; None outside of plug-ins.
    """
    target = node.value.get("_target_") if isinstance(node.value, dict) else None
    is_trusted = False
    if target is not None:
        yield key, target, allowlist.purpose_of(key, SECTIONS) if purpose is None else purpose
        is_trusted = trust.covers(resolve_reference(str(target.value)) or "")
    for name, child in node.children():
        child_key = join(key, name)
        child_purpose = purpose
        if target is not None:
            # A trusted callable may take any object of the allowlist, others only the objects of certain parameters.
            nested = CUSTOM if is_trusted else allowlist.NESTED.get(name, "")
            child_purpose = allowlist.PURPOSES.get(child_key) or nested
        yield from _names(child, trust, child_key, child_purpose)


def _remote_code(tree: Node) -> Iterator[Problem]:
    """Yield a problem for each value that would run code from a model's repository."""
    for value in values_of(tree):
        parts = value.key.split(".")
        # Everything else counts as true: transformers would take the text no as true.
        runs_code = parts[-1] == REMOTE_CODE and value.text.lower() not in FALSE_WORDS
        # This key runs no code without trust: the recipe asks trusts_remote_code() when it reads the model.
        runs_code = runs_code and value.key != f"model.{REMOTE_CODE}"
        if runs_code or ("/" in value.text and not set(parts).isdisjoint(_KERNELS)):
            yield value.problem(
                "this runs code from a model repository, which is not trusted",
                f"if you trust this code, allow it with --trust {REMOTE_CODE}",
            )


def _task_files(loaded: LoadedRecipe, trust: Trust) -> Iterator[Problem]:
    """Yield a problem for a directory of task files that is not trusted: lm-evaluation-harness runs code in them."""
    section = getattr(loaded.config, "evaluation", None)
    if section is None or section.harness is None or section.harness.include_path is None:
        return
    path = Path(section.harness.include_path).expanduser()
    if not trust.covers_file(path):
        key = "evaluation.harness.include_path"
        what = f"{key}: task files can contain code, and this directory is not trusted"
        node = loaded.tree.at(key)
        yield Problem(
            what,
            node.origin if node else "",
            str(node) if node else "",
            f"if you trust these files, allow them with --trust {path}",
        )


def problem_of(key: str, error: Rejected, node: Node | None) -> Problem:
    assert node is not None
    if is_reference(str(node.value)):
        # The message of the error would contain the value of the environment variable.
        return Problem(
            f"{key}: the value of the variable is not allowed here", node.origin, str(node)
        )
    return Problem(f"{key}: {error}", node.origin, str(node), error.hint)


def check_targets(loaded: LoadedRecipe, trust: Trust) -> LoadedRecipe:
    """Import every plug-in, and convert its keyword arguments to the types of the parameters.

    Returns the recipe with converted arguments. ``loaded`` is not modified.

    Raises:
        RecipeError: with all problems found.
    """
    check_names(loaded, trust)
    record_remote_code(trust)
    tree = loaded.tree.copy()
    checker = _Checker(tree, type(loaded.config), trust)
    config = checker.convert(loaded.config, "")
    RecipeError.check(distinct(checker.problems))
    return dataclasses.replace(loaded, config=config, tree=tree)


class _Checker:
    """Imports plug-ins and converts their keyword arguments to the types of the parameters.

    ``problems`` collects all mistakes. ``tree`` is the checker's own copy: converting a node may rewrite it.
    """

    def __init__(self, tree: Node, schema: type[Any], trust: Trust) -> None:
        self.tree = tree
        self.trust = trust
        self.supplied: tuple[str, ...] = ()
        """The arguments that the recipe's class adds to the plug-in."""
        self.problems: list[Problem] = []
        self.binder = Binder(schema, self.problems)

    def convert(self, value: Any, key: str, purpose: str | None = None) -> Any:
        """Return a value of the configuration in which the arguments of all plug-ins are converted.

        *purpose* is the purpose of the parameter of an enclosing plug-in; None outside of plug-ins. A section without
        plug-ins is returned as it is.
        """
        if isinstance(value, Target):
            if purpose is not None:
                return self._target(value, key, purpose)
            value = self._target(value, key, allowlist.purpose_of(key, SECTIONS))
        if dataclasses.is_dataclass(value):
            return self._section(value, key, purpose)
        if isinstance(value, dict):
            return {
                name: self.convert(item, join(key, str(name)), purpose)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return type(value)(
                self.convert(item, join(key, str(index)), purpose)
                for index, item in enumerate(value)
            )
        return value

    def _section(self, section: Any, key: str, purpose: str | None) -> Any:
        """Convert the plug-ins in the fields of a section. :meth:`_target` has converted its ``kwargs``."""
        changed = {}
        supplied = self.supplied
        for field in dataclasses.fields(section):
            if field.name == "kwargs" and getattr(section, "takes_any", False):
                continue
            if purpose is None:
                self.supplied = field.metadata.get("supplied", ())
            before = getattr(section, field.name)
            after = self.convert(before, join(key, field.name), purpose)
            if after is not before:
                changed[field.name] = after
        # The next plug-in of the same field gets what this one got.
        self.supplied = supplied
        return dataclasses.replace(section, **changed)

    def _target(self, target: Target, key: str, purpose: str) -> Target:
        """Return a plug-in with converted arguments."""
        node = self.tree.at(join(key, "_target_"))
        try:
            function, entry = resolve_entry(target._target_, self.trust, purpose)
        except Rejected as error:
            self.problems.append(problem_of(key, error, node))
            return target
        remember(target._target_, function)
        signature, given = signature_of(function), {*target.kwargs, *self.supplied}
        is_direct = is_called_directly(key, function, given)
        if signature.positional_only and not is_direct and node is not None:
            names = ", ".join(signature.positional_only)
            what = f"{key}: {target._target_} has positional-only parameters ({names})"
            hint = "write a wrapper with keyword arguments in your own package, and trust it"
            self.problems.append(Problem(what, node.origin, "", hint))
        changes: dict[str, Any] = {}
        if groups := getattr(target, "groups", ()):
            # The options of an optimizer's parameter groups have the types of its arguments.
            converted = changes["groups"] = list(groups)
            for number, group in enumerate(groups):
                if isinstance(group, OptionsGroup):
                    place = join(key, "groups", str(number))
                    arguments = self._arguments(target, place, group.kwargs, signature, nested="")
                    converted[number] = dataclasses.replace(group, kwargs=arguments)
        changes["kwargs"] = self._arguments(target, key, target.kwargs, signature, entry)
        for name in () if is_direct else signature.missing(given):
            self.problems.append(_missing_argument(key, target._target_, name, self.tree.at(key)))
        return dataclasses.replace(target, **changes)

    def _arguments(
        self,
        target: Target,
        key: str,
        given: dict[str, Any],
        signature: Signature,
        entry: Entry | None = None,
        nested: str = CUSTOM,
    ) -> dict[str, Any]:
        """Convert arguments to the types of the parameters, and check what the allowlist says about them."""
        kwargs = {}
        for name, value in given.items():
            full = join(key, name)
            node = self.tree.at(full)
            assert node is not None
            if not signature.accepts(name):
                problem = _unknown_argument(key, target._target_, name, node, signature.required)
                self.problems.append(problem)
                continue
            if entry is not None:
                nested = allowlist.NESTED.get(name, "")
                reason = argument_problem(entry, name, value)
                if reason is not None:
                    what = f"{full}: {target._target_} does not allow this argument without trust: {reason}"
                    hint = trust_hint(target._target_)
                    self.problems.append(Problem(what, node.origin, str(node), hint))
            if not isinstance(value, Target):
                value = self.binder.value(signature.types.get(name, Any), node, full)
                value = None if value is INVALID else value  # with a problem in the list
                rule = _RULES.get(name) if target._target_.startswith("automodel_ckpt.") else None
                if rule is not None and type(value) is int and not rule.accepts(value):
                    self.binder.note(f"{full} must be {rule.expected}", node, node, CORRECT)
            kwargs[name] = self.convert(value, full, nested)
        return kwargs


def _unknown_argument(
    key: str, target: str, name: str, node: Node, parameters: Iterable[str]
) -> Problem:
    """Describe an argument that a plug-in does not accept."""
    accepted = list(parameters)
    # What other programs call an argument.
    counterpart = OTHER_NAMES.get(name)
    ours = [each.rpartition(".")[2] for each in counterpart.keys] if counterpart else []
    meant = next((each for each in ours if each in accepted), None) or closest(name, accepted)
    hint = f"{target} accepts {', '.join(accepted) or 'no keyword arguments'}"
    if meant:
        hint = f"did you mean {join(key, meant)}?"
    return Problem(f"unknown key {join(key, name)}", node.origin, str(node), hint)


def _missing_argument(key: str, target: str, name: str, section: Node | None) -> Problem:
    """Describe a required argument of a plug-in that is missing."""
    what = f"{join(key, name)} is missing: {target} requires it"
    where = section.origin if section else ""
    hint = f"add {join(key, name)}"
    if key in CALLED_WITH:
        hint += f"; a function that training calls itself begins with {CALLED_WITH[key]}"
    return Problem(what, where, "", hint)


_NEEDED_BY = {"lr_scheduler": "transformers.optimization", "peft": "peft"}
"""Section -> library that it needs. The import takes seconds, so it happens once, before the ranks are forked."""
_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>\w+)")


class PreparedRecipe(NamedTuple):
    """A recipe with checked plug-ins, and its class."""

    loaded: LoadedRecipe
    recipe_class: type[Any]


def prepare(loaded: LoadedRecipe, trust: Trust) -> PreparedRecipe:
    """Import the class of a recipe and its plug-ins, and check all of them. ``loaded`` is not modified.

    The sections that a custom recipe declares in its ``Config`` are validated here.

    Raises:
        RecipeError: with all names that are not trusted or do not exist, and all invalid arguments.
    """
    # Before the recipe's class is imported, because an import already runs code.
    check_names(loaded, trust)
    try:
        recipe_class = resolve_recipe(loaded.config.recipe, trust, loaded.directory)
    except Rejected as error:
        raise RecipeError.all_of([problem_of("recipe", error, loaded.tree.at("recipe"))]) from error
    schema = getattr(recipe_class, "Config", RecipeConfig)
    complete = bind_recipe(loaded.path, loaded.parsed, loaded.overrides, schema=schema)
    checked = check_targets(complete, trust)
    for section, library in _NEEDED_BY.items():
        if getattr(checked.config, section, None) is not None:
            importlib.import_module(library)
    return PreparedRecipe(checked, recipe_class)


def resolve_recipe(name: str, trust: Trust, folder: Path = Path()) -> type[Any]:
    """Import a recipe's class: a registered name, ``package.module.Class``, or ``file.py:Class``.

    A file is searched in *folder* and in the working directory. Raises :class:`Rejected`.
    """
    if match := _FILE.fullmatch(name):
        found = _from_file(folder, match["path"], match["name"], trust)
    elif name.endswith(".py"):
        raise Rejected(f"{name} is a file, and no class in it is named", f"write {name}:CLASS")
    else:
        dotted = (target_of(name) or name).replace(":", ".")
        found = resolve(dotted, trust, "recipe")
    methods = ("setup", "run", "close")
    has_methods = all(callable(getattr(found, method, None)) for method in methods)
    config = getattr(found, "Config", RecipeConfig)
    if not isinstance(found, type) or not has_methods or not issubclass(config, RecipeConfig):
        raise Rejected(
            f"{name} is not a recipe",
            (
                "derive a class from a recipe, such as automodel_ckpt.recipes.llm_finetune.LLMFinetune; it needs the "
                "methods setup, run and close, and its Config is a RecipeConfig"
            ),
        )
    return found


def _from_file(folder: Path, written: str, name: str, trust: Trust) -> Any:
    candidates = [folder / written, Path(written)]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        searched = dict.fromkeys((str(folder.resolve()), str(Path.cwd())))
        raise Rejected(f"file {written} not found", f"searched {' and '.join(searched)}")
    if not trust.covers_file(path):
        raise Rejected(
            f"{path} is not trusted", f"if you trust this code, allow it with --trust {path}"
        )
    module_name = f"_recipe_{path.stem}"
    # Before the module runs, so that an error in it is reported as the user's.
    register_user_code(module_name)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up their module there while it is executed
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise import_failure(path, error) from error
    if not hasattr(module, name):
        raise Rejected(f"{path} has no {name}", f"did you mean {closest(name, dir(module))}?")
    return getattr(module, name)
