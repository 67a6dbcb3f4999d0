"""Text for a terminal: names from a disk cannot steer it, and colour appears only where it is read by a person."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from automodel_ckpt.checkpoint.file_system import size_text

__all__ = [
    "age_text", "can_print", "coloured", "json_text", "leave_reader", "print_error", "print_path", "printable",
    "printable_lines", "size_text", "table",
]  # fmt: skip

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}


def printable(text: str) -> str:
    """*text* with every character that a terminal could obey (controls, escapes, direction marks) written out."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def printable_lines(text: str) -> str:
    """The same for a message of several lines."""
    return "\n".join(printable(line) for line in text.split("\n"))


def can_print(text: str, stream: TextIO) -> bool:
    """Whether the encoding of *stream* has all characters of *text*."""
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def print_error(message: str) -> None:
    print(printable_lines(message), file=sys.stderr)


def print_path(path: str | os.PathLike[str]) -> None:
    """A path on standard output: raw, so that programs can use it; made printable for a terminal."""
    if sys.stdout.isatty():
        print(printable(os.fspath(path)))
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(path) + b"\n")
    sys.stdout.flush()


def leave_reader() -> None:
    """After a BrokenPipeError: the reader (a pager, head) has seen enough, nothing may be written at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """*text* in a colour, where *stream* is a terminal and NO_COLOR is not set."""
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns; the last column is as wide as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows]


def age_text(created: float) -> str:
    """How long ago: ``5 min``; nothing for a time that is not in the past."""
    seconds = time.time() - created
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"), (float("inf"), 86_400, "d")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}" if seconds >= 0 else ""
    return ""


def json_text(document: Any) -> str:
    """The document as JSON, which has no NaN and no infinity: null stands for them."""
    return json.dumps(_finite(document), indent=2)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
