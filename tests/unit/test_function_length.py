"""Functions stay short enough to be read at once: the house's limit, measured."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 60


def function_lengths(source: str) -> Iterator[tuple[str, int]]:
    """(name, number of lines without decorators and docstring) of every function of a file, nested ones too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = node.body[0] if ast.get_docstring(node) is not None else None
            docstring = doc.end_lineno - doc.lineno + 1 if doc else 0
            yield node.name, node.end_lineno - node.lineno + 1 - docstring


def all_lengths() -> dict[str, int]:
    folders = (ROOT / "automodel_ckpt", ROOT / "recipes", ROOT / "tools")
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return {
        f"{file.relative_to(ROOT)}:{name}": lines
        for file in files
        for name, lines in function_lengths(file.read_text())
    }


def test_no_function_is_longer_than_sixty_lines() -> None:
    assert {name: lines for name, lines in all_lengths().items() if lines > MOST_LINES} == {}


def test_half_of_the_functions_are_under_ten_lines() -> None:
    assert statistics.median(all_lengths().values()) < 10


def test_a_long_function_is_measured_without_its_docstring() -> None:
    body = "\n".join("    x = 1" for _ in range(70))
    assert list(function_lengths(f'def long(x):\n    """One\n    two."""\n{body}\n')) == [("long", 71)]
