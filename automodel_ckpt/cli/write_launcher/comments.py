"""Comments at the top of a launcher."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

_WIDTH = 118


def comment_lines(texts: Iterable[str]) -> list[str]:
    """Return each text as comment lines. A text that begins with spaces is a command and is not wrapped."""
    lines = []
    for text in texts:
        wrapped = textwrap.wrap(
            text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        lines += [text] if text.startswith(" ") else wrapped or [""]
    return [f"# {line}".rstrip() for line in lines]
