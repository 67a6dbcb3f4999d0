"""Print figures of how dense the code is, and the places with the largest ones.

python -m tools.shape                      # this tree
python -m tools.shape --worst 20           # with the functions to read first
python -m tools.shape ../torchtitan/torchtitan   # any other tree, for comparison

The figures are informational: no check fails on them. They show which code to review.

    nodes per line   syntax nodes (ast.walk) per line of a function's body, docstring excluded; median over functions
    comprehensions   list, set and dict comprehensions and generator expressions per 1,000 lines
    conditionals     conditional expressions (a if b else c) per 1,000 lines
    comments         comments per 100 lines
    elliptical       docstrings that cannot be understood alone: they begin with Of, The same, As, or See
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN_DIRECTORIES = ("automodel_ckpt", "recipes", "tools")
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ELLIPTICAL = re.compile(r"(Of|The same|As|See)\b")
_LONG_LINES = 60


@dataclass(frozen=True)
class Function:
    """A function's place, its number of lines without the docstring, and its syntax nodes."""

    place: str
    num_lines: int
    num_nodes: int
    nodes_per_line: float


@dataclass
class Shape:
    """What was counted in a set of files."""

    num_files: int = 0
    num_lines: int = 0
    num_comments: int = 0
    num_comprehensions: int = 0
    num_conditionals: int = 0
    functions: list[Function] = field(default_factory=list)
    elliptical: list[str] = field(default_factory=list)
    classes: list[tuple[int, str]] = field(default_factory=list)
    """Number of methods and place of each class."""


def python_files(directories: Sequence[Path]) -> Iterator[Path]:
    """Yield the Python files below some directories, without following symbolic links."""
    for directory in directories:
        for path in sorted(directory.rglob("*.py")):
            if not path.is_symlink() and not any(parent.is_symlink() for parent in path.parents):
                yield path


def shape_of(files: Sequence[Path]) -> Shape:
    """Count what the files contain. A file that is not Python is skipped."""
    shape = Shape()
    for file in files:
        text = file.read_text(errors="replace")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        shape.num_files += 1
        shape.num_lines += text.count("\n")
        shape.num_comments += _num_comments(text)
        for node in ast.walk(tree):
            _count(node, file, shape)
    return shape


def _count(node: ast.AST, file: Path, shape: Shape) -> None:
    if isinstance(node, _COMPREHENSIONS):
        shape.num_comprehensions += 1
    elif isinstance(node, ast.IfExp):
        shape.num_conditionals += 1
    elif isinstance(node, ast.ClassDef):
        num_methods = sum(isinstance(part, _FUNCTIONS) for part in node.body)
        shape.classes.append((num_methods, f"{file}:{node.lineno} {node.name}"))
        _check_docstring(node, file, shape)
    elif isinstance(node, _FUNCTIONS):
        shape.functions.append(_function(node, file))
        _check_docstring(node, file, shape)


def _check_docstring(
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, file: Path, shape: Shape
) -> None:
    if _ELLIPTICAL.match(ast.get_docstring(node) or ""):
        shape.elliptical.append(f"{file}:{node.lineno} {node.name}")


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, file: Path) -> Function:
    body = node.body
    if ast.get_docstring(node) is not None:
        body = body[1:]
    place = f"{file}:{node.lineno} {node.name}"
    if not body:
        return Function(place, 1, 0, 0.0)
    num_nodes = 0
    for statement in body:
        num_nodes += sum(1 for _ in ast.walk(statement))
    last_line = body[-1].end_lineno or body[-1].lineno
    num_lines = last_line - body[0].lineno + 1
    return Function(place, num_lines, num_nodes, num_nodes / num_lines)


def _num_comments(text: str) -> int:
    try:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return sum(token.type == tokenize.COMMENT for token in tokens)
    except (tokenize.TokenError, IndentationError):
        return 0


def figures(shape: Shape) -> list[tuple[str, str]]:
    """Return (name, value) of each figure."""
    lengths = sorted(function.num_lines for function in shape.functions)
    nodes = sorted(function.num_nodes for function in shape.functions)
    density = statistics.median(function.nodes_per_line for function in shape.functions)
    thousands = shape.num_lines / 1000
    most_methods, largest = max(shape.classes, default=(0, "none"))
    num_long = sum(length > _LONG_LINES for length in lengths)
    return [
        ("files, lines", f"{shape.num_files}, {shape.num_lines:,}"),
        ("syntax nodes per line of a function, median", f"{density:.1f}"),
        (
            "syntax nodes per function, median / p95",
            f"{statistics.median(nodes):.0f} / {_percentile(nodes, 0.95)}",
        ),
        (
            "lines per function, median / p95",
            f"{statistics.median(lengths):.0f} / {_percentile(lengths, 0.95)}",
        ),
        (f"functions above {_LONG_LINES} lines", str(num_long)),
        ("comprehensions per 1,000 lines", f"{shape.num_comprehensions / thousands:.1f}"),
        ("conditional expressions per 1,000 lines", f"{shape.num_conditionals / thousands:.1f}"),
        ("comments per 100 lines", f"{shape.num_comments / thousands / 10:.1f}"),
        ("docstrings that need their neighbor", str(len(shape.elliptical))),
        ("methods of the largest class", f"{most_methods} ({largest.rpartition(' ')[2]})"),
    ]


def _percentile(ordered: Sequence[int], part: float) -> int:
    return ordered[int(part * (len(ordered) - 1))]


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures; the exit code is 2 where there is no Python function to measure."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.shape", description="Print how dense the code is."
    )
    parser.add_argument(
        "directories", nargs="*", type=Path, help="what to measure (this repository's own code)"
    )
    parser.add_argument(
        "--worst", type=int, default=0, metavar="N", help="also print the N densest functions"
    )
    options = parser.parse_args(words)
    directories = options.directories or [ROOT / name for name in OWN_DIRECTORIES]
    shape = shape_of(list(python_files(directories)))
    if not shape.functions:
        print("error: there is no Python function in these directories")
        return 2
    rows = figures(shape)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    _print_worst(shape, options.worst)
    return 0


def _print_worst(shape: Shape, count: int) -> None:
    if not count:
        return
    print("\nmost nodes per line (functions of 5 lines and more):")
    longer = [function for function in shape.functions if function.num_lines >= 5]
    for function in sorted(longer, key=lambda one: -one.nodes_per_line)[:count]:
        print(f"  {function.nodes_per_line:5.1f}  {function.place}")
    print("\ndocstrings that need their neighbor:")
    for place in shape.elliptical[:count]:
        print(f"  {place}")


if __name__ == "__main__":
    sys.exit(main())
