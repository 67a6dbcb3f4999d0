"""How far two sequences are equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def common_length(prefix: Sequence[object], whole: Sequence[object]) -> int:
    """Return the length of the common prefix of both sequences.

    For tokens it may be shorter than *prefix*, because the last token of *prefix* may merge with the text after it.
    """
    if len(prefix) <= len(whole) and whole[: len(prefix)] == prefix:
        return len(prefix)
    pairs = zip(prefix, whole, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
