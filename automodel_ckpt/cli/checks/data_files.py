"""Report data files that a recipe names and that do not exist, before torch is imported."""

from __future__ import annotations

from collections.abc import Iterator

from automodel_ckpt.config.callables.builders import Plugin, plugins
from automodel_ckpt.config.schema_keys import join
from automodel_ckpt.config.tree.yaml_tree import Node
from automodel_ckpt.errors import Problem, RecipeError


def missing_data_files(root: Node) -> Iterator[Problem]:
    """Yield the problems of the local files in the ``path`` of this package's data builders.

    Names on the Hub and directories are not checked: the builders do that.
    """
    for plugin in plugins(root):
        # Megatron's files are named by a prefix, and divided into parts: their builder checks them.
        names = plugin.parameters.keys()
        has_rows = {"path", "split"} <= names and "part" not in names
        if has_rows and plugin.node.at("path") is not None:
            yield from _problems(plugin)


def _problems(plugin: Plugin) -> Iterator[Problem]:
    from automodel_ckpt.data.rows.source import Source

    path = plugin.argument("path")
    if path is None:
        return
    try:
        source = Source.of(path, plugin.argument("name"), plugin.argument("split", "train"))
        if source.is_file:
            _ = source.files  # resolves patterns, and raises if a file does not exist
    except RecipeError as error:
        for problem in error.problems:
            yield _located(problem, plugin)


def _located(problem: Problem, plugin: Plugin) -> Problem:
    """Replace ``dataset.NAME`` in a problem by the key of the section, and its location by the line in the recipe."""
    if problem.where.startswith("dataset."):
        name = problem.where.rpartition(".")[2]
        value = problem.value
    else:
        name = "path"
        value = f"{problem.where}: {problem.value}" if problem.value else problem.where
    node = plugin.node.at(name) or plugin.node
    hint = problem.hint.replace("dataset.path", join(plugin.key, "path"))
    return Problem(f"{join(plugin.key, name)}: {problem.what}", node.origin, value, hint)
