"""What ``ckpt`` prints: tables, ages and JSON documents."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from unicodedata import category, east_asian_width

from automodel_ckpt.base.terminal import print_error
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts
from automodel_ckpt.errors import EXIT_DONE, CheckpointUnusable, Problem, describe, printable

# Unicode categories of marks that are printed over the character before.
_COMBINING = ("Mn", "Me")
_PROBLEM_KEYS = ("what", "where", "value", "remedy")


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Format rows as lines with aligned columns. *right* contains the indices of right-aligned columns."""
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for number, cell in enumerate(row):
            padding = " " * (widths[number] - _width(cell))
            cells.append(padding + cell if number in right else cell + padding)
        lines.append("  ".join(cells).rstrip())
    return lines


def fitted(
    rows: Sequence[Sequence[str]], right: Collection[int], dropped_first: Sequence[str]
) -> list[str]:
    """Format rows like :func:`table`, so that they fit the terminal. The first row contains the titles.

    If the terminal is too narrow, columns are dropped in the order of *dropped_first*, until the rest fits. Output that
    does not go to a terminal is not changed.
    """
    lines = table(rows, right)
    width = shutil.get_terminal_size().columns
    titles = rows[0]
    dropped = 0
    while sys.stdout.isatty() and max(map(_width, lines)) > width and dropped < len(dropped_first):
        dropped += 1
        kept = [
            number for number, title in enumerate(titles) if title not in dropped_first[:dropped]
        ]
        still_right = [place for place, number in enumerate(kept) if number in right]
        lines = table([[row[number] for number in kept] for row in rows], still_right)
    return lines


def _width(text: str) -> int:
    """Return the width of *text* in terminal columns: wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    width = 0
    for character in text:
        if category(character) not in _COMBINING:
            width += 2 if east_asian_width(character) in "WF" else 1
    return width


def age_text(created: float) -> str:
    """Format the time since *created* (seconds since 1970), such as ``5 min``.

    Returns an empty text for a time in the future, NaN and infinity.
    """
    seconds = time.time() - created
    if not 0 <= seconds < math.inf:
        return ""
    units = ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"), (math.inf, 86_400, "d"))
    unit, name = next((unit, name) for limit, unit, name in units if seconds < limit)
    return f"{seconds / unit:.0f} {name}"


def age_facts(created: float) -> list[str]:
    """Return the time since *created* as a fact, such as ``5 min old``; no fact where :func:`age_text` has none."""
    age = age_text(created)
    return [f"{age} old"] if age else []


def json_text(document: Any) -> str:
    """Serialize *document* to JSON; NaN and infinity become null."""
    return json.dumps(_finite(document), indent=2)


def print_document(arguments: Namespace, document: Any, lines: Iterable[str] | str) -> int:
    """Print the result of a command: *document* with ``--json``, else *lines*. Return the exit code of success.

    A text in place of lines is one line: its control characters are escaped.
    """
    if arguments.json:
        print(json_text(document))
    else:
        print(printable(lines) if isinstance(lines, str) else "\n".join(lines))
    return EXIT_DONE


def report_problems(problems: Sequence[Problem]) -> int:
    """Print the *problems* of a checkpoint after its document, if there are any. Return the exit code."""
    if not problems:
        return EXIT_DONE
    code, message = describe(CheckpointUnusable.all_of(problems))
    print_error(message)
    return code


def problem_json(problem: Problem) -> TextDict:
    """Convert a problem to the mapping that ``--json`` prints.

    The key of the hint is ``remedy``, its name when ``--json`` was introduced: scripts read it.
    """
    values = (problem.what, problem.where, str(problem.value), problem.advice)
    return dict(zip(_PROBLEM_KEYS, values, strict=True))


def problem_from_json(document: Texts) -> Problem:
    """Convert the mapping of :func:`problem_json` back to a problem."""
    return Problem(*(document[key] for key in _PROBLEM_KEYS))


def _finite(value: Any) -> Any:
    """Copy a document; NaN and infinity become None, because JSON has no text for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
