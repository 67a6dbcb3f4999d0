"""Text for a terminal: lines break between words, and colors are used only on terminals."""

from __future__ import annotations

import os
import re
import textwrap
from contextlib import suppress
from typing import TextIO

_COLUMNS = 80
_COLORS = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}
_LABEL = re.compile(r"(\d\d:\d\d:\d\d |\s*(?:what|where|value|hint):\s+|\s*)")
"""What a line of a message begins with; its continuation lines are indented as far."""
_COMMAND = re.compile(r"(\d\d:\d\d:\d\d )?(  to [^:]+|try it): ")
"""The beginning of a line that contains only a command: its time, and what the command is for."""
_QUOTED = re.compile(r"`[^`]*`")
_NO_BREAK = "\x00"
_KIND = re.compile(
    r"^((?:\d\d:\d\d:\d\d )? *)(internal error|error|warning|hint)(?=:)", re.MULTILINE
)
_KIND_COLORS = {"warning": "yellow", "hint": "green"}


def for_terminal(text: str, stream: TextIO) -> str:
    """Fold a message to the width of the terminal of *stream*, and color the words error, warning and hint.

    Elsewhere than on a terminal, the message stays as it is.
    """
    if stream.isatty():
        text = folded(text, columns(stream) - 1)

    def in_color(found: re.Match[str]) -> str:
        return found[1] + colored(found[2], _KIND_COLORS.get(found[2], "red"), stream)

    return _KIND.sub(in_color, text)


def colored(text: str, color: str, stream: TextIO) -> str:
    """Return *text* in a color if *stream* is a terminal. FORCE_COLOR overrides this, and NO_COLOR overrides both."""
    is_forced = bool(os.environ.get("FORCE_COLOR"))
    is_forbidden = bool(os.environ.get("NO_COLOR"))
    if is_forbidden or not (takes_escapes(stream) or is_forced):
        return text
    return f"\x1b[{_COLORS[color]}m{text}\x1b[0m"


def takes_escapes(stream: TextIO) -> bool:
    """Whether *stream* is a terminal that executes escape sequences."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def columns(stream: TextIO) -> int:
    """The width of the terminal of *stream*, which may differ from the width of standard output.

    COLUMNS overrides it.
    """
    with suppress(ValueError, OSError):
        given = int(os.environ.get("COLUMNS") or 0)
        return given or os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    return _COLUMNS


def folded(text: str, width: int) -> str:
    """Break the lines of *text* that are wider than *width* between words, never within a word.

    Commands in backquotes are not broken, and neither are lines that contain only a command: a person may copy them.
    """
    lines = []
    for line in text.split("\n"):
        label = _LABEL.match(line)
        if len(line) <= width or _COMMAND.match(line) or label is None:
            lines.append(line)
            continue
        start = label.group()
        words = _QUOTED.sub(lambda command: command[0].replace(" ", _NO_BREAK), line[len(start) :])
        wrapped = textwrap.fill(
            words,
            width,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        lines.append(wrapped.replace(_NO_BREAK, " "))
    return "\n".join(lines)
