"""Write docs/features.md: what each feature costs, and who asked for it. ``tools.make_reference`` calls it.

A module belongs to the first row of features.txt with a pattern that its path matches.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.support import ROOT, table

PAGE = ROOT / "docs" / "features.md"

TABLE = Path(__file__).with_suffix(".txt")


@dataclass
class Feature:
    """A row of the page. *code* and *docs* match the paths that belong to it."""

    name: str
    asked: str
    code: re.Pattern[str]
    docs: re.Pattern[str] | None
    files: list[Path] = field(default_factory=list)
    nodes: int = 0
    tests: int = 0
    words: int = 0


def modules() -> Iterator[Path]:
    """The modules of the package and the recipes, without those that a symlink shows again."""
    for top in ("automodel_ckpt", "recipes"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if not any(parent.is_symlink() for parent in (path, *path.parents)):
                yield path


def rows() -> list[Feature]:
    found = []
    for line in TABLE.read_text().splitlines()[1:]:
        name, asked, patterns = line.split("|", 2)
        code, _, docs = patterns.partition(";")
        found.append(Feature(name, asked, re.compile(code), re.compile(docs) if docs else None))
    return found


def features() -> list[Feature]:
    found = rows()
    for path in modules():
        if row := row_of(found, path):
            row.files.append(path)
            row.nodes += sum(1 for _ in ast.walk(ast.parse(path.read_text())))
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if row := row_of(found, path):
            row.tests += len(
                re.findall(r"^\s*(?:async )?def test_", path.read_text(), re.MULTILINE)
            )
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = str(path.relative_to(ROOT / "docs"))
        if row := next((row for row in found if row.docs and row.docs.match(name)), None):
            row.words += len(path.read_text().split())
    return found


def row_of(rows: list[Feature], path: Path) -> Feature | None:
    """The first row with a pattern that the path of a module or a test matches."""
    name = str(path.relative_to(ROOT))
    # Tests have the packages' folders.
    name += " " + re.sub(r"^tests/\w+/", "automodel_ckpt/", name)
    return next((row for row in rows if row.code.search(name)), None)


HEAD = """<!-- Written by tools/features.py: python -m tools.make_reference -->

# Features

What each feature costs, and who asked for it. Nodes are syntax nodes of its modules. Tests are the test
functions in files with a matching name. Words belong to the pages about the feature. A file counts once,
for the first row of tools/features.txt that matches. A change that adds a feature adds a row. Figures are
from the last run of the script.

"""


def page() -> str:
    rows = []
    for row in sorted(features(), key=lambda row: -row.nodes):
        folders = [
            str(path.parent.relative_to(ROOT)).removeprefix("automodel_ckpt/") for path in row.files
        ]
        folder = max(sorted(set(folders)), key=folders.count) if folders else "none"
        figures = (f"{row.nodes:,}", row.tests, f"{row.words:,}")
        rows.append((row.name, len(row.files), *figures, row.asked, f"`{folder}/`"))
    header = ("feature", "files", "nodes", "tests", "words of docs", "who asked", "folder")
    return HEAD + table(header, rows) + "\n"
