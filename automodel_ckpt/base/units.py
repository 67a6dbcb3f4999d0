"""Format sizes, counts and text for messages, logs and terminals. Imports nothing of the package."""

from __future__ import annotations

import os
import re
import textwrap
from contextlib import suppress
from typing import TextIO


def size_text(nbytes: float) -> str:
    """Format a number of bytes in decimal units: ``1.2 MB``."""
    if nbytes < 1000:
        return f"{float(nbytes):.0f} B"
    value = nbytes / 1000
    for unit in ("kB", "MB", "GB"):
        if value < 999.95:  # larger values would be rounded to 1000.0
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def measure_text(value: float) -> str:
    """Format a measure such as an accuracy or a perplexity: ``0.5000``, for very large numbers ``1.234e+30``."""
    return f"{value:.4f}" if abs(value) < 1e9 else f"{value:.4g}"


def values_text(number: int) -> str:
    """Format a number of values that are not tensors: ``1 value that is not a tensor``."""
    return counted(number, "value that is not a tensor", "values that are not tensors")


def others_text(number: int) -> str:
    """Format a number of tensors that are not part of the model: ``1 tensor that is not the model's``."""
    return counted(number, "tensor that is not the model's", "tensors that are not the model's")


def left_out(text: str, number: int) -> str:
    """State that the *number* things that *text* describes are not included: ``1 value ... is left out``."""
    return f"{text} {'is' if number == 1 else 'are'} left out"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a number of things: ``1 sample``, ``2 samples``, ``1,024 ranks``. *plural* defaults to the noun with s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def counted_are(number: int, noun: str) -> str:
    """Begin a sentence about a number of things: ``1 tensor is``, ``2 tensors are``."""
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


def duration(seconds: float) -> str:
    """Format seconds with at most two units: ``8 s``, ``3 min 20 s``, ``5 h 04 min``, ``2 d 3 h``."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


def exact_time(seconds: float) -> str:
    """Format seconds with a digit after the point, and long times also in larger units: ``812.0 s (13 min 32 s)``."""
    text = f"{seconds:,.1f} s"
    return text if seconds < 600 else f"{text} ({duration(seconds)})"


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
