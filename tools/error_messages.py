"""The error messages of the package and the recipes, read from the source: kind, message and remedy of each.

A place that makes an error often stands in a helper that gets its words from callers. Each call of such a helper is a
message of its own; its words are put in place of the parameters.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("RecipeError", "CheckpointUnusable", "SaveFailed", "Stopped", "Problem", "os_problem")
BECOME = {
    "ExportFailed": "SaveFailed", "Refused": "RecipeError", "ReferenceFailed": "RecipeError",
    "Unlearnable": "RecipeError",
}  # fmt: skip
"""What is raised within the program -> the kind that a user sees it as."""
POSITIONS = {
    "os_problem": ("error", "what"), "Refused": ("what", "remedy"), "ReferenceFailed": ("what", "remedy"),
    "Unlearnable": ("what", "value", "remedy"),
}  # fmt: skip
"""Order of the arguments where it is not that of :class:`automodel_ckpt.errors.Problem`."""
_PARTS = ("what", "where", "value", "remedy")
_DEEPEST = 4
Bound = Mapping[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Message:
    """What one error says: its *kind* (a name of ``KINDS``), message and remedy; … stands for what is filled in."""

    kind: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Module:
    """A source file: {name: its calls and the functions they stand in}, constants, {name: module} of its imports."""

    stem: str
    calls: Mapping[str, list[tuple[Function, ast.Call]]]
    texts: Mapping[str, ast.expr]
    imported: Mapping[str, str]


@functools.cache
def messages() -> list[Message]:
    """All of them, sorted, each once."""
    modules = [_module(file) for file in sorted(sources())]
    return sorted({found for module in modules for found in Reader(module, modules).messages()})


def sources() -> Iterator[Path]:
    """Every file that makes errors."""
    for room in (ROOT / "automodel_ckpt", ROOT / "recipes"):
        for file in room.rglob("*.py"):
            if "examples" not in file.parts and file.name != "errors.py":
                yield file


def _module(file: Path) -> Module:
    tree = ast.parse(file.read_text())
    calls = defaultdict[str, list[tuple[Function, ast.Call]]](list)
    for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
        for call in _own_calls(function):
            calls[_name(call.func)].append((function, call))
    texts = {name: node.value for node in tree.body if isinstance(node, ast.Assign) for name in _targets(node)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {each.name: str(node.module).rpartition(".")[2] for node in imports for each in node.names}
    return Module(file.stem, dict(calls), texts, imported)


def _targets(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


class Reader:
    """Finds the messages that one module makes; words that come from callers are looked for in all of them."""

    def __init__(self, module: Module, modules: list[Module]) -> None:
        self._module, self._modules = module, modules
        self._texts = {name: text for each in modules for name, text in each.texts.items()} | dict(module.texts)

    def messages(self) -> Iterator[Message]:
        """Those whose words are in the source."""
        for name in (*KINDS, *BECOME):
            for function, call in self._module.calls.get(name, ()):
                if isinstance(call.func, ast.Name):
                    given = _arguments(call, POSITIONS.get(name, _PARTS))
                    yield from self._said(BECOME.get(name, name), given, function)

    def _said(self, kind: str, given: Mapping[str, ast.expr], function: Function) -> Iterator[Message]:
        wanted = {name for part in ("what", "remedy") if part in given for name in _names(given[part])}
        for bound in self._bindings(function, frozenset(wanted), _DEEPEST):
            what, remedy = (self.text(given.get(part), function, bound) for part in ("what", "remedy"))
            if any(character.isalpha() for character in what.partition(" (or: ")[0]):
                yield Message(kind, what, remedy)

    def _bindings(self, function: Function, wanted: frozenset[str], depth: int) -> Iterator[Bound]:
        """The words that each caller of *function* gives for those of its parameters that are *wanted*."""
        parameters = [name for name in _parameters(function) if name not in ("self", "cls")]
        if not wanted.intersection(parameters) or not depth:
            yield {}
            return
        found = False
        for caller, call in self._callers(function.name):
            found = True
            given = _arguments(call, parameters)
            names = frozenset(name for value in given.values() for name in _names(value))
            for outer in self._bindings(caller, names, depth - 1):
                yield {name: self.text(given[name], caller, outer) for name in wanted & given.keys()}
        if not found:
            yield {}

    def _callers(self, name: str) -> Iterator[tuple[Function, ast.Call]]:
        """Calls in this module; of a public function also those in modules that import it."""
        for module in [self._module] if name.startswith("_") else self._modules:
            if module is self._module or module.imported.get(name) == self._module.stem:
                yield from module.calls.get(name, ())

    def text(self, node: ast.expr | None, function: Function, bound: Bound) -> str:
        """What *node* comes to in *function*, whose parameters have the texts *bound*."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(self.text(part, function, bound) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            words = bound.get(_name(node.value), "…")
            return words if " " in words else "…"  # a name, not a part of the sentence
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.text(node.left, function, bound) + self.text(node.right, function, bound)
        if isinstance(node, ast.IfExp):
            return _either(*(self.text(each, function, bound) for each in _outcomes(node)))
        return self._named(node, function, bound) if isinstance(node, ast.Name) else "…"

    def _named(self, node: ast.Name, function: Function, bound: Bound) -> str:
        if node.id in bound:
            return bound[node.id]
        made = [found for found in ast.walk(function) if isinstance(found, ast.Assign) and node.id in _targets(found)]
        values = [found.value for found in made]
        if not values and node.id in self._texts and node.id not in _parameters(function):
            values = [self._texts[node.id]]
        simple = [value for value in values if node.id not in _names(value)]
        return _either(*(self.text(value, function, bound) for value in simple)) if simple else "…"


def _parameters(function: Function) -> list[str]:
    """Names, those without a position last."""
    given = function.args
    return [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def _own_calls(function: Function) -> Iterator[ast.Call]:
    """The calls in a function, without those of functions in it."""
    inside: list[ast.AST] = list(function.body)
    while inside:
        node = inside.pop()
        if isinstance(node, ast.Call):
            yield node
        inside += [child for child in ast.iter_child_nodes(node) if not isinstance(child, Function)]


def _arguments(call: ast.Call, names: Sequence[str]) -> dict[str, ast.expr]:
    positional = dict(zip(names, call.args, strict=False))
    return positional | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _names(node: ast.expr) -> set[str]:
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


def _outcomes(node: ast.expr) -> list[ast.expr]:
    return [*_outcomes(node.body), *_outcomes(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def _either(*texts: str) -> str:
    first, *others = dict.fromkeys(texts)
    return first + "".join(f" (or: {other})" for other in others if other)
