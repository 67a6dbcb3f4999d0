"""Every error a user can meet says what is wrong, where, the value found, and what to do about it.

The tree is small: a class per exit code of ``ckpt-train`` and ``ckpt``. Exceptions become a message and a code in one
place, :func:`describe`.
"""

from __future__ import annotations

import errno as errno_names
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_UNUSABLE = 3
EXIT_SAVE_FAILED = 4
EXIT_STOPPED = 75


_hidden: dict[str, str] = {}  # what a variable of the environment holds -> the reference that stood for it
_NOT_SECRET = re.compile(r"[-+0-9.eE_]{0,5}|true|false|null", re.IGNORECASE)


def hide(value: str, reference: str) -> None:
    """Have :func:`without_hidden` show *reference* where it finds *value*; words and short numbers stay readable."""
    if not _NOT_SECRET.fullmatch(value.strip()):
        for written in (value, value.strip(), repr(value)[1:-1], json.dumps(value)[1:-1]):
            _hidden.setdefault(written, reference)


def without_hidden(text: str) -> str:
    """*text* with the values that references resolved to replaced by these references, the longest first.

    A value of fewer than eight characters is only seen where it is not part of a longer word.
    """
    for value in sorted(_hidden, key=len, reverse=True):
        if len(value) >= 8:
            text = text.replace(value, _hidden[value])
        elif value in text:
            text = _hidden[value].join(re.split(rf"(?<!\w){re.escape(value)}(?!\w)", text))
    return text


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: *what*, *where* (file and line, flag, path), the *value* met, and the *remedy*."""

    what: str
    where: str
    value: object
    remedy: str

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (("where", self.where), ("value", self.value), ("remedy", self.remedy)):
            if text is not None and text != "":
                lines.append(f"  {label + ':':8}{text}")
        return without_hidden("\n".join(lines))


class AutomodelError(Exception):
    """Base of all errors raised on purpose; carries one :class:`Problem` or several found together."""

    exit_code = EXIT_INTERNAL

    def __init__(self, what: str, *, where: str, value: object, remedy: str) -> None:
        self.problems: tuple[Problem, ...] = (Problem(what, where, value, remedy),)
        super().__init__(what)

    @classmethod
    def all_of(cls, problems: Sequence[Problem]) -> AutomodelError:
        """One error that reports every problem of a non-empty sequence, in order."""
        first = problems[0]
        error = cls(first.what, where=first.where, value=first.value, remedy=first.remedy)
        error.problems = tuple(problems)
        return error

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.problems, self.__dict__))


def _rebuild(cls: type[AutomodelError], problems: tuple[Problem, ...], state: dict[str, object]) -> AutomodelError:
    error = cls.__new__(cls)
    Exception.__init__(error, problems[0].what)
    error.__dict__.update(state)
    return error


class RecipeError(AutomodelError):
    """The command line or the recipe file is wrong; nothing was started."""

    exit_code = EXIT_USAGE


class CheckpointUnusable(AutomodelError):
    """A checkpoint cannot be used: damaged, incomplete, incompatible, or absent though named."""

    exit_code = EXIT_UNUSABLE


class SaveFailed(AutomodelError):
    """A save did not become a checkpoint; the one before it stands untouched."""

    exit_code = EXIT_SAVE_FAILED


class LeaseLost(AutomodelError):
    """Another run took over the run directory, so that this run may write nothing more there."""

    exit_code = EXIT_SAVE_FAILED


class ExportFailed(SaveFailed):
    """A checkpoint is complete, but its export did not come about."""


class Stopped(AutomodelError):
    """Training was stopped by a signal after saving; the same command goes on."""

    exit_code = EXIT_STOPPED


def os_problem(error: OSError, what: str, *, remedy: str) -> Problem:
    """The :class:`Problem` of a failed system call: its path and the errno's name and text."""
    name = errno_names.errorcode.get(error.errno or 0, "unknown errno")
    where = " -> ".join(str(path) for path in (error.filename, error.filename2) if path)
    return Problem(what, where, f"{name} ({error.strerror or error})", remedy)


def describe(error: BaseException) -> tuple[int, str]:
    """(exit code, message for the user) of any exception; our own carry both, others are internal errors."""
    if isinstance(error, Stopped):
        return error.exit_code, str(error)
    if isinstance(error, AutomodelError):
        return error.exit_code, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    return EXIT_INTERNAL, without_hidden(f"internal error: {type(error).__name__}: {error}")
