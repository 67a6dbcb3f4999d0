"""Every error a user can meet says what is wrong, where, the value found, and what to do about it.

The tree is small: a class per exit code of ``ckpt-train`` and ``ckpt``. Exceptions become a message and a code in one
place, :func:`describe`.
"""

from __future__ import annotations

import errno as errno_names
import json
import re
import resource
from collections.abc import Iterator, Sequence
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
        for label, text in (("where", self.where), ("value", self.value), ("hint", self.remedy)):
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


class SystemLimit(AutomodelError):
    """A limit of the system on open files, threads or memory keeps the program from continuing."""


def os_problem(error: OSError, what: str, *, remedy: str) -> Problem:
    """The :class:`Problem` of a failed system call: its path, the errno's name and text, and the limit that it ran
    into, if that is what failed."""
    name = errno_names.errorcode.get(error.errno or 0, "unknown errno")
    where = " -> ".join(str(path) for path in (error.filename, error.filename2) if path)
    value = f"{name} ({error.strerror or error})"
    if (limit := _limit(error)) is not None:
        return Problem(what, where, f"{value}; {limit.limits()}", limit.remedy)
    return Problem(what, where, value, remedy)


@dataclass(frozen=True, slots=True)
class _Limit:
    """A kind of limit: what cannot be had because of it, the shell's names of the limits by their numbers in
    ``resource``, and what to do."""

    what: str
    names: tuple[tuple[int, str, int], ...]
    """(number of the limit, command that shows it, bytes or pieces that its unit stands for)"""
    remedy: str

    def limits(self) -> str:
        """The limits that are set now: ``ulimit -n is 32``."""
        found = []
        for number, command, unit in self.names:
            soft, _ = resource.getrlimit(number)
            text = "unlimited" if soft == resource.RLIM_INFINITY else str(soft // unit)
            found.append(f"{command} is {text}")
        return ", ".join(found)


_MEMORY_LIMIT = (resource.RLIMIT_AS, "ulimit -v", 1024)
_OPEN_FILES = _Limit(
    "too many open files", ((resource.RLIMIT_NOFILE, "ulimit -n", 1),),
    "raise the limit on open files: ulimit -n 65536",
)  # fmt: skip
_THREADS = _Limit(
    "cannot start a thread",
    ((resource.RLIMIT_NPROC, "ulimit -u", 1), _MEMORY_LIMIT, (resource.RLIMIT_STACK, "ulimit -s", 1024)),
    "raise the limit on processes (ulimit -u; in a container pids.max) or on memory (ulimit -v), or lower the limit on "
    "stack size (ulimit -s)",
)  # fmt: skip
_MEMORY = _Limit(
    "out of memory: the system refused to allocate more", (_MEMORY_LIMIT,),
    "raise the memory limit (ulimit -v, or that of the job or container), or use less: a smaller local batch, fewer "
    "workers or threads",
)  # fmt: skip
_LIMIT_TEXTS = {
    "can't start new thread": _THREADS,
    "Too many open files": _OPEN_FILES,
    "too many open files": _OPEN_FILES,
    "Cannot allocate memory": _MEMORY,
    "DefaultCPUAllocator: can't allocate memory": _MEMORY,
}
_LIMIT_CODES = {
    errno_names.EMFILE: _OPEN_FILES, errno_names.ENFILE: _OPEN_FILES, errno_names.ENOMEM: _MEMORY,
}  # fmt: skip


def _limit(error: BaseException) -> _Limit | None:
    if isinstance(error, OSError) and error.errno in _LIMIT_CODES:
        return _LIMIT_CODES[error.errno]
    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, RuntimeError):
        return next((limit for text, limit in _LIMIT_TEXTS.items() if text in str(error)), None)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it came from, at most some."""
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def limit_error(error: BaseException) -> SystemLimit | None:
    """The limit of the system that an exception, or one that it came from, ran into; None for any other exception."""
    for each in _chain(error):
        if (limit := _limit(each)) is not None:
            where = str(each.filename) if isinstance(each, OSError) and each.filename else ""
            value = f"{type(each).__name__}: {str(each).splitlines()[0] if str(each) else 'no more'}"
            return SystemLimit(limit.what, where=where, value=f"{value}; {limit.limits()}", remedy=limit.remedy)
    return None


def describe(error: BaseException) -> tuple[int, str]:
    """(exit code, message for the user) of any exception; our own carry both, others are internal errors."""
    if isinstance(error, Stopped):
        return error.exit_code, str(error)
    if isinstance(error, AutomodelError):
        return error.exit_code, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if (limit := limit_error(error)) is not None:
        return limit.exit_code, f"error: {limit}"
    return EXIT_INTERNAL, without_hidden(f"internal error: {type(error).__name__}: {error}")
