"""Text for a terminal: control characters in names are escaped, and colors are used only on terminals."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TextIO
from unicodedata import category, east_asian_width

from automodel_ckpt.base.units import colored, for_terminal, size_text
from automodel_ckpt.errors import (
    EXIT_DONE,
    OutputFailed,
    Problem,
    os_problem,
    printable,
    without_hidden,
)

__all__ = ["colored", "printable", "size_text"]

_COMBINING = ("Mn", "Me")
"""Unicode categories of marks that are printed over the character before."""
_STANDARD_OUTPUT = "standard output"
_PROBLEM_KEYS = ("what", "where", "value", "remedy")


def occupy_standard_streams() -> None:
    """Open /dev/null for standard streams that are closed.

    Otherwise the next opened file, perhaps one of a checkpoint, gets descriptor 1 or 2 and receives printed text.
    """
    # open() returns the lowest free descriptor: 0, 1 or 2 if such a stream is closed.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal or PYTHONIOENCODING does not have is written as \\u....
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="backslashreplace")


def require_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if the locale is ASCII, so that all file names can be used."""
    if sys.getfilesystemencoding() == "ascii":
        environment = os.environ | {"PYTHONUTF8": "1"}
        # The option too: Python ignores the variable with -E.
        words = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execve(sys.executable, words, environment)


class _Stream:
    """A text stream that changes what is written, or what happens if that fails."""

    def __init__(
        self,
        stream: TextIO,
        around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        change: Callable[[str], str] = str,
    ) -> None:
        self._stream, self._around, self._change = stream, around, change

    def write(self, text: str) -> int:
        with self._around():
            self._stream.write(self._change(text))
        return len(text)

    def flush(self) -> None:
        with self._around():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _replaced(*names: str, **options: Any) -> Iterator[None]:
    """Replace standard streams by a :class:`_Stream` with *options* inside this context."""
    before = {name: getattr(sys, name) for name in names}
    for name, stream in before.items():
        setattr(sys, name, _Stream(stream, **options))
    try:
        yield
    finally:
        for name, stream in before.items():
            setattr(sys, name, stream)


def hiding_values() -> AbstractContextManager[None]:
    """Print no resolved value of an environment variable inside this context, also in log messages."""
    return _replaced("stdout", "stderr", change=without_hidden)


def forgiving_streams() -> AbstractContextManager[None]:
    """Ignore errors of printing inside this context: a closed terminal, a pipe without a reader, or a full disk.

    The run continues, and its log files have the same content.
    """
    return _replaced("stdout", "stderr", around=lambda: contextlib.suppress(OSError))


@contextlib.contextmanager
def _naming_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = _STANDARD_OUTPUT
        raise


def naming_output() -> AbstractContextManager[None]:
    """Let errors of printing name standard output inside this context, so that :func:`output_failure` knows them."""
    return _replaced("stdout", around=_naming_errors)


def output_failure(error: BaseException) -> OutputFailed | None:
    """Return the error to report if *error* is a failed write to standard output; None otherwise.

    Standard output is then redirected to /dev/null: what it still buffers would fail again at exit.
    """
    # The identity: a file may have the same name.
    if not isinstance(error, OSError) or error.filename is not _STANDARD_OUTPUT:
        return None
    leave_reader()
    hint = "write the output to a disk with free space, or to a pipe"
    problem = os_problem(error, "the output could not be written", hint=hint)
    return OutputFailed(problem.what, where=problem.where, value=problem.value, hint=problem.hint)


def printable_lines(text: str) -> str:
    """Apply :func:`printable` to each line of a message."""
    return "\n".join(printable(line) for line in text.split("\n"))


def print_error(message: str) -> None:
    """Print a message on standard error, with :func:`printable` characters only."""
    print(for_terminal(printable_lines(message), sys.stderr), file=sys.stderr)


def print_path(path: str | os.PathLike[str]) -> None:
    """Print a path on standard output: its bytes if a program reads them, :func:`printable` text on a terminal."""
    if sys.stdout.isatty():
        print(printable(os.fspath(path)))
        return
    sys.stdout.flush()
    # The bytes of the path: a name that is not valid UTF-8 cannot be printed as text.
    with _naming_errors():
        sys.stdout.buffer.write(os.fsencode(path) + b"\n")
    sys.stdout.flush()


def leave_reader() -> None:
    """Redirect standard output to /dev/null after a BrokenPipeError, so that flushing at exit raises nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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


def print_document(arguments: argparse.Namespace, document: Any, lines: Iterable[str]) -> int:
    """Print the result of a command, *document* with ``--json``, else *lines*; return the exit code of success."""
    print(json_text(document) if arguments.json else "\n".join(lines))
    return EXIT_DONE


def problem_json(problem: Problem) -> dict[str, str]:
    """Convert a problem to the mapping that ``--json`` prints.

    The key of the hint is ``remedy``, its name when ``--json`` was introduced: scripts read it.
    """
    values = (problem.what, problem.where, str(problem.value), problem.advice)
    return dict(zip(_PROBLEM_KEYS, values, strict=True))


def problem_from_json(document: Mapping[str, str]) -> Problem:
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
