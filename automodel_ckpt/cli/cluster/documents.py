"""Text of launchers: YAML documents, comments, and words for bash."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable
from typing import Any

import yaml

from automodel_ckpt.errors import printable, without_hidden

_WIDTH = 118


def filled(template: str, **values: Any) -> dict[str, Any]:
    """Return the mapping of a YAML template, with one of *values* in the place of each text ``$name``."""

    def fill(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: fill(item) for key, item in node.items()}
        if isinstance(node, list):
            return [fill(item) for item in node]
        is_name = isinstance(node, str) and node.startswith("$")
        return values[node[1:]] if is_name else node

    document: dict[str, Any] = fill(yaml.safe_load(template))
    return document


def documents(comments: str, *parts: dict[str, Any]) -> str:
    """Return YAML documents after comments."""
    return comments + "---\n".join(map(_yaml, parts))


def _yaml(part: dict[str, Any]) -> str:
    """Return a document in which all characters that are not ASCII are escaped.

    Readers of YAML differ in which of them end a line.
    """
    text: str = yaml.dump(part, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=False)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no references between parts of a document."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def comments(template: str, **values: Any) -> str:
    """Return each line of a template, filled with *values*, as wrapped comment lines.

    A line that begins with spaces is a command and is not wrapped.
    """
    lines = []
    # Filled after it is divided: a line break in a value must not end a comment.
    for line in template.splitlines():
        text = printable(without_hidden(line.format(**values)))
        wrapped = textwrap.wrap(
            text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        lines += [text] if text.startswith(" ") else wrapped or [""]
    return "".join(f"{f'# {line}'.rstrip()}\n" for line in lines)


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
