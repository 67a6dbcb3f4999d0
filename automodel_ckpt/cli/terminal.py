"""Text for a terminal: control characters in names are escaped, and colors are used only on terminals."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TextIO, cast
from unicodedata import category, east_asian_width

from automodel_ckpt.errors import Problem
from automodel_ckpt.units import size_text

__all__ = [
    "age_text",
    "can_print",
    "coloured",
    "fitted",
    "forgiving_streams",
    "json_text",
    "leave_reader",
    "occupy_standard_streams",
    "print_error",
    "print_path",
    "printable",
    "printable_lines",
    "problem_from_json",
    "problem_json",
    "size_text",
    "table",
]

_JOINS = ("Mn", "Me")  # marks that take no column of their own
# What is left of a line for a note, at least.
_LEAST_NOTE = 24
_COLOURS = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}


def occupy_standard_streams() -> None:
    """Open /dev/null for standard streams that are closed.

    Otherwise the next opened file, perhaps one of a checkpoint, gets descriptor 1 or 2 and receives printed text.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


class _Forgiving:
    """A text stream that drops what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def forgiving_streams() -> Iterator[None]:
    """Ignore errors of printing inside this context: a closed terminal, a pipe without a reader, or a full disk.

    The run continues, and its log files have the same content.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Forgiving(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def printable(text: str) -> str:
    """*text* with every character that a terminal could obey (controls, escapes, direction marks) written out."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def printable_lines(text: str) -> str:
    """Apply :func:`printable` to each line of a message."""
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
    """Redirect standard output to /dev/null after a BrokenPipeError, so that flushing at exit raises nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """Return *text* in a color if *stream* is a terminal. FORCE_COLOR overrides this, and NO_COLOR overrides both."""
    wanted = bool(os.environ.get("FORCE_COLOR")) or (
        stream.isatty() and os.environ.get("TERM") != "dumb"
    )
    if not wanted or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Format rows as lines with aligned columns. *right* holds the indices of right-aligned columns."""
    widths = [max(_width(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(_padded(cell, widths[n], n in right) for n, cell in enumerate(row)).rstrip()
        for row in rows
    ]


def fitted(
    rows: Sequence[Sequence[str]],
    right: Collection[int],
    dropped_first: Sequence[str],
    *,
    wrap_last: bool = False,
) -> list[str]:
    """Rows as lines with aligned columns, as :func:`table` makes them, that fit the terminal.

    With *wrap_last*, the text of the last column continues on further lines where it has room for 24 characters.
    Columns are dropped where the terminal is still too narrow: of those titled *dropped_first* the empty ones, then in
    this order, as many as it takes. What does not go to a terminal is not changed.
    """
    lines, titles = table(rows, right), rows[0]
    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or max(map(_width, lines)) <= width:
        return lines
    if wrap_last:
        before = table([row[:-1] for row in rows], right)
        left = width - max(map(_width, before)) - 2
        needed = min(_LEAST_NOTE, max(_width(row[-1]) for row in rows))
        if left >= needed or not dropped_first:
            return [
                _wrapped(line, row[-1], width, left) for line, row in zip(before, rows, strict=True)
            ]
    if not dropped_first:
        return lines
    empty = [
        title for title in dropped_first if not any(row[titles.index(title)] for row in rows[1:])
    ]
    dropped = empty[0] if empty else dropped_first[0]
    gone = titles.index(dropped)
    fewer = [[*row[:gone], *row[gone + 1 :]] for row in rows]
    left_to_drop = [title for title in dropped_first if title != dropped]
    return fitted(
        fewer, [n - (n > gone) for n in right if n != gone], left_to_drop, wrap_last=wrap_last
    )


def _wrapped(line: str, note: str, width: int, left: int) -> str:
    """A line with a note in the *left* columns at the end of *width*; the rest of the note continues below it."""
    if not note:
        return line
    left = max(left, _LEAST_NOTE)
    first, *others = textwrap.wrap(note, left)
    indent = max(0, width - left)
    return "\n".join(
        [
            f"{line}{' ' * (indent - _width(line))}{first}",
            *(" " * indent + other for other in others),
        ]
    )


def _padded(cell: str, width: int, to_the_right: bool) -> str:
    space = " " * (width - _width(cell))
    return space + cell if to_the_right else cell + space


def _width(text: str) -> int:
    """Width of *text* in terminal columns: wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if category(c) in _JOINS else 2 if east_asian_width(c) in "WF" else 1 for c in text
    )


def age_text(created: float) -> str:
    """Time since *created* (seconds since 1970) as text, such as ``5 min``; empty for a time in the future."""
    seconds = time.time() - created
    for limit, unit, name in (
        (120, 1, "s"),
        (7200, 60, "min"),
        (172_800, 3600, "h"),
        (float("inf"), 86_400, "d"),
    ):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}" if seconds >= 0 else ""
    return ""


def json_text(document: Any) -> str:
    """Serialize *document* to JSON; NaN and infinity become null."""
    return json.dumps(_finite(document), indent=2)


def problem_json(problem: Problem) -> dict[str, str]:
    """Convert a problem to the mapping that ``--json`` prints.

    The key of the hint is ``remedy``, its name when ``--json`` was introduced: scripts read it.
    """
    return {
        "what": problem.what,
        "where": problem.where,
        "value": str(problem.value),
        "remedy": problem.hint,
    }


def problem_from_json(document: Mapping[str, str]) -> Problem:
    """Return the problem that :func:`problem_json` converted."""
    return Problem(document["what"], document["where"], document["value"], document["remedy"])


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
