"""The keys of a schema: the types of its fields, dotted keys, and the key that a misspelt one means."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from automodel_ckpt.config.tree.convert import is_text_only, members, section_type, target_type

EXTENDS = "extends"
"""The key of a recipe that names the files below it."""


def hints_of(section: Any) -> dict[str, Any]:
    """Resolved types of a dataclass's fields."""
    # mypy does not accept a class as the argument of a cached function, which has to be hashable.
    return _cached_hints(section)


@functools.cache  # every override looks up the type of its key
def _cached_hints(section: Any) -> dict[str, Any]:
    return typing.get_type_hints(section)


def has_hints(section: type[Any]) -> bool:
    """Whether the field types resolve. A library's dataclass may use names that only type checkers import."""
    try:
        hints_of(section)
    except Exception:
        return False
    return True


def annotation_at(schema: type[Any], key: str) -> Any:
    """Type of the field at a dotted key; Any inside plug-ins, mappings and lists; None if the key cannot exist."""
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
    """Return the candidate most similar to *word*, first of all one that differs in case; None if none is similar.

    A name that *word* is the beginning of is similar, such as ``prompt_field`` to ``prompt``.
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
