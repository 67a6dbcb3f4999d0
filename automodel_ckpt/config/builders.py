"""Arguments of builders, optimizers and losses, checked before torch is imported.

Importing a builder imports torch, and what is wrong with a recipe is reported before that. A builder's ``def`` line is
therefore read from its source, so that mistakes in ``dataset`` are reported together with all others. What cannot be
read in this way is checked after the import, by ``targets.check_targets``, which looks at everything.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from automodel_ckpt.config.bind import INVALID, Binder, closest, hints_of, join
from automodel_ckpt.config.convert import members, section_type
from automodel_ckpt.config.references import is_reference
from automodel_ckpt.config.schema import AT_LEAST_1, Rule, Target, own_keys
from automodel_ckpt.config.yaml_tree import Node
from automodel_ckpt.errors import Problem

READ = ("automodel_ckpt.", "torch.optim.", "torch.nn.")
"""What is read: this package's builders, optimizers and losses. All of it is on the allowlist or rejected there."""
_MAX_IMPORTS = 5
_RULES = {
    "seq_length": Rule(lambda length: length >= 2, "2 or more"),
    "max_samples": AT_LEAST_1,
    "shuffle_block": AT_LEAST_1,
}
"""Limits that parameters of these names have in every builder here."""
_NAMES: dict[str, Any] = {
    "Any": Any,
    "Literal": Literal,
    "Optional": typing.Optional,
    "Union": typing.Union,
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "str": str,
    "tuple": tuple,
    "Tensor": type("Tensor", (), {"__module__": "torch"}),  # which no text is read as
}
"""What annotations of scalars, lists and mappings are made of; any other name says nothing about text."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a builder that can be given by its name."""

    annotation: Any
    is_required: bool


@dataclass(frozen=True)
class Plugin:
    """A section with the ``_target_`` *name*, found at *key*.

    *supplied*: arguments that the recipe class adds. *own*: keys of the section that are not arguments.
    """

    key: str
    node: Node
    name: str
    supplied: tuple[str, ...]
    own: tuple[str, ...]


def builder_problems(root: Node, schema: type[Any]) -> list[Problem]:
    """What is wrong with the arguments of plug-ins in a recipe's tree that was read by *schema*."""
    binder = Binder(schema, [])
    for plugin in plugins(root, schema):
        parameters = signature(plugin.name) or {}
        for name, node in dict(plugin.node.children()).items():
            if name in plugin.own or not parameters:
                continue
            if name not in ("_target_", *parameters):
                binder.problems.append(
                    unknown_argument(plugin.key, plugin.name, name, node, parameters)
                )
            elif name in parameters and not is_plugin(node):
                _check_value(
                    binder, parameters[name].annotation, name, node, join(plugin.key, name)
                )
        given = {*dict(plugin.node.children()), *plugin.supplied}
        for name in [name for name, parameter in parameters.items() if parameter.is_required]:
            if name not in given:
                binder.problems.append(missing_argument(plugin.key, plugin.name, name, plugin.node))
    return binder.problems


def needs_import(root: Node) -> bool:
    """Whether a recipe names something whose arguments cannot be checked before it is imported."""
    names = [node.at("_target_") for _, node in _sections(root, "")]
    return any(name is None or signature(str(name.value)) is None for name in names)


def _check_value(binder: Binder, annotation: Any, name: str, node: Node, key: str) -> None:
    value = binder.value(annotation, node, key)
    rule = _RULES.get(name)
    if rule is not None and type(value) is int and not rule.accepts(value):
        binder.note(
            f"{key} must be {rule.expected}",
            node,
            node,
            "correct the value, or remove the key to use its default",
        )


def plugins(root: Node, schema: type[Any]) -> Iterator[Plugin]:
    """The sections that *schema* declares and whose ``_target_`` is one of :data:`READ`, in a recipe's tree."""
    for key, node in _sections(root, ""):
        target = node.at("_target_")
        if target is None or not isinstance(target.value, str) or is_reference(target.value):
            continue
        declared = _declared(schema, key)
        if target.value.startswith(READ) and declared is not None:
            yield Plugin(key, node, target.value, *declared)


def _sections(node: Node, key: str) -> Iterator[tuple[str, Node]]:
    if is_plugin(node):
        yield key, node
    for name, child in node.children():
        yield from _sections(child, join(key, name))


def is_plugin(node: Node) -> bool:
    """Whether a node is a section with a ``_target_``."""
    return isinstance(node.value, dict) and "_target_" in node.value


