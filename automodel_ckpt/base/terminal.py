"""Print on a terminal: messages are folded and colored, names are escaped, and standard streams that fail are known."""

from __future__ import annotations

import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TextIO

from automodel_ckpt.errors import AutomodelError, OutputFailed, printable, without_hidden

_STANDARD_OUTPUT = "standard output"
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


def printable_lines(text: str) -> str:
    """Apply :func:`printable` to each line of a message."""
    return "\n".join(printable(line) for line in text.split("\n"))


def print_error(message: str) -> None:
    """Print a message on standard error, with :func:`printable` characters only."""
    sys.stderr.write(for_terminal(printable_lines(message), sys.stderr) + "\n")


def print_path(path: str | os.PathLike[str]) -> None:
    """Print a path on standard output: its bytes if a program reads them, :func:`printable` text on a terminal."""
    if sys.stdout.isatty():
        sys.stdout.write(printable(os.fspath(path)) + "\n")
        return
    sys.stdout.flush()
    # The bytes of the path: a name that is not valid UTF-8 cannot be printed as text.
    with _naming_errors():
        sys.stdout.buffer.write(os.fsencode(path) + b"\n")
    sys.stdout.flush()


def leave_reader() -> None:
    """Redirect standard output to /dev/null after a BrokenPipeError, so that flushing at exit raises nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---------------------------------------------------------------- standard streams


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
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
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


@contextmanager
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
    return _replaced("stdout", "stderr", around=lambda: suppress(OSError))


@contextmanager
def _naming_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = _STANDARD_OUTPUT
        raise


def naming_output() -> AbstractContextManager[None]:
    """Let errors of printing name standard output inside this context, so that :func:`output_failure` knows them."""
    return _replaced("stdout", around=_naming_errors)


def output_failure(error: BaseException) -> AutomodelError | None:
    """Return the error to report if *error* is a failed write to standard output; None otherwise.

    Standard output is then redirected to /dev/null: what it still buffers would fail again at exit.
    """
    # The identity: a file may have the same name.
    if not isinstance(error, OSError) or error.filename is not _STANDARD_OUTPUT:
        return None
    leave_reader()
    return OutputFailed.of_system(
        error,
        "the output could not be written",
        hint="write the output to a disk with free space, or to a pipe",
    )
