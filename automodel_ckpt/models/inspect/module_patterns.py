"""Patterns for the names of modules and parameters, and hints about those that match nothing."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn


def is_match(pattern: str, name: str) -> bool:
    """Whether a glob matches the full name, or a pattern without wildcards the name or its last components."""
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return name == pattern or name.endswith(f".{pattern}")


def within(parents: Sequence[str], names: Iterable[str]) -> set[str]:
    """The names of modules that are in *parents* or inside of one of them."""
    prefixes = tuple(f"{parent}." for parent in parents)
    return {name for name in names if name in parents or name.startswith(prefixes)}


def leaf_names(names: Iterable[str]) -> list[str]:
    """The last components of module names, without numbers and duplicates."""
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return [leaf for leaf in leaves if not leaf.isdecimal()]


def pattern_hint(pattern: str, wanted: Mapping[str, nn.Module]) -> str:
    """A hint with the names that are similar to the unknown component of *pattern*, and with all names.

    The suggestion for a component that is not the last one of a name is a glob.
    """
    leaves = leaf_names(wanted)
    components: dict[str, None] = {}
    for name in wanted:
        components.update(dict.fromkeys(name.split(".")))
    words = [word for word in re.split(r"[^\w-]+", pattern) if word]
    unknown = [word for word in words if word not in components]
    word = unknown[-1] if unknown else pattern.rpartition(".")[2]
    names = [component for component in components if not component.isdecimal()]
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    if not near:
        return available(wanted)
    suggestions = [name if name in leaves else f"*.{name}.*" for name in near]
    return f"did you mean {' or '.join(suggestions)}? {available(wanted)}"


def available(wanted: Iterable[str]) -> str:
    """A hint with the last components of up to 20 names."""
    leaves = leaf_names(wanted)
    if not leaves:
        return "the model has no such layer"
    more = f" and {len(leaves) - 20} more" if len(leaves) > 20 else ""
    return f"there are {', '.join(leaves[:20])}{more}"
