"""Check the arguments of this package's builders before torch is imported.

Importing a builder imports torch, but mistakes in a recipe are reported before that. The signature of a builder is
therefore read from its source code, so that mistakes in ``dataset`` are reported together with all others. The
arguments of other callables, and nested ones, are checked after the import, by ``prepare.check_targets``.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from automodel_ckpt.config.bind import CORRECT, INVALID, Binder
from automodel_ckpt.config.keys.optimizer import OptimizerTarget, TargetGroup
from automodel_ckpt.config.other_names import OTHER_NAMES
from automodel_ckpt.config.schema_keys import closest, join
from automodel_ckpt.config.tree.rules import AT_LEAST_1, AT_LEAST_2, own_keys
from automodel_ckpt.config.tree.yaml_tree import Node
from automodel_ckpt.errors import Problem

PACKAGE = "automodel_ckpt."
SUPPLIED = ("tokenizer", "processor", "params", "reduction", "model", "labels")
"""Parameters that the recipe's class adds; they are no keys of a recipe."""
_ROW_DEFAULTS = "automodel_ckpt.data.rows.arguments.ROW_DEFAULTS"
_RULES = {"seq_length": AT_LEAST_2, "max_samples": AT_LEAST_1, "shuffle_block": AT_LEAST_1}
"""Parameter -> its limit, in every builder of this package."""
_OWN_KEYS = {*own_keys(OptimizerTarget), *own_keys(TargetGroup)}
"""Keys of sections with ``_target_`` that are not arguments."""
_NAMES: dict[str, Any] = {
    "Any": Any,
    "Literal": Literal,
    **{each.__name__: each for each in (bool, dict, float, int, list, str, tuple)},
}
"""The names that an annotation may consist of. An annotation with another name accepts any value."""

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign


@dataclass(frozen=True)
class Parameter:
    """A parameter of a builder that can be passed as a keyword."""

    annotation: Any
    default: ast.expr | None

    @property
    def is_required(self) -> bool:
        return self.default is None


@dataclass(frozen=True)
class Plugin:
    """A section of the recipe with the ``_target_`` *name*, found at *key*, and its parameters."""

    key: str
    node: Node
    name: str
    parameters: Mapping[str, Parameter]

    def argument(self, name: str, default: Any = None) -> Any:
        """Return the typed value of an argument; *default* if it is missing or invalid."""
        node = self.node.at(name)
        if node is None or name not in self.parameters:
            return default
        value = Binder(object, []).value(self.parameters[name].annotation, node, "")
        return default if value is INVALID else value


def builder_problems(root: Node) -> list[Problem]:
    """Return the problems in the arguments of this package's builders in a recipe's tree."""
    binder = Binder(object, [])
    for plugin in plugins(root):
        _check_plugin(binder, plugin)
    return binder.problems


def _check_plugin(binder: Binder, plugin: Plugin) -> None:
    """Add the problems in the arguments of one plug-in to the binder's problems."""
    arguments = dict(plugin.node.children())
    for name, node in arguments.items():
        parameter, key = plugin.parameters.get(name), join(plugin.key, name)
        if name == "_target_" or name in _OWN_KEYS:
            continue
        if parameter is None:
            problem = unknown_argument(plugin.key, plugin.name, name, node, plugin.parameters)
            binder.problems.append(problem)
        elif not is_plugin(node):
            value, rule = binder.value(parameter.annotation, node, key), _RULES.get(name)
            if rule is not None and type(value) is int and not rule.accepts(value):
                binder.note(f"{key} must be {rule.expected}", node, node, CORRECT)
    for name, parameter in plugin.parameters.items():
        if parameter.is_required and name not in arguments and name not in SUPPLIED:
            problem = missing_argument(plugin.key, plugin.name, name, plugin.node)
            binder.problems.append(problem)


def needs_import(root: Node) -> bool:
    """Whether a recipe names a callable with arguments that cannot be checked before it is imported."""
    targets = [node.at("_target_") for _, node in root.walk() if is_plugin(node)]
    return any(target is None or signature(str(target.value)) is None for target in targets)


