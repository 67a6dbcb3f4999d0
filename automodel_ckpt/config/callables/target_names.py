"""What a recipe names that runs code: everything that is checked before anything is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from automodel_ckpt.config.bind import REMOTE_CODE
from automodel_ckpt.config.callables import allowlist
from automodel_ckpt.config.callables.allowlist import CUSTOM
from automodel_ckpt.config.callables.sent_values import sent_problems
from automodel_ckpt.config.callables.trust import Rejected, Trust, check_name
from automodel_ckpt.config.load import LoadedRecipe, distinct
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import join
from automodel_ckpt.config.tree.references import ReferenceFailed, is_reference
from automodel_ckpt.config.tree.references import resolve as resolve_reference
from automodel_ckpt.config.tree.rules import MISSING
from automodel_ckpt.config.tree.yaml_tree import Node
from automodel_ckpt.errors import Problem, RecipeError

_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation")
"""Settings of transformers for which ``owner/repository`` means code that is loaded from the Hub."""
SECTIONS = frozenset(field.name for field in dataclasses.fields(RecipeConfig))


def check_names(loaded: LoadedRecipe, trust: Trust) -> None:
    """Check everything that can be checked before code is imported. Raises :class:`RecipeError`."""
    problems = [*untrusted_names(loaded.tree, trust), *sent_problems(loaded.tree, trust)]
    if REMOTE_CODE not in trust.names:
        problems += _remote_code(loaded)
    problems += _task_files(loaded, trust)
    if problems:
        raise RecipeError.all_of(distinct([*loaded.problems, *problems]))


def untrusted_names(tree: Node, trust: Trust) -> list[Problem]:
    """Return a problem for each ``_target_`` in a recipe's tree that is not allowed. Imports nothing."""
    problems: list[Problem] = []
    for key, node, purpose in _names(tree, trust):
        if node.value == MISSING:  # load_recipe reports it
            continue
        try:
            check_name(resolve_reference(str(node.value)) or "", trust, purpose)
        except Rejected as error:
            problems.append(problem_of(key, error, node))
        except ReferenceFailed:  # load_recipe reports it
            continue
    return problems


def _names(
    node: Node, trust: Trust, key: str = "", purpose: str | None = None
) -> Iterator[tuple[str, Node, str]]:
    """Yield (key, node of ``_target_``, purpose) for every plug-in.

    *purpose* is that of the parameter of an enclosing plug-in; None outside of plug-ins.
    """
    target = node.value.get("_target_") if isinstance(node.value, dict) else None
    is_trusted = False
    if target is not None:
        yield key, target, allowlist.purpose_of(key, SECTIONS) if purpose is None else purpose
        is_trusted = trust.covers(resolve_reference(str(target.value)) or "")
    for name, child in node.children():
        child_key = join(key, name)
        child_purpose = purpose
        if target is not None:
            # A trusted callable may take any object of the allowlist, others only those of certain parameters.
            nested = CUSTOM if is_trusted else allowlist.NESTED.get(name, "")
            child_purpose = allowlist.PURPOSES.get(child_key) or nested
        yield from _names(child, trust, child_key, child_purpose)


def _remote_code(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yield a problem for each converted value that would run code from a model's repository."""
    for key, value in _values(loaded.config):
        parts = key.split(".")
        # Everything else counts as true: transformers would take the text no as true.
        runs_code = parts[-1] == REMOTE_CODE and value is not None and value is not False
        # This key runs no code without trust: the recipe asks trusts_remote_code() when it reads the model.
        runs_code = runs_code and key != f"model.{REMOTE_CODE}"
        if isinstance(value, str) and "/" in value:
            runs_code = runs_code or not set(parts).isdisjoint(_KERNELS)
        if runs_code:
            node = loaded.tree.at(key)
            what = f"{key}: this runs code from a model repository, which is not trusted"
            hint = f"if you trust this code, allow it with --trust {REMOTE_CODE}"
            yield Problem(what, node.origin if node else "", str(node) if node else "", hint)


def _task_files(loaded: LoadedRecipe, trust: Trust) -> Iterator[Problem]:
    """Yield a problem for a directory of task files that is not trusted: lm-evaluation-harness runs code in them."""
    section = getattr(loaded.config, "evaluation", None)
    if section is None or section.harness is None or section.harness.include_path is None:
        return
    path = Path(section.harness.include_path).expanduser()
    if not trust.covers_file(path):
        key = "evaluation.harness.include_path"
        what = f"{key}: task files can contain code, and this directory is not trusted"
        node = loaded.tree.at(key)
        hint = f"if you trust these files, allow them with --trust {path}"
        yield Problem(what, node.origin if node else "", str(node) if node else "", hint)


def _values(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, converted value) for every scalar of a recipe, including the arguments of plug-ins."""
    items: Any
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if getattr(value, "takes_any", False):
            fields |= fields.pop("kwargs", {})
        items = fields.items()
    elif isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield key, value
        return
    for name, item in items:
        yield from _values(item, join(key, str(name)))


def problem_of(key: str, error: Rejected, node: Node | None) -> Problem:
    assert node is not None
    if is_reference(str(node.value)):
        # The message of the error would contain the value of the environment variable.
        what = f"{key}: the referenced value is not allowed here"
        return Problem(what, node.origin, str(node), "correct the environment variable")
    return Problem(f"{key}: {error}", node.origin, str(node), error.hint)
