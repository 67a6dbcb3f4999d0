"""URLs of object stores in a recipe: they are checked before anything else can show them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar
from urllib.parse import urlsplit

from automodel_ckpt.base.store_url import (
    check_library,
    check_options,
    check_url,
    has_credentials,
    is_url,
    public,
    scratch_directory,
    with_remote,
)
from automodel_ckpt.config.keys.checkpoint import RemoteConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import is_number
from automodel_ckpt.config.tree.references import ReferenceFailed, resolve, shell_variable
from automodel_ckpt.config.tree.yaml_tree import Node
from automodel_ckpt.errors import Problem, RecipeError, hide

Config = TypeVar("Config", bound=RecipeConfig)
_OPTIONS = "checkpoint.remote.options"


def url_problems(root: Node) -> Iterator[Problem]:
    """Yield the problems of the URLs in a recipe's tree, and of ``checkpoint.remote.options``.

    From here on, no error and no log shows the secrets that they contain.
    """
    for key, node, url in _urls(root):
        if has_credentials(url):
            _hide_secrets(url)
        try:
            check_url(url, key)
        except RecipeError as error:
            yield _located(error, key, node)
    options = root.at(_OPTIONS)
    for name, node in options.children() if options is not None else ():
        try:
            check_options({name: _resolved(node)}, _OPTIONS)
        except RecipeError as error:
            for _, each in node.walk():
                if isinstance(each.value, str) and not each.is_null:
                    hide(each.value, "(not shown)")
            yield _located(error, f"{_OPTIONS}.{name}", node)


def shell_variables(tree: Node) -> Iterator[Problem]:
    """Yield a problem for each path in a recipe's tree with a variable that only a shell would replace."""
    for key, node in tree.walk():
        name = next((part for part in reversed(key.split(".")) if not is_number(part)), "")
        if isinstance(node.value, str) and (hint := shell_variable(name, node.value)):
            yield Problem(
                f"{key} has a variable of the shell, which a recipe does not replace",
                node.origin,
                node.value,
                hint,
            )


def missing_libraries(root: Node) -> Iterator[Problem]:
    """Yield a problem for each store in a recipe if the store's library is not installed. The URLs must be valid."""
    for key, node, url in _urls(root):
        try:
            check_library(check_url(url, key), key)
        except RecipeError as error:
            yield _located(error, key, node)


def with_local_directory(config: Config) -> Config:
    """Return *config* with a local ``checkpoint.checkpoint_dir``. A URL in its place becomes ``checkpoint.remote.url``.

    ``~`` at the beginning of the section's paths is expanded, as a shell does on the command line but not in a recipe
    file. Raises PermissionError if there is no directory for the user's cache.
    """
    section = config.checkpoint
    if section.restore_from is not None:
        section = replace(section, restore_from=os.path.expanduser(section.restore_from))
    if section.memory is not None:
        expanded = os.path.expanduser(section.memory.directory)
        section = replace(section, memory=replace(section.memory, directory=expanded))
    url = section.checkpoint_dir
    if not is_url(url):
        section = replace(section, checkpoint_dir=os.path.expanduser(url))
        # The same object if nothing has changed: a program may still change it.
        return config if section == config.checkpoint else replace(config, checkpoint=section)
    directory = scratch_directory(url, section.scratch_dir)
    local = replace(with_remote(section, url, RemoteConfig), checkpoint_dir=str(directory))
    return replace(config, checkpoint=local)


def _urls(root: Node) -> Iterator[tuple[str, Node, str]]:
    """Yield the key, the node and the text of each value that may be a URL, and is one."""
    keys = ["checkpoint.checkpoint_dir", "checkpoint.remote.url", "checkpoint.restore_from"]
    keys.append("init_from.path")
    sources = root.at("init_from")
    if sources is not None and isinstance(sources.value, list):
        keys += [f"init_from.{number}.path" for number in range(len(sources.value))]
    for key in keys:
        node = root.at(key)
        if node is None or not isinstance(node.value, str):
            continue
        try:
            text = resolve(node.value)
        except ReferenceFailed:
            # Reported with the type of the key.
            continue
        is_store = key == "checkpoint.remote.url" and text
        if text is not None and (is_url(text) or is_store):
            yield key, node, text


def _resolved(node: Node) -> object:
    """The value of a node, of text with its references resolved where that is possible."""
    if not isinstance(node.value, str):
        return node.value
    try:
        return resolve(node.value)
    except ReferenceFailed:
        return node.value


def _hide_secrets(url: str) -> None:
    hide(url, public(url))
    try:
        parts = urlsplit(url)
        secrets = [parts.username, parts.password, parts.query, parts.fragment]
    except ValueError:
        secrets = []
    for secret in secrets:
        if secret:
            hide(secret, "(not shown)")


def _located(error: RecipeError, key: str, node: Node) -> Problem:
    problem = error.problems[0]
    return Problem(f"{key}: {problem.what}", node.origin, problem.value, problem.hint)
