"""Check the arguments of builders, optimizers and losses before torch is imported.

Importing a builder imports torch, but mistakes in a recipe are reported before that. The signature of a builder is
therefore read from its source code, so that mistakes in ``dataset`` are reported together with all others. Signatures
that cannot be read this way are checked after the import, by ``targets.check_targets``, which checks all of them.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from automodel_ckpt.config.bind import INVALID, Binder
from automodel_ckpt.config.other_names import OTHER_NAMES
from automodel_ckpt.config.schema_keys import closest, field_at, hints_of, join
from automodel_ckpt.config.tree.convert import members
from automodel_ckpt.config.tree.references import is_reference
from automodel_ckpt.config.tree.rules import AT_LEAST_1, Rule, Target, own_keys
from automodel_ckpt.config.tree.yaml_tree import Node
from automodel_ckpt.errors import Problem

READ = ("automodel_ckpt.", "torch.optim.", "torch.nn.")
"""Prefixes of the names whose source is read: this package's builders, and torch's optimizers and losses."""
_ROW_DEFAULTS = "automodel_ckpt.data.rows.arguments.ROW_DEFAULTS"
# Two modules that import a name from each other would otherwise be followed without end.
_MAX_IMPORTS = 5
_RULES = {
    "seq_length": Rule(lambda length: length >= 2, "2 or more"),
    "max_samples": AT_LEAST_1,
    "shuffle_block": AT_LEAST_1,
}
"""Parameter -> its limit, in every builder of this package."""
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
    "Tensor": type(
        "Tensor", (), {"__module__": "torch"}
    ),  # a stand-in, because torch is not imported
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
    """A section with the ``_target_`` *name*, found at *key*.

    *supplied*: arguments that the recipe class adds. *own*: keys of the section that are not arguments.
    """

    key: str
    node: Node
    name: str
    supplied: tuple[str, ...]
    own: tuple[str, ...]


def builder_problems(root: Node, schema: type[Any]) -> list[Problem]:
    """Return the problems in the arguments of plug-ins in a recipe's tree that was bound to *schema*."""
    binder = Binder(schema, [])
    for plugin in plugins(root, schema):
        parameters = signature(plugin.name)
        if parameters:
            _check_plugin(binder, plugin, parameters)
    return binder.problems


def _check_plugin(binder: Binder, plugin: Plugin, parameters: Mapping[str, Parameter]) -> None:
    """Add the problems in the arguments of one plug-in to the binder's problems."""
    arguments = dict(plugin.node.children())
    for name, node in arguments.items():
        if name == "_target_" or name in plugin.own:
            continue
        if name not in parameters:
            problem = unknown_argument(plugin.key, plugin.name, name, node, parameters)
            binder.problems.append(problem)
        elif not is_plugin(node):
            key = join(plugin.key, name)
            _check_value(binder, parameters[name].annotation, name, node, key)
    for name, parameter in parameters.items():
        is_given = name in arguments or name in plugin.supplied
        if parameter.is_required and not is_given:
            problem = missing_argument(plugin.key, plugin.name, name, plugin.node)
            binder.problems.append(problem)


def needs_import(root: Node) -> bool:
    """Whether a recipe names a callable whose arguments cannot be checked before it is imported."""
    for _, node in _sections(root):
        name = node.at("_target_")
        if name is None or signature(str(name.value)) is None:
            return True
    return False


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
    """Yield the plug-ins in a recipe's tree that *schema* declares and whose ``_target_`` is within :data:`READ`."""
    for key, node in _sections(root):
        target = node.at("_target_")
        if target is None or not isinstance(target.value, str) or is_reference(target.value):
            continue
        declared = _declared(schema, key)
        if target.value.startswith(READ) and declared is not None:
            yield Plugin(key, node, target.value, *declared)


def _sections(tree: Node) -> Iterator[tuple[str, Node]]:
    """Yield (dotted key, node) of each section with a ``_target_``."""
    return ((key, node) for key, node in tree.walk() if is_plugin(node))


