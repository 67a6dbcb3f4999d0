"""``load_recipe``: read a recipe file and overrides into a typed configuration, or report all problems together."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.config.bind import Binder, closest, join
from automodel_ckpt.config.builders import builder_problems, needs_import
from automodel_ckpt.config.canonical_yaml import settle
from automodel_ckpt.config.overrides import Override, graft
from automodel_ckpt.config.references import is_reference
from automodel_ckpt.config.registry import is_name, registered
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.yaml_tree import Node, is_stream, lines, read_file
from automodel_ckpt.errors import Problem, RecipeError


@dataclass
class LoadedRecipe:
    """A recipe whose keys and values have been validated.

    ``config`` holds resolved references; ``tree`` holds what was written, defaults included, and may be shown.
    """

    config: Any
    path: Path
    tree: Node
    overrides: tuple[Override, ...] = ()
    problems: tuple[Problem, ...] = ()
    """Problems found in the arguments of plug-ins. :func:`targets.check_targets` reports them with those that it finds
    after importing the other plug-ins."""

    @property
    def directory(self) -> Path:
        """Base directory of relative file names in the recipe: its own directory, or the current one for a stream."""
        return (
            Path()
            if is_stream(self.path) or self.path.parts[:2] == ("/", "dev")
            else self.path.parent
        )

    @property
    def origins(self) -> dict[str, str]:
        """Dotted key of each value -> ``default``, ``file:line`` or the flag."""
        return dict(_origins(self.tree, ""))

    def to_yaml(self) -> str:
        """The recipe as run: overrides and defaults in, references unresolved; loads to the same configuration."""
        return "\n".join(text for text, _ in lines(self.tree)) + "\n"

    def explain(self) -> str:
        """Return the resolved recipe as YAML, with the origin of each value in a comment."""
        rows = list(lines(self.tree))
        width = min(60, max(len(text) for text, _ in rows))
        return (
            "\n".join(f"{text:{width}}  # {origin}" if origin else text for text, origin in rows)
            + "\n"
        )


def load_recipe(
    path: str | Path,
    overrides: Sequence[Override] = (),
    *,
    schema: type[RecipeConfig] | None = None,
    problems: Sequence[Problem] = (),
    check: Callable[[Node], Iterable[Problem]] | None = None,
) -> LoadedRecipe:
    """Read a recipe, apply the overrides and validate it. Imports no torch and runs no user code.

    Without a ``schema`` the top-level sections of a custom recipe are left to :func:`targets.prepare`, which knows its
    dataclass. ``problems`` found before are reported together with those found here, and with what ``check`` finds in
    the recipe's tree.

    Raises:
        RecipeError: with all problems of file and overrides.
    """
    found, path = list(problems), Path(path)
    # Unlike Path.is_file this raises nothing, such as for names that are too long.
    if not (os.path.isfile(path) or is_stream(path)):
        raise RecipeError.all_of([*found, _missing_file(path)])
    root = read_file(path, found)
    if root is None:
        raise RecipeError.all_of(found)
    for override in overrides:
        graft(root, override, found)
    is_custom = _check_recipe_name(root, found)
    binder = Binder(schema or RecipeConfig, found, open_top=schema is None and is_custom)
    config = binder.section(binder.schema, root, "")
    of_plugins = [
        *builder_problems(root, binder.schema),
        *(check(root) if check is not None else ()),
    ]
    if found or (of_plugins and not needs_import(root)):
        raise RecipeError.all_of(distinct([*found, *of_plugins]))
    settle(root, config, with_arguments=False)
    return LoadedRecipe(config, path, root, tuple(overrides), tuple(of_plugins))


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Remove duplicates with the same message and place."""
    return list(
        {(problem.where, problem.what): problem for problem in reversed(list(problems))}.values()
    )[::-1]


def _check_recipe_name(root: Node, problems: list[Problem]) -> bool:
    """Whether the recipe is user code. Notes a problem for an unknown registered name.

    The sections of a recipe that is not known are checked as those of the registered recipe that was probably meant,
    or of this package's, so that a misspelled name hides no other mistake.
    """
    node = root.at("recipe")
    if node is None or not isinstance(node.value, str) or is_reference(node.value) or node.is_null:
        return False
    names = registered()
    name = node.value
    if is_name(name) and name not in names:
        meant = closest(name, names)
        hint = (
            f"did you mean {meant}?"
            if meant
            else f"known recipes: {', '.join(names)}; or use package.module.Class or file.py:Class"
        )
        problems.append(Problem("unknown recipe", node.origin, name, hint))
        name = meant or "llm_finetune"
    return not names.get(name, "").startswith("automodel_ckpt.")


def _missing_file(path: Path) -> Problem:
    is_directory = os.path.isdir(path)
    what = "the recipe path is a directory" if is_directory else "recipe file not found"
    folder = path if is_directory else path.parent
    recipes = [
        str(file) for pattern in ("*.yaml", "*.yml") for file in sorted(folder.glob(pattern))
    ]
    near = recipes if is_directory else difflib.get_close_matches(str(path), recipes, cutoff=0.5)
    hint = (
        f"did you mean {', '.join(near[:5])}?"
        if near
        else "ckpt-train --list lists the example recipes"
    )
    return Problem(what, str(path.absolute()), "", hint)


def _origins(node: Node, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node.value, dict) and node.value:
        for name, child in node.children():
            yield from _origins(child, join(key, name))
    else:
        yield key, node.origin
