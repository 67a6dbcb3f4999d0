"""The signatures and docstrings of Python's standard library, which are found without importing it.

They depend on the version of the interpreter. About a tenth of the modules, chosen by a hash of their names, is the
validation split.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from automodel_ckpt.data.samples.samples import cached
from automodel_ckpt.errors import RecipeError

# Part of the cache's key: increase it when _module_pairs finds other pairs.
_FORMAT = 1
_FILE = "pairs.json"
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
)


class DocstringPair(NamedTuple):
    """A signature and its docstring."""

    module: str
    """The name of the module, such as ``email.message``."""
    where: str
    """The path of the file and the line of the definition."""
    prompt: str
    """The signature as in the source, without the body, and a newline."""
    docstring: str


def library_pairs(split: str) -> list[DocstringPair]:
    """List the pairs of a *split*, ``train`` or ``validation``. A pair that occurs several times is listed once."""
    all_pairs = _all_pairs()
    chosen = set(of_split({pair.module for pair in all_pairs}, split))
    found: dict[tuple[str, str], DocstringPair] = {}
    for pair in all_pairs:
        if pair.module in chosen:
            found.setdefault((pair.prompt, pair.docstring), pair)
    return list(found.values())


def library_docstrings(modules: Sequence[str], split: str) -> list[tuple[str, str]]:
    """List (module, docstring) of the docstrings in *modules* of the standard library and in their submodules.

    A docstring that occurs several times is listed once. About a tenth, chosen by a hash of the text, is the split
    ``validation``, the others are ``train``. Raises :class:`RecipeError` for a module without docstrings.
    """
    found: dict[str, str] = {}
    for pair in _all_pairs():
        module = next((each for each in modules if f"{pair.module}.".startswith(f"{each}.")), None)
        if module is not None:
            found.setdefault(pair.docstring, module)
    missing = [module for module in modules if module not in found.values()]
    if missing:
        raise RecipeError(
            "this Python has no docstrings in a module",
            where="classification.labels",
            value=", ".join(missing),
            hint="name modules or packages of the standard library, such as asyncio, email or logging",
        )
    chosen = of_split(found, split)
    return [(found[docstring], docstring) for docstring in chosen]


def _all_pairs() -> list[DocstringPair]:
    """List the pairs of all modules in the order of their files. Parsing takes seconds, so the list is cached."""

    def build(directory: Path) -> None:
        root = library_directory()
        pairs: list[DocstringPair] = []
        for path in _library_files(root):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            pairs += _module_pairs(name, path)
        (directory / _FILE).write_text(json.dumps(pairs))

    directory = cached("python_docs-library", (_FORMAT, library_digest()), build)
    return [DocstringPair(*fields) for fields in json.loads((directory / _FILE).read_text())]


def _module_pairs(module: str, path: Path) -> Iterator[DocstringPair]:
    """Yield the pairs of a module without importing it: some imports have side effects."""
    try:
        # From bytes, so that a module's own declaration of its encoding is followed.
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for name, node in _definitions(tree, module):
        docstring = ast.get_docstring(node)
        if docstring:
            where = f"{path}:{node.lineno}"
            yield DocstringPair(module, where, f"{_signature(name, node)}\n", docstring)


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, _Definition):
            name = f"{prefix}.{node.name}"
            yield name, node
            yield from _definitions(node, name)
        elif not isinstance(node, ast.expr):
            yield from _definitions(node, prefix)


def _signature(name: str, node: _Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {name}({bases}):" if bases else f"class {name}:"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    arguments = ast.unparse(node.args)
    signature = f"{keyword} {name}({arguments})"
    if node.returns:
        signature += f" -> {ast.unparse(node.returns)}"
    return f"{signature}:"


def library_directory() -> Path:
    return Path(os.__file__).parent


def _library_files(root: Path) -> list[Path]:
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = set(path.relative_to(root).parts)
        if not parts & _NOT_LIBRARY:
            files.append(path)
    return files


def library_digest() -> str:
    """The version of the interpreter and the path of its library.

    A digest of the content would have to read twelve megabytes at each start.
    """
    return f"{sys.version} {library_directory()}"


def of_split(names: Iterable[str], split: str) -> list[str]:
    """Return a tenth of the names for validation, or the others for training."""
    chosen = []
    for name in names:
        is_validation = _bucket(name) == 0
        if is_validation == (split == "validation"):
            chosen.append(name)
    return chosen


def _bucket(name: str) -> int:
    # Not hash(), which differs between processes.
    return hashlib.blake2b(name.encode(), digest_size=1).digest()[0] % 10
