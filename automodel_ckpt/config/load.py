"""``load_recipe``: read a recipe file and overrides into a typed configuration, or report all problems together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.former_names import current_name
from automodel_ckpt.config.bind import Binder
from automodel_ckpt.config.other_names import OTHER_NAMES, program_of
from automodel_ckpt.config.overrides import Override, graft
from automodel_ckpt.config.registry import is_name, is_own, registered
from automodel_ckpt.config.sample_kinds import sample_problems
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import closest
from automodel_ckpt.config.tree.extends import (
    directory_of,
    is_extended,
    read_with_bases,
    without_content,
)
from automodel_ckpt.config.tree.references import is_reference, resolve_keys
from automodel_ckpt.config.tree.urls import shell_variables, url_problems
from automodel_ckpt.config.tree.yaml_tree import (
    Node,
    is_stream,
    lines,
    read_text,
    values,
)
from automodel_ckpt.errors import Problem, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.config.automodel.rows import Notice, Work


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with validated keys and values. Nothing modifies it: what adds to a recipe returns a new one.

    ``config`` contains resolved references and may therefore contain secrets. ``tree`` contains the values as written,
    with defaults, and may be printed. ``parsed`` is the file as it was read, with the files that it
    extends, without overrides and defaults.
    """

    config: Any
    path: Path
    tree: Node
    parsed: Node
    overrides: tuple[Override, ...] = ()
    notices: tuple[Notice, ...] = ()
    """What was translated, and how, if the file is a recipe of NeMo AutoModel."""
    translated: Node | None = None
    """The tree of this program's keys that such a file was translated to, without our defaults."""

    @property
    def overridden(self) -> list[str]:
        """The dotted keys that the command line gives; overrides of a NeMo AutoModel recipe under our names."""
        if self.translated is None:
            return [override.key for override in self.overrides]
        return [key for key, origin in self.origins.items() if origin.startswith("-")]

    @property
    def directory(self) -> Path:
        """Base directory of relative file names in the recipe: its own directory, or the current one for a stream."""
        return directory_of(self.path)

    @property
    def origins(self) -> dict[str, str]:
        """Dotted key of each value -> ``default``, ``file:line`` or the flag."""
        return {key: node.origin for key, node in values(self.tree)}

    def with_overrides(self, more: Sequence[Override]) -> LoadedRecipe:
        """Validate the parsed file with further overrides, which take precedence.

        Raises :class:`RecipeError` with all problems.
        """
        return bind_recipe(self.path, self.parsed, [*self.overrides, *more])

    def to_yaml(self) -> str:
        """Return the recipe as YAML, with overrides and defaults. It loads to the same configuration.

        References to environment variables are not resolved.
        """
        return "".join(f"{text}\n" for text, _ in lines(self.tree))

    def explain(self) -> str:
        """Return the recipe as YAML, with the origin of each value in a comment."""
        rows = list(lines(self.tree))
        width = min(60, max(len(text) for text, _ in rows))
        return "".join(
            f"{f'{text:{width}}  # {origin}' if origin else text}\n" for text, origin in rows
        )


def load_recipe(
    path: str | Path,
    overrides: Sequence[Override] = (),
    *,
    schema: type[RecipeConfig] | None = None,
    problems: Sequence[Problem] = (),
    check: Callable[[Node], Iterable[Problem]] | None = None,
    text: str | None = None,
) -> LoadedRecipe:
    """Read a recipe file, apply the overrides and validate it. Imports no torch and runs no user code.

    ``schema``, ``problems`` and ``check`` are described at :func:`bind_recipe`. ``text`` is the content of a file that
    may not be written yet.

    Raises:
        RecipeError: with all problems of the file and the overrides.
    """
    found = list(problems)
    path = Path(path)
    parsed = _parsed(path, found, text)
    return bind_recipe(path, parsed, overrides, schema=schema, problems=found, check=check)


def convert_recipe(
    path: str | Path,
    overrides: Sequence[Override] = (),
    *,
    problems: Sequence[Problem] = (),
    num_ranks: int = 1,
) -> str:
    """Return a recipe file of another program as YAML of this program, with comments.

    Args:
        path: A file of NeMo AutoModel, axolotl, LLaMA-Factory or TRL.
        overrides: Overrides of AutoModel's keys, or of ``recipe`` for the other programs.
        problems: What was found before.
        num_ranks: The number of ranks, which axolotl, LLaMA-Factory and TRL multiply batches by.

    Raises:
        RecipeError: with all problems of the file and the overrides.
    """
    from automodel_ckpt.config.automodel.translation import RECIPES, converted_text
    from automodel_ckpt.config.other_recipes import translate

    found = list(problems)
    path = Path(path)
    parsed = _parsed(path, found)
    program = program_of(parsed)
    if program is None:
        loaded = bind_recipe(path, parsed, overrides, problems=found)
        if loaded.translated is None:
            raise RecipeError(
                "this is not a recipe of NeMo AutoModel, axolotl, LLaMA-Factory or TRL",
                path,
                f"recipe: {loaded.tree.at('recipe')}",
                f"NeMo AutoModel has recipe: {' or '.join(RECIPES)}; axolotl has base_model, LLaMA-Factory and TRL "
                "have model_name_or_path",
            )
        return converted_text(str(path), parsed, loaded.translated, loaded.tree, loaded.notices)
    kind = None
    for each in overrides:
        kind = str(each.node.value)
        if each.key != "recipe":
            what = "only recipe can be overridden here: override other keys of the result"
            found.append(Problem(what, each.node.origin, ""))
    RecipeError.check(found)
    keys = {node.origin for _, node in parsed.children()}
    rejected: dict[str, str] = {}
    while True:
        work = translate(parsed, program, kind, num_ranks, rejected)
        try:
            bound = bind_recipe(path, work.result, problems=found).tree
            ours = dict(work.result.children())
            # In the order of the schema.
            ours = {name: ours[name] for name, _ in bound.children() if name in ours}
            return converted_text(str(path), parsed, Node(ours, ""), bound, work.notices, program)
        except RecipeError as error:
            # A value that our key does not accept is reported instead.
            more = {each.where: each.what for each in error.problems if each.where in keys}
            if not more or more.keys() <= rejected.keys():
                raise
            rejected |= more


