"""The example recipes that the package contains: ``ckpt-train --list`` and ``--copy``. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

import automodel_ckpt
from automodel_ckpt.cli.common.output import table
from automodel_ckpt.config.schema_keys import closest
from automodel_ckpt.errors import RecipeError

EXAMPLES = Path(automodel_ckpt.__file__).parent / "examples"
CLUSTERS = ("kubernetes", "skypilot")
"""Directories of examples with files that ``--write-launcher`` wrote."""


def examples() -> dict[str, Path]:
    """Map the name of each example recipe to its path."""
    paths = [path for path in sorted(EXAMPLES.rglob("*.yaml")) if path.parent.name not in CLUSTERS]
    return {path.relative_to(EXAMPLES).with_suffix("").as_posix(): path for path in paths}


def example_lines() -> list[str]:
    """Return the names and titles of the example recipes, one line each."""
    return table([(name, _title(path)) for name, path in examples().items()])


def copy_example(name: str, directory: str) -> Path:
    """Copy an example recipe, and the Python or JSONL file it uses, into a directory. Never overwrites a file.

    Creates the directory, and writes the JSON schema that the recipe's first line names. Returns the path of the copy.
    Raises :class:`RecipeError` if there is no such example, or a file exists.
    """
    paths = examples()
    wanted = name.removesuffix(".yaml")
    recipe = next((path for key, path in paths.items() if wanted in (key, path.stem)), None)
    if recipe is None:
        meant = closest(name, [*paths, *(path.stem for path in paths.values())])
        hint = f"did you mean {meant}?" if meant else "ckpt-train --list lists the example recipes"
        raise RecipeError("unknown example recipe", "--copy", name, hint)
    text = recipe.read_text(encoding="utf-8")
    for used in re.findall(r"^(?:recipe|  path): (\w+\.(?:py|jsonl))\b", text, re.MULTILINE):
        _copy(recipe.with_name(used), Path(directory))
    copied = _copy(recipe, Path(directory))
    from automodel_ckpt.config.help.json_schema import FILE_NAME, schema_text

    schema = copied.with_name(FILE_NAME)
    if not schema.exists():
        schema.write_text(schema_text(), encoding="utf-8")
    return copied


def _copy(source: Path, directory: Path) -> Path:
    target = directory / source.name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # x: fails if the file exists, also if another process has just created it.
        with target.open("xb") as copy:
            copy.write(source.read_bytes())
    except OSError as error:
        raise RecipeError(
            "the recipe cannot be copied",
            target,
            error.strerror,
            "choose another directory, or remove the existing file",
        ) from error
    return target


def _title(path: Path) -> str:
    """The first line of text in a recipe, after the line that names its schema for editors."""
    with path.open(encoding="utf-8") as lines:
        texts = (line.lstrip("# ").strip() for line in lines)
        return next((text for text in texts if not text.startswith("yaml-language-server")), "")
