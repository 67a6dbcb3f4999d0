"""Data files that a recipe names and that are not there, reported before torch is imported."""

from __future__ import annotations

from collections.abc import Iterator

from automodel_ckpt.config.bind import join
from automodel_ckpt.config.builders import Plugin, argument, plugins, signature
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.yaml_tree import Node
from automodel_ckpt.errors import Problem, RecipeError


def missing_data_files(root: Node) -> Iterator[Problem]:
    """What is wrong with the local files that the ``path`` of this package's data builders names.

    Names of the Hub and directories are left to the builders.
    """
    for plugin in plugins(root, RecipeConfig):
        parameters = signature(plugin.name) or {}
        if {"path", "split"} <= parameters.keys() and plugin.node.at("path") is not None:
            yield from _problems(plugin)


def _problems(plugin: Plugin) -> Iterator[Problem]:
    from automodel_ckpt.data.source import Source

    path = argument(plugin, "path")
    if path is None:
        return
    try:
        source = Source.of(path, argument(plugin, "name"), argument(plugin, "split", "train"))
        if source.is_file:
            _ = source.files
    except RecipeError as error:
        for problem in error.problems:
            name = (
                problem.where.rpartition(".")[2] if problem.where.startswith("dataset.") else "path"
            )
            node = plugin.node.at(name) or plugin.node
            found = problem.value if problem.where.startswith("dataset.") else problem.where
            hint = problem.hint.replace("dataset.path", join(plugin.key, "path"))
            yield Problem(f"{join(plugin.key, name)}: {problem.what}", node.origin, found, hint)