def _parsed(path: Path, problems: list[Problem], text: str | None = None) -> Node:
    """Read a recipe file, or its *text*. Raises :class:`RecipeError` with the *problems* if it cannot be read."""
    # Unlike Path.is_file this raises nothing, such as for names that are too long.
    parsed: Node | None
    if text is not None:
        parsed = read_text(text, str(path), problems, lines=True)
    elif os.path.isfile(path) or is_stream(path):
        parsed = read_with_bases(path, problems)
    else:
        what = "the recipe path is a directory" if os.path.isdir(path) else "recipe file not found"
        hint = "correct the path; ckpt-train --list lists the example recipes"
        problems.append(Problem(what, str(path.absolute()), "", hint))
        raise RecipeError.all_of(problems)
    if parsed is None:
        raise RecipeError.all_of(problems)
    return parsed


def bind_recipe(
    path: Path,
    parsed: Node,
    overrides: Sequence[Override] = (),
    *,
    schema: type[RecipeConfig] | None = None,
    problems: Sequence[Problem] = (),
    check: Callable[[Node], Iterable[Problem]] | None = None,
) -> LoadedRecipe:
    """Apply overrides to a parsed recipe file, and convert it to a typed configuration. ``parsed`` is not modified.

    Without a ``schema``, the top-level sections of a custom recipe are not validated: :func:`prepare.prepare` does it
    when it has imported the recipe's class. ``problems`` that were found before are reported together with those found
    here, and with those that ``check`` finds in the tree.

    Raises:
        RecipeError: with all problems of the file and the overrides.
    """
    found = list(problems)
    # graft and Binder change the tree, but the parsed one may be bound again.
    root = parsed.copy()
    for override in overrides:
        graft(root, override, found)
    # Former names of this package's classes, which recipes and saved configurations have.
    for _, node in root.walk():
        if isinstance(node.value, str):
            node.value = current_name(node.value)
    translation = _translated(root, path)
    translated = None
    if translation is not None:
        root, translated = translation.result, translation.result.copy()
        # The sections of features that do not exist here are missing in the translation, so that
        # binding it would report what follows from that.
        found += translation.unknown
        if translation.problems:
            raise RecipeError.all_of(_shown([*found, *translation.problems], path))
    root = resolve_keys(root, schema or RecipeConfig, found)
    is_custom = _check_recipe_name(root, found)
    binder = Binder(
        schema or RecipeConfig,
        found,
        open_top=schema is None and is_custom,
        other_keys=translation.known if translation is not None else (),
    )
    config = binder.section(binder.schema, root, "")
    # It also hides the secrets in URLs from the messages of all problems.
    found += url_problems(root)
    found += shell_variables(root)
    found += sample_problems(root)
    if check is not None:
        found += check(root)
    RecipeError.check(distinct(_shown(found, path)))
    return LoadedRecipe(
        config,
        path,
        root,
        parsed,
        tuple(overrides),
        tuple(translation.notices) if translation is not None else (),
        translated,
    )


def _translated(root: Node, path: Path) -> Work | None:
    """Translate a recipe of NeMo AutoModel; None for others. Its recipe classes never have our names.

    Raises :class:`RecipeError` for a file of another program, of which not all keys can be translated.
    """
    program = program_of(root)
    if program is not None:
        raise RecipeError(
            f"this is a recipe of {program}",
            str(path),
            "",
            f"ckpt-train --convert-recipe {path} > recipe.yaml writes it as a recipe of this program",
        )
    if is_own(str(root.at("recipe"))):
        return None
    from automodel_ckpt.config.automodel.translation import translate

    return translate(root)


def _shown(problems: Iterable[Problem], path: Path) -> list[Problem]:
    """Remove the content of files that the recipe extends, which may be any files."""
    return [without_content(each) if is_extended(each, path) else each for each in problems]


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Remove problems that repeat the message and the location of an earlier one."""
    first: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        first.setdefault((problem.where, problem.what), problem)
    return list(first.values())


def _check_recipe_name(root: Node, problems: list[Problem]) -> bool:
    """Return whether the recipe is user code. Adds a problem for an unknown registered name.

    The sections of a recipe with an unknown name are validated as if it were the registered recipe with the most
    similar name, so that a misspelled name hides no other mistake.
    """
    node = root.at("recipe")
    if node is None or not isinstance(node.value, str) or is_reference(node.value) or node.is_null:
        return False
    name = node.value
    if is_own(name):
        return False
    names = registered()
    if is_name(name) and name not in names:
        meant = OTHER_NAMES["stage"].values.get(name.lower()) or closest(name, names)
        hint = f"known recipes: {', '.join(names)}; or use package.module.Class or file.py:Class"
        if meant:
            hint = f"did you mean {meant}?"
        problems.append(Problem("unknown recipe", node.origin, name, hint))
        name = meant or "llm_finetune"
    return not names.get(name, "").startswith("automodel_ckpt.")
