"""Which test files use public doors only: the command lines, public names, files and tests/support."""

import re
from functools import cache
from pathlib import Path

PUBLIC = {
    "automodel_ckpt",
    "automodel_ckpt.api",
    "automodel_ckpt.checkpoint",
    "automodel_ckpt.cli.ckpt",
    "automodel_ckpt.cli.train",
    "automodel_ckpt.errors",
    # Recipes of the examples name its functions.
    "automodel_ckpt.examples.data.python_docs",
    "automodel_ckpt.recipes.base",
    "automodel_ckpt.recipes.llm_finetune",
    # A user's recipe derives its loop from the class there (docs/guides/write-a-recipe.md).
    "automodel_ckpt.training.loop.TrainingLoop",
}
ROOT = Path(__file__).parents[2]
_FROM = re.compile(r"\bfrom (automodel_ckpt[\w.]*) import \(?\s*((?:\w+(?: as \w+)?(?:,\s*)?)+)")
_IMPORT = re.compile(
    r"""(?:^|[\n;"'])\s*import (automodel_ckpt[\w.]*)|import_module\(\s*["'](automodel_ckpt[\w.]*)"""
)
_FROM_TEST = re.compile(r"\bfrom (tests\.[\w.]*\btest_\w+) import")
_PATCH = re.compile(r"""setattr\(\s*["'](automodel_ckpt\.[\w.]+)\.\w+["']""")


@cache
def uses_doors_only(path: Path) -> bool:
    """Whether a test file, and each test file that it imports from, reaches into nothing internal.

    conftest.py marks the tests of such a file with ``doors``.
    """
    text = path.read_text()
    others = [ROOT.joinpath(*name.split(".")) for name in _FROM_TEST.findall(text)]
    return not internal_names(text) and all(
        uses_doors_only(other.with_suffix(".py")) for other in others
    )


def internal_names(text: str) -> set[str]:
    """The modules outside of ``PUBLIC`` that a test imports or patches, also in scripts that are strings of it."""
    found = {name for pair in _IMPORT.findall(text) for name in pair if name}
    found |= set(_PATCH.findall(text))
    for module, names in _FROM.findall(text):
        for name in re.findall(r"(\w+)(?: as \w+)?,?", names):
            full = f"{module}.{name}"
            found.add(full if _is_module(full) or full in PUBLIC else module)
    return found - PUBLIC


def _is_module(name: str) -> bool:
    return ROOT.joinpath(*name.split(".")).with_suffix(".py").exists()
