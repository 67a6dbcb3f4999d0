"""The parameters of this package's builders, for help and the JSON schema.

Importing a builder imports torch, which takes seconds. Its signature is therefore read from its source code.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PACKAGE = "automodel_ckpt."
SUPPLIED = ("tokenizer", "processor", "params", "reduction", "model", "labels")
"""Parameters that the recipe's class adds; they are no keys of a recipe."""
_ROW_DEFAULTS = "automodel_ckpt.data.rows.arguments.ROW_DEFAULTS"
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
