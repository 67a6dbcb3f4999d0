"""Match the patterns of peft's ``rank_pattern`` and ``alpha_pattern`` in linear time, without regular expressions.

peft evaluates ``re.match(rf"(.*\\.)?({pattern})$", name)``. An expression from a file can take forever to match, so
that only the part of the language that names of layers need is accepted: text, ``.``, ``\\.``, ``.*``, ``^``, ``$``.
"""

from __future__ import annotations

import functools
import re

_PART = re.compile(r"\.\*|\\\.|[A-Za-z0-9_.-]", re.ASCII)
_MANY = ".*"


def matches_layer(pattern: str, name: str) -> bool:
    """Return whether peft's *pattern* matches the end of the *name* of a layer, or with ``^`` the whole name.

    Raises ValueError for a pattern with other characters of regular expressions.
    """
    parts = _parts(pattern)
    is_whole = pattern.startswith("^")
    if _MANY not in parts:
        start = len(name) - len(parts)
        if start < 0 or (start and (is_whole or name[start - 1] != ".")):
            return False
        return all(map(_matches, parts, name[start:]))
    starts = [0]
    if not is_whole:
        starts += [place + 1 for place, character in enumerate(name) if character == "."]
    # The places in the name up to which the parts so far match.
    places = set(starts)
    for part in parts:
        if part == _MANY:
            places = set(range(min(places), len(name) + 1))
        else:
            places = {place + 1 for place in places if _matches(part, name[place : place + 1])}
        if not places:
            return False
    return len(name) in places


@functools.lru_cache(maxsize=1024)
def _parts(pattern: str) -> tuple[str, ...]:
    inner = pattern.removeprefix("^").removesuffix("$")
    parts = tuple(_PART.findall(inner))
    if "".join(parts) != inner or not parts:
        raise ValueError("only names, `.`, `.*`, `^` and `$` are read")
    return parts


def _matches(part: str, character: str) -> bool:
    if part == ".":
        return bool(character)
    return character == part[-1]