def is_plugin(node: Node) -> bool:
    """Whether a node is a section with a ``_target_``."""
    return isinstance(node.value, dict) and "_target_" in node.value


def _declared(schema: type[Any], key: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Look up the plug-in at a dotted key in *schema*.

    Returns the arguments that the recipe's class adds, and the keys that are not arguments. Returns None if *schema*
    has no such key.
    """
    parent = key.rpartition(".")[0]
    is_named = (
        typing.get_origin(hints_of(schema).get(parent)) is dict
    )  # a mapping from names to plug-ins
    found = field_at(schema, parent if is_named else key)
    if found is None:
        return None
    section, field = found
    own: list[str] = []
    for kind in members(hints_of(section)[field.name]):
        if isinstance(kind, type) and issubclass(kind, Target):
            own += own_keys(kind)
    return tuple(field.metadata.get("supplied", ())), tuple(own)


@functools.cache
def signature(name: str) -> Mapping[str, Parameter] | None:
    """Read the parameters of a function or class within :data:`READ` from its source; None if that is impossible."""
    if not name.startswith(READ) or not all(part.isidentifier() for part in name.split(".")):
        return None
    found = definition(name)
    # A decorator may change the signature.
    if found is None or isinstance(found, ast.Assign) or found.decorator_list:
        return None
    if isinstance(found, ast.FunctionDef):
        return _parameters(found.args, skip=0, module=name.rpartition(".")[0])
    for statement in found.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return _parameters(statement.args, skip=1, module="")  # self
    return None


def keywords_of(function: str) -> tuple[str, ...] | None:
    """Read the names of the keyword arguments of an installed function from its source, without importing it.

    Returns None if its library is not installed, or its source does not show all names.
    """
    found = definition(function)
    if not isinstance(found, ast.FunctionDef) or found.decorator_list:
        return None
    parameters = _parameters(found.args, skip=0, module=function.rpartition(".")[0])
    return None if parameters is None else tuple(parameters)


def definition(name: str, depth: int = 0) -> Definition | None:
    """Find the function, class or constant with a dotted name in its source.

    Follows imports from other modules, at most ``_MAX_IMPORTS`` of them. Returns None if it is not found.
    """
    located = _module_of(name)
    if located is None or depth > _MAX_IMPORTS:
        return None
    file, package, wanted = located
    try:
        body = _statements(file)
    except (OSError, SyntaxError, ValueError):
        return None
    for statement in body:
        if _defines(statement, wanted):
            return statement  # type: ignore[return-value]
        if not isinstance(statement, ast.ImportFrom):
            continue
        for alias in statement.names:
            imported_as = alias.asname or alias.name
            if imported_as not in (wanted, "*"):
                continue
            original = wanted if alias.name == "*" else alias.name
            found = definition(f"{_source_of(statement, package)}.{original}", depth + 1)
            if found is not None:
                return found
    return None


@functools.cache
def _statements(file: Path) -> list[ast.stmt]:
    """The statements of a module. Raises OSError, SyntaxError, ValueError."""
    return ast.parse(file.read_text(encoding="utf-8")).body


def _defines(statement: ast.stmt, wanted: str) -> bool:
    """Whether *statement* is the definition of a function, a class or a constant of this name."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name == wanted
    if not isinstance(statement, ast.Assign):
        return False
    (target, *_) = statement.targets
    return isinstance(target, ast.Name) and target.id == wanted


def _module_of(name: str) -> tuple[Path, str, str] | None:
    """Split a dotted name into its module's file, the package of this module, and the name in the module."""
    root, *parts = name.split(".")
    spec = importlib.util.find_spec(root)  # imports nothing, because it is a top-level package
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    package = root
    while len(parts) > 1 and (folder / parts[0] / "__init__.py").is_file():
        folder = folder / parts[0]
        package = f"{package}.{parts.pop(0)}"
    file = folder / "__init__.py"
    if len(parts) == 2:
        file = folder / f"{parts.pop(0)}.py"
    if len(parts) != 1:
        return None
    return file, package, parts[0]


def _source_of(statement: ast.ImportFrom, package: str) -> str:
    """Return the dotted name of the module that a statement in *package* imports from."""
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - statement.level + 1]
    if statement.module:
        parts.append(statement.module)
    return ".".join(parts)


