"""``extends``: a recipe file that names other recipe files, and contains only what differs from them."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import EXTENDS, hints_of
from automodel_ckpt.config.tree.references import ReferenceFailed, resolve, shell_variable
from automodel_ckpt.config.tree.yaml_tree import MAX_NODES, STREAM, Node, is_stream, read_file
from automodel_ckpt.errors import Problem

KEY = EXTENDS
MAX_FILES = 20
"""Maximum number of files that one recipe may consist of."""
_OTHER_SECTIONS = ("mlflow", "rng", "wandb")
"""Sections that only NeMo AutoModel's recipes have, and that may be alone in a file."""
_QUOTED = re.compile(r"(?<=invalid YAML):.*|(?<=unknown key) .*| '.*|\$\{.*", re.DOTALL)
_RECIPE_FILE = re.compile(r".+\.py:\w+")


def read_with_bases(path: Path, problems: list[Problem]) -> Node | None:
    """Read a recipe file and the files that its key ``extends`` names, and merge them into one mapping.

    ``extends`` is a path or a list of paths, each relative to the file that contains the key. Sections are merged key
    by key. In conflicts, a later file of the list takes precedence over an earlier one, and the file itself over all of
    them. Lists are replaced as a whole, and so is a section with another ``_target_``. Every node keeps the file and
    line that it comes from. Adds what is wrong to *problems*; returns None when *path* or a file that it extends cannot
    be read.
    """
    return _Reader(problems).read(path)


class _Reader:
    """Reads one recipe with its bases, and counts the files and values."""

    def __init__(self, problems: list[Problem]) -> None:
        self._problems = problems
        self._num_files = 0
        self._num_nodes = 0

    def read(self, path: Path, *, is_base: bool = False) -> Node | None:
        """Read *path*. *is_base*: another file extends it."""
        problems: list[Problem] = []
        root = read_file(path, problems)
        if is_base:
            problems = [without_content(problem) for problem in problems]
            if root is not None and not _is_recipe(root):
                root = None
                problems.append(
                    Problem(f"a file in {KEY} has no section of a recipe", str(path), "")
                )
        self._problems += problems
        if root is None:
            return None
        assert isinstance(root.value, dict)
        self._num_files += 1
        self._num_nodes += sum(1 for _ in root.walk())
        named = root.value.pop(KEY, None)
        if named is None or named.is_null:
            return root
        bases = Node({}, root.origin)
        for node in self._paths(named):
            base = self._base(node, directory_of(path))
            if base is None:
                # Without its values, other keys would be reported as missing.
                return None
            bases = merged(bases, base)
        return merged(bases, root)

    def _paths(self, named: Node) -> list[Node]:
        """The nodes of the paths in ``extends``. Adds a problem for each node that is not text."""
        nodes = named.value if isinstance(named.value, list) else [named]
        paths = []
        for node in nodes:
            if isinstance(node.value, str) and node.value and not node.is_null:
                paths.append(node)
            else:
                self._note(f"{KEY} must be a path or a list of paths", node, "extends: base.yaml")
        return paths

    def _base(self, node: Node, directory: Path) -> Node | None:
        """Read the file that *node* names. Returns None, and adds a problem, if that is impossible."""
        assert isinstance(node.value, str)
        try:
            written = resolve(node.value) or ""
        except ReferenceFailed as error:
            self._note(f"{KEY}: {error}", node, error.hint)
            return None
        written = os.path.expanduser(written)
        path = directory / written
        if not os.path.isfile(path):
            hint = f"the path is relative to {directory.absolute()}"
            hint = shell_variable(KEY, written) or hint
            self._note(f"the recipe in {KEY} does not exist", node, hint)
            return None
        if self._num_files >= MAX_FILES or self._num_nodes > MAX_NODES:
            self._note(
                f"{KEY}: more than {MAX_FILES} files or {MAX_NODES} values",
                node,
                "merge some of the files; no file may extend itself",
            )
            return None
        base = self.read(path, is_base=True)
        if base is not None:
            _keep_recipe_file(base, Path(written).parent)
        return base

    def _note(self, what: str, node: Node, hint: str) -> None:
        self._problems.append(Problem(what, node.origin, str(node), hint))


def without_content(problem: Problem) -> Problem:
    """Remove what a problem quotes of a file. A recipe may extend any file, and need not be allowed to show it."""
    is_suggestion = problem.hint.startswith("did you mean")
    return dataclasses.replace(
        problem,
        what=_QUOTED.sub("", problem.what),
        value="",
        hint=problem.hint if is_suggestion else f"correct this file, which {KEY} names",
    )


def is_extended(problem: Problem, path: Path) -> bool:
    """Whether a problem is in a line of a file that the recipe in *path* extends."""
    file, _, line = problem.where.rpartition(":")
    return line.isdecimal() and not file.startswith("-") and file not in (str(path), STREAM)


def _is_recipe(root: Node) -> bool:
    """Whether a mapping has a key of a recipe, of this program or of NeMo AutoModel."""
    return any(
        name in (KEY, *_OTHER_SECTIONS, *hints_of(RecipeConfig)) for name, _ in root.children()
    )


def directory_of(path: Path) -> Path:
    """The directory that relative paths in a recipe file start from: its own, or the current one for a stream."""
    # The shell's <(...) is a file in /dev/fd, where no relative file of the recipe can be.
    is_device = path.parts[:2] == ("/", "dev")
    if is_device or is_stream(path):
        return Path()
    return path.parent


def merged(base: Node, changes: Node) -> Node:
    """Return *base* with the values of *changes*, both mappings or not. Neither is modified."""
    if not isinstance(base.value, dict) or not isinstance(changes.value, dict):
        return changes.copy()
    # Another _target_ has other arguments than the base.
    target, before = changes.at("_target_"), base.at("_target_")
    if target is not None and (before is None or before.value != target.value):
        return changes.copy()
    children = dict(base.value)
    for name, child in changes.value.items():
        earlier = children.get(name)
        children[name] = merged(earlier, child) if earlier is not None else child.copy()
    return dataclasses.replace(changes, value=children)


def _keep_recipe_file(base: Node, directory: Path) -> None:
    """Change ``recipe: file.py:Class`` of a base to a path relative to the file that extends it."""
    node = base.at("recipe")
    if node is None or not isinstance(node.value, str):
        return
    if _RECIPE_FILE.fullmatch(node.value):
        # An absolute path stays as it is.
        node.value = str(directory / node.value)
