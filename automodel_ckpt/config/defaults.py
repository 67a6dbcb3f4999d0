"""The defaults of fields, and which values of a recipe differ from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from automodel_ckpt.config.tree.convert import choices, members
from automodel_ckpt.config.tree.rules import MISSING, Target
from automodel_ckpt.config.tree.yaml_tree import Node, node_of


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Default of a field; MISSING if it has none."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING


def default_node(field: dataclasses.Field[Any], annotation: Any) -> Node:
    """Node of a field's default. Words that the type lists, such as none, are not quoted."""
    default = default_of(field)
    node = node_of(default)
    if isinstance(default, str) and default in choices(members(annotation)):
        node.quoted = False
    return node


def is_changed(cls: type[Any], values: Mapping[str, Any], key: str) -> bool:
    """Whether the value at a dotted key differs from its default; False in a section that is null or a plug-in."""
    name, _, inner = key.partition(".")
    value = values[name]
    if inner:
        if not dataclasses.is_dataclass(value) or not hasattr(value, inner):
            return False
        return is_changed(type(value), vars(value), inner)
    (field,) = [field for field in dataclasses.fields(cls) if field.name == name]
    return bool(value != default_of(field))


def _changed_keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section and its subsections whose values differ from their defaults."""
    values = vars(section)
    for name, value in values.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, Target):
            yield from _changed_keys(value, f"{prefix}{name}.")
        elif is_changed(type(section), values, name):
            yield prefix + name


def unused_without_checkpoints(recipe: Any) -> list[str]:
    """Changed keys that have no effect because ``checkpoint.enabled`` is false."""
    if recipe.checkpoint.enabled:
        return []
    prefixes = ["checkpoint.", "step_scheduler.mtbf_hours", "logging.sample_ids"]
    for name in vars(recipe.step_scheduler):
        if name.startswith("ckpt_"):
            prefixes.append(f"step_scheduler.{name}")
    unused = []
    for key in _changed_keys(recipe):
        if key.startswith(tuple(prefixes)) and key != "checkpoint.enabled":
            unused.append(key)
    return unused