def _parameters(
    arguments: ast.arguments, *, skip: int, module: str
) -> Mapping[str, Parameter] | None:
    options = {} if arguments.kwarg is None else _options(arguments.kwarg, module)
    # With **kwargs, the source does not show all accepted names: check_targets decides later.
    if options is None or arguments.posonlyargs:
        return None
    missing = [None] * (len(arguments.args) - len(arguments.defaults))
    given = [
        *zip(arguments.args, [*missing, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    own = {argument.arg: Parameter(_type(argument), default) for argument, default in given[skip:]}
    return own | options


def _options(argument: ast.arg, module: str) -> dict[str, Parameter] | None:
    """The fields of ``**options: Unpack[TYPED_DICT]`` in *module* of this package; None for other keywords."""
    annotation = argument.annotation
    is_unpacked = (
        isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Unpack"
    )
    if not is_unpacked or not module.startswith("automodel_ckpt."):
        return None
    assert isinstance(annotation, ast.Subscript)
    found, rows = definition(f"{module}.{ast.unparse(annotation.slice)}"), definition(_ROW_DEFAULTS)
    if not isinstance(found, ast.ClassDef) or not isinstance(rows, ast.Assign):
        return None
    assert isinstance(rows.value, ast.Call)
    defaults = {each.arg: each.value for each in rows.value.keywords}
    options = {}
    for field in found.body:
        if isinstance(field, ast.AnnAssign):
            name = ast.unparse(field.target)
            options[name] = Parameter(_type(field), defaults[name])
    return options


def _type(argument: ast.arg | ast.AnnAssign) -> Any:
    if argument.annotation is None:
        return Any
    names = {node.id for node in ast.walk(argument.annotation) if isinstance(node, ast.Name)}
    if not names <= _NAMES.keys():
        return Any
    # This is safe: the source is installed code, and the annotation contains only the names above.
    return eval(ast.unparse(argument.annotation), {"__builtins__": {}}, _NAMES)


def unknown_argument(
    key: str, target: str, name: str, node: Node, parameters: typing.Iterable[str]
) -> Problem:
    """Describe an argument that a plug-in does not accept."""
    accepted = list(parameters)
    meant = _counterpart(name, accepted) or closest(name, accepted)
    if meant:
        hint = f"did you mean {join(key, meant)}?"
    else:
        hint = f"{target} accepts {', '.join(accepted) or 'no keyword arguments'}"
    return Problem(f"unknown key {join(key, name)}", node.origin, str(node), hint)


def _counterpart(name: str, accepted: list[str]) -> str | None:
    """The one of the *accepted* arguments that other programs call *name*; None if there is none."""
    counterpart = OTHER_NAMES.get(name)
    for key in counterpart.keys if counterpart else ():
        argument_name = key.rpartition(".")[2]
        if argument_name in accepted:
            return argument_name
    return None


def missing_argument(key: str, target: str, name: str, section: Node | None) -> Problem:
    """Describe a required argument of a plug-in that is missing."""
    what = f"{join(key, name)} is missing: {target} requires it"
    where = section.origin if section else ""
    return Problem(what, where, "", f"add {join(key, name)}")


def argument(plugin: Plugin, name: str, default: Any = None) -> Any:
    """Return the typed value of a builder's argument; *default* if it is missing or invalid."""
    node = plugin.node.at(name)
    parameters = signature(plugin.name)
    if node is None or parameters is None or name not in parameters:
        return default
    binder = Binder(object, [])
    value = binder.value(parameters[name].annotation, node, join(plugin.key, name))
    return default if value is INVALID else value