def plugins(root: Node) -> Iterator[Plugin]:
    """Yield the sections in a recipe's tree with a ``_target_`` in this package."""
    for key, node in root.walk():
        target = node.at("_target_") if is_plugin(node) else None
        if target is not None and (parameters := signature(str(target.value))) is not None:
            yield Plugin(key, node, str(target.value), parameters)


def is_plugin(node: Node) -> bool:
    """Whether a node is a section with a ``_target_``."""
    return isinstance(node.value, dict) and "_target_" in node.value


@functools.cache
def signature(name: str) -> Mapping[str, Parameter] | None:
    """Read the parameters of a function or class of this package from its source.

    Returns None when that is impossible.
    """
    found = definition(name)
    if isinstance(found, ast.ClassDef):
        methods = [each for each in found.body if isinstance(each, ast.FunctionDef)]
        found = next((each for each in methods if each.name == "__init__"), None)
    # A decorator may change the signature.
    if not isinstance(found, ast.FunctionDef) or found.decorator_list or found.args.posonlyargs:
        return None
    options = _options(found.args.kwarg, name.rpartition(".")[0])
    if options is None:
        return None
    arguments = found.args
    missing = [None] * (len(arguments.args) - len(arguments.defaults))
    given = [
        *zip(arguments.args, [*missing, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    own = {each.arg: Parameter(_type(each), default) for each, default in given}
    own.pop("self", None)
    return own | options


def definition(name: str) -> Definition | None:
    """Find the function, class or constant with a dotted name of this package in its source.

    Follows an import from another module of this package. Returns None when it is not found.
    """
    module, _, wanted = name.rpartition(".")
    parts = module.split(".")
    if not name.startswith(PACKAGE) or not all(part.isidentifier() for part in parts):
        return None
    file = Path(__file__).parents[2].joinpath(*parts[1:]).with_suffix(".py")
    for statement in _statements(file) if file.is_file() else ():
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == wanted:
            return statement
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == wanted:
            return statement
        imported = statement.names if isinstance(statement, ast.ImportFrom) else []
        if isinstance(statement, ast.ImportFrom) and wanted in [each.name for each in imported]:
            return definition(f"{statement.module}.{wanted}")
    return None


@functools.cache
def _statements(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body


def _options(argument: ast.arg | None, module: str) -> dict[str, Parameter] | None:
    """The fields of ``**options: Unpack[TYPED_DICT]`` in *module*; None for other keywords."""
    if argument is None:
        return {}
    annotation = argument.annotation
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "Unpack":
        return None
    found, rows = definition(f"{module}.{ast.unparse(annotation.slice)}"), definition(_ROW_DEFAULTS)
    assert isinstance(found, ast.ClassDef) and isinstance(rows, ast.Assign)
    assert isinstance(rows.value, ast.Call)
    defaults = {each.arg: each.value for each in rows.value.keywords}
    fields = [each for each in found.body if isinstance(each, ast.AnnAssign)]
    names = [ast.unparse(field.target) for field in fields]
    return {
        name: Parameter(_type(field), defaults[name])
        for name, field in zip(names, fields, strict=True)
    }


def _type(argument: ast.arg | ast.AnnAssign) -> Any:
    if argument.annotation is None:
        return Any
    names = {node.id for node in ast.walk(argument.annotation) if isinstance(node, ast.Name)}
    if not names <= _NAMES.keys():
        return Any
    # This is safe: the source is installed code, and the annotation contains only the names above.
    return eval(ast.unparse(argument.annotation), {"__builtins__": {}}, _NAMES)


def unknown_argument(
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


def missing_argument(key: str, target: str, name: str, section: Node | None) -> Problem:
    """Describe a required argument of a plug-in that is missing."""
    what = f"{join(key, name)} is missing: {target} requires it"
    where = section.origin if section else ""
    return Problem(what, where, "", f"add {join(key, name)}")