def _declared(schema: type[Any], key: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """What *schema* says of the plug-in at a dotted key: arguments that are added, and keys that are no arguments; None
    where it has no such key."""
    section: type[Any] | None = schema
    *parents, last = key.split(".")
    for name in parents:
        section = section_type(members(hints_of(section).get(name, Any))) if section else None
    for field in fields(section) if section else ():
        if field.name == last:
            kinds = members(hints_of(section)[last])
            plug_ins = [
                kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Target)
            ]
            own = [name for kind in plug_ins for name in own_keys(kind)]
            return tuple(field.metadata.get("supplied", ())), tuple(own)
    return None


@functools.cache
def signature(name: str) -> Mapping[str, Parameter] | None:
    """The parameters of a function or class of :data:`READ`, from its source; None where they cannot be known."""
    if not name.startswith(READ) or not all(part.isidentifier() for part in name.split(".")):
        return None
    found = _definition(name)
    if found is None or found.decorator_list:
        return None
    if isinstance(found, ast.FunctionDef):
        return _parameters(found.args, skip=0)
    made = [
        each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    ]
    return _parameters(made[0].args, skip=1) if made else None


def _definition(name: str, depth: int = 0) -> ast.FunctionDef | ast.ClassDef | None:
    """The definition that a dotted name leads to, through modules that import it from others."""
    root, *parts = name.split(".")
    spec = importlib.util.find_spec(root)  # of a package this imports nothing
    if spec is None or spec.origin is None or depth > _MAX_IMPORTS:
        return None
    folder, module = Path(spec.origin).parent, [root]
    while len(parts) > 1 and (folder / parts[0] / "__init__.py").is_file():
        folder, module = folder / parts[0], [*module, parts.pop(0)]
    file, package = folder / "__init__.py", ".".join(module)
    if len(parts) == 2:
        file = folder / f"{parts.pop(0)}.py"
    if len(parts) != 1:
        return None
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return None
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == parts[0]:
            return statement
        if isinstance(statement, ast.ImportFrom):
            imported = [
                alias.name
                for alias in statement.names
                if (alias.asname or alias.name) in (parts[0], "*")
            ]
            for original in imported:
                wanted = parts[0] if original == "*" else original
                found = _definition(f"{_source_of(statement, package)}.{wanted}", depth + 1)
                if found is not None:
                    return found
    return None


def _source_of(statement: ast.ImportFrom, package: str) -> str:
    """The dotted name of the module that a statement in *package* imports from."""
    if not statement.level:
        return statement.module or ""
    parents = package.split(".")
    above = parents[: len(parents) - statement.level + 1]
    return ".".join([*above, *([statement.module] if statement.module else [])])


def _parameters(arguments: ast.arguments, *, skip: int) -> Mapping[str, Parameter] | None:
    if arguments.kwarg is not None or arguments.posonlyargs:
        return None
    positional = arguments.args
    num_required = len(positional) - len(arguments.defaults)
    found = {
        each.arg: Parameter(_type(each), number < num_required)
        for number, each in enumerate(positional)
    }
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[each.arg] = Parameter(_type(each), default is None)
    return dict(list(found.items())[skip:])


def _type(argument: ast.arg) -> Any:
    if argument.annotation is None:
        return Any
    names = {node.id for node in ast.walk(argument.annotation) if isinstance(node, ast.Name)}
    if not names <= _NAMES.keys():
        return Any
    # The source is installed code, and the annotation is made of the names above.
    return eval(ast.unparse(argument.annotation), {"__builtins__": {}}, _NAMES)


def unknown_argument(
    key: str, target: str, name: str, node: Node, parameters: typing.Iterable[str]
) -> Problem:
    """The problem of an argument that a plug-in does not take."""
    parameters = list(parameters)
    meant = closest(name, parameters)
    takes = ", ".join(parameters) or "no keyword arguments"
    hint = f"did you mean {join(key, meant)}?" if meant else f"{target} accepts {takes}"
    return Problem(f"unknown key {join(key, name)}", node.origin, str(node), hint)


def missing_argument(key: str, target: str, name: str, section: Node | None) -> Problem:
    """The problem of an argument that a plug-in cannot do without."""
    what = f"{join(key, name)} is missing: {target} requires it"
    return Problem(what, section.origin if section else "", "", f"add {join(key, name)}")


def argument(plugin: Plugin, name: str, default: Any = None) -> Any:
    """The typed value of a checked argument of a builder; *default* where it was not given or is a mistake."""
    node, parameters = plugin.node.at(name), signature(plugin.name)
    if node is None or parameters is None or name not in parameters:
        return default
    value = Binder(object, []).value(parameters[name].annotation, node, join(plugin.key, name))
    return default if value is INVALID else value
