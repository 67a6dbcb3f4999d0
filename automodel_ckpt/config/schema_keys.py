"""The keys of a schema: the types and defaults of its fields, dotted keys, and the key that a misspelt one means."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from automodel_ckpt.config.tree.convert import (
    choices,
    is_text_only,
    members,
    section_type,
    target_type,
)
from automodel_ckpt.config.tree.rules import MISSING
from automodel_ckpt.config.tree.yaml_tree import Node, node_of

EXTENDS = "extends"
"""The key of a recipe that names the files below it."""


hints_of: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)
"""Resolved types of a dataclass's fields. Every override looks up the type of its key."""


def has_hints(section: type[Any]) -> bool:
    """Whether the field types resolve. A library's dataclass may use names that only type checkers import."""
    try:
        hints_of(section)
    except Exception:
        return False
    return True


def field_at(schema: type[Any], key: str) -> tuple[type[Any], dataclasses.Field[Any]] | None:
    """The section with the field at a dotted key of *schema*, and the field. Returns None when there is none."""
    section: type[Any] | None = schema
    *parents, last = key.split(".")
    for name in parents:
        section = section_type(members(hints_of(section).get(name, Any))) if section else None
    for field in dataclasses.fields(section) if section else ():
        if field.name == last:
            assert section is not None
            return section, field
    return None


def default_at(schema: type[Any], key: str) -> Node | None:
    """The node of the default of the field at a dotted key of *schema*. Returns None when it has no such field."""
    found = field_at(schema, key)
    if found is None:
        return None
    section, field = found
    return default_node(field, hints_of(section)[field.name])


def annotation_at(schema: type[Any], key: str) -> Any:
    """Type of the field at a dotted key; Any inside plug-ins, mappings and lists.

    Returns None when the key cannot exist.
    """
    annotation: Any = schema
    for part in key.split("."):
        alternatives = members(annotation)
        section = section_type(alternatives)
        hints = hints_of(section) if section else {}
        if part in hints:
            annotation = hints[part]
        else:
            has_any_key = section is None and not is_text_only(annotation)
            return Any if has_any_key or target_type(alternatives) else None
    return annotation


def with_underscores(schema: type[Any], key: str) -> str:
    """Return a dotted key with the underscores of Python's names: the keys of mappings keep their dashes."""
    parts = key.split(".")
    for index, part in enumerate(parts):
        alternatives = members(annotation_at(schema, ".".join(parts[:index])) if index else schema)
        if section_type(alternatives) or target_type(alternatives):
            parts[index] = part.replace("-", "_")
    return ".".join(parts)


def keys_of(schema: type[Any], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a schema, including sections."""
    hints = hints_of(schema)
    for field in dataclasses.fields(schema):
        key = prefix + field.name
        yield key
        section = section_type(members(hints[field.name]))
        if section:
            yield from keys_of(section, f"{key}.")


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to *word*, first of all one that differs in case.

    Returns None when none is similar. A name that *word* is the beginning of is similar, such as ``prompt_field`` to
    ``prompt``.
    """
    names = list(candidates)
    for name in names:
        if name.lower() == word.lower():
            return name
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    longer = [name for name in names if name.startswith(f"{word}_")]
    return next(iter(matches or longer), None)


def names_in(section: str, keys: Iterable[str]) -> list[str]:
    """Return the names that dotted *keys* have directly in a section, sorted."""
    prefix = f"{section}." if section else ""
    names = {key.removeprefix(prefix).partition(".")[0] for key in keys if key.startswith(prefix)}
    return sorted(names)


def is_number(part: str) -> bool:
    """Whether a part of a dotted key is a list index."""
    return part.isascii() and part.isdecimal()


def join(*parts: str) -> str:
    """Join parts of a dotted key. Empty parts are ignored."""
    return ".".join(part for part in parts if part)


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
