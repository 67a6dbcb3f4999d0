"""Tests with the marker ``doors`` import nothing internal, and they are a fifth of all lines of tests."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.support.doors import PUBLIC, ROOT, internal_names, uses_doors_only

FILES = sorted(Path(__file__).parents[2].rglob("test_*.py"))
WITH_MARKER = [path for path in FILES if uses_doors_only(path)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nfrom automodel_ckpt import errors, train\n", set()),
        ("from automodel_ckpt.cli import ckpt\n", set()),
        ("SCRIPT = 'from automodel_ckpt.cli.train import main; main()'", set()),
        ("from automodel_ckpt.checkpoint." + "parts import verify", {"checkpoint.parts.verify"}),
        ("    from automodel_ckpt." + "config.load import (\n    load_recipe,\n)", {"config.load"}),
        ("SCRIPT = 'import automodel_ckpt." + "base.units as units'", {"base.units"}),
        ("patch.setattr(\n    'automodel_ckpt." + "hub.push.send', None)", {"hub.push"}),
    ],
)
def test_what_is_internal(text: str, found: set[str]) -> None:
    assert internal_names(text) == {f"automodel_ckpt.{name}" for name in found}


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


def test_a_file_with_the_marker_gets_nothing_internal_from_a_helper_that_imports_it() -> None:
    for path in WITH_MARKER:
        for module, name, _ in _imported(path):
            helper = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            if module.startswith("tests.") and helper.exists():
                passed_on = {
                    own
                    for other, _, own in _imported(helper)
                    if other.startswith("automodel_ckpt.") and other not in PUBLIC
                }
                assert name not in passed_on, f"{path}: {module}.{name}"


@cache
def _imported(path: Path) -> list[tuple[str, str, str]]:
    """What a file imports with ``from``: the module, the name there, and the name in the file."""
    return [
        (str(node.module), alias.name, alias.asname or alias.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


def test_a_fifth_of_the_lines_of_tests_has_the_marker() -> None:
    lines = {path: path.read_text().count("\n") for path in FILES}
    assert sum(lines[path] for path in WITH_MARKER) >= 0.2 * sum(lines.values())
