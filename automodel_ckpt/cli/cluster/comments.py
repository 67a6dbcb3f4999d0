"""Text of a recipe in a launcher: comments, and words for bash."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable

from automodel_ckpt.errors import printable, without_hidden

_WIDTH = 118


def comment_lines(texts: Iterable[str]) -> list[str]:
    """Return each text as comment lines. A text that begins with spaces is a command and is not wrapped."""
    lines = []
    for text in (printable(without_hidden(each)) for each in texts):
        wrapped = textwrap.wrap(
            text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        lines += [text] if text.startswith(" ") else wrapped or [""]
    return [f"# {line}".rstrip() for line in lines]


def shell_words(words: Iterable[str]) -> str:
    """Return words for bash. Characters that are not printable are escaped, so that no reader takes one for a break."""
    return " ".join(shlex.quote(word) if word.isprintable() else _escaped(word) for word in words)


def _escaped(word: str) -> str:
    characters = []
    for character in word:
        if character.isprintable() and character not in "'\\":
            characters.append(character)
        else:
            encoded = character.encode("utf-8", "surrogateescape")
            characters += [f"\\x{byte:02x}" for byte in encoded]
    return f"$'{''.join(characters)}'"
