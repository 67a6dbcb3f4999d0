"""Checked values of JSON that this program did not write: counts, text, flags, shapes. Pure functions.

A value that does not match raises TypeError or ValueError, whose message does not contain more than a few characters
of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from automodel_ckpt.checkpoint.parts.slices import MAX_DIMENSIONS

MAX_INTEGER = 2**63 - 1
_MAX_PLAIN_DEPTH = 8


def integer(value: object) -> int:
    """Convert a count."""
    # Not isinstance: True is an int, too.
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise ValueError(f"{shown(value)} is not a count")
    return value


def seconds(value: object) -> float:
    """Convert a time in seconds since 1970."""
    if type(value) not in (int, float) or not 0 <= value < MAX_INTEGER:  # type: ignore[operator]
        raise ValueError(f"{shown(value)} is not a time")
    return float(value)  # type: ignore[arg-type]


def shown(value: object) -> str:
    """Format a value for a message. It may have thousands of digits or levels."""
    if isinstance(value, (str, float, bool, type(None))):
        return repr(value)[:100]
    return f"a value of type {type(value).__name__}"


def flag(value: object) -> bool:
    """Convert true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def text(value: object) -> str:
    """Convert text that is valid Unicode."""
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is not text")
    try:
        # JSON can contain lone surrogates, which only fail later, when they are printed or written.
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{shown(value)} is not valid Unicode") from None
    return value


def sizes_of(value: Iterable[object]) -> tuple[int, ...]:
    """Convert a shape or offsets from JSON. Raises TypeError or ValueError if they are malformed."""
    sizes = tuple(integer(item) for item in value)
    if len(sizes) > MAX_DIMENSIONS:
        raise ValueError(f"{len(sizes)} dimensions")
    return sizes


def mapping(value: object) -> dict[str, Any]:
    """Check the depth of a mapping for display, and its integers, which later code stores in 64 bits."""
    if not isinstance(value, dict):
        raise TypeError(f"{shown(value)} is not a mapping")
    level: list[Any] = [value]
    for _ in range(_MAX_PLAIN_DEPTH):
        items: list[Any] = []
        for outer in level:
            items += outer.values() if isinstance(outer, dict) else outer
        if any(isinstance(item, int) and abs(item) > MAX_INTEGER for item in items):
            raise ValueError("a number of more than 64 bits")
        level = [item for item in items if isinstance(item, (dict, list))]
    if level:
        raise ValueError(f"values nested more than {_MAX_PLAIN_DEPTH} levels deep")
    return value
