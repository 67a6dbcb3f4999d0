"""Tests with the marker ``doors`` import nothing internal."""

import ast
from pathlib import Path

from tests.support.doors import PUBLIC, uses_doors_only

FILES = sorted(Path(__file__).parents[2].rglob("test_*.py"))


WITH_MARKER = [path for path in FILES if uses_doors_only(path)]


def test_a_file_with_the_marker_imports_nothing_internal() -> None:
    for path in WITH_MARKER:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                within = f"{node.module}." if node.module == "automodel_ckpt.cli" else ""
                names = {f"{within}{a.name}" if within else str(node.module) for a in node.names}
            else:
                continue
            internal = {name for name in names if name.startswith("automodel_ckpt")} - PUBLIC
            assert not internal, path
