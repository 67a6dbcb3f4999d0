"""Exceptions and exit codes. Every error states what failed, where, the value, and a hint.

There is one class for each exit code of ``ckpt-train`` and ``ckpt``. :func:`describe` converts every exception to a
message and an exit code.
"""

from __future__ import annotations

import errno as errno_names
import json
import re
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

EXIT_DONE = 0
EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_UNUSABLE = 3
EXIT_SAVE_FAILED = 4
EXIT_STOPPED = 75


_references: dict[str, str] = {}
"""Maps the value of an environment variable to the reference to it in the recipe. The value may be a secret."""
# Replacing such values would change unrelated words and numbers of a message, too.
_NOT_SECRET = re.compile(r"[-+0-9.eE_]{0,5}|true|false|null", re.IGNORECASE)


def hide(value: str, reference: str) -> None:
    """Make :func:`without_hidden` replace *value* with *reference*. Booleans and short numbers are not replaced."""
    if _NOT_SECRET.fullmatch(value.strip()):
        return
    # Messages may contain it as it is, or quoted by Python or JSON.
    quoted = repr(value)[1:-1]
    quoted_json = json.dumps(value)[1:-1]
    for text in (value, value.strip(), value.rstrip("/"), quoted, quoted_json):
        _references.setdefault(text, reference)


def without_hidden(text: str) -> str:
    """Replace the values of environment references in *text* with the references, longest first.

    Values shorter than 8 characters are replaced only as whole words.
    """
    # In another order, the rest of a value that contains a shorter one would stay visible.
    for value in sorted(_references, key=len, reverse=True):
        reference = _references[value]
        if len(value) >= 8:
            text = text.replace(value, reference)
        elif value in text:
            # A short value may be part of other words. re.sub would interpret backslashes in the reference.
            parts = re.split(rf"(?<!\w){re.escape(value)}(?!\w)", text)
            text = reference.join(parts)
    return text


def printable(text: str) -> str:
    """Escape the characters of *text* that control a terminal: controls, escape sequences, direction marks."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


@dataclass(frozen=True)
class Problem:
    """One problem: *what* failed, *where* (file and line, flag, or path), the *value*, and a *hint*.

    *restart* says how to start the run again after the hint was followed. It is separate because a failed save
    need not end the run (``checkpoint.on_save_failure: continue``): :meth:`while_running` leaves it out.
    """

    what: str
    where: str
    value: object
    hint: str = ""
    restart: str = ""

    @property
    def advice(self) -> str:
        """The hint, followed by how to start again."""
        return ", then ".join(part for part in (self.hint, self.restart) if part)

    def while_running(self) -> Problem:
        """Return the problem of a run that continues: without the advice to start it again."""
        return replace(self, restart="")

    def __str__(self) -> str:
        lines = [self.what]
        # A newline in a path would begin a line of the message. Values may have several lines.
        where = printable(self.where) if self.where else self.where
        for label, text in (("where", where), ("value", self.value), ("hint", self.advice)):
            if text is not None and text != "":
                lines.append(f"  {label + ':':8}{text}")
        return without_hidden("\n".join(lines))


class AutomodelError(Exception):
    """Base of all errors raised by this package. *problems* contains one or more :class:`Problem`."""

    exit_code = EXIT_INTERNAL

    def __init__(
        self, what: str, where: object, value: object, hint: str = "", restart: str = ""
    ) -> None:
        self.problems: tuple[Problem, ...] = (Problem(what, str(where), value, hint, restart),)
        super().__init__(what)

    @classmethod
    def all_of(cls, problems: Sequence[Problem]) -> AutomodelError:
        """Return one error that reports all *problems* (at least one), in order."""
        error = cls(problems[0].what, "", "")
        error.problems = tuple(problems)
        return error

    @classmethod
    def check(cls, problems: Sequence[Problem]) -> None:
        """Raise one error that reports all *problems*, if there are any."""
        if problems:
            raise cls.all_of(problems)

    @classmethod
    def of_system(cls, error: OSError, what: str, *, hint: str) -> AutomodelError:
        """Return the error of a failed system call, with its path and errno."""
        return cls.all_of([os_problem(error, what, hint=hint)])

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call __init__ with the only argument of Exception.
        return type(self).all_of, (self.problems,), self.__dict__


class RecipeError(AutomodelError):
    """The command line or the recipe file is wrong; nothing was started."""

    exit_code = EXIT_USAGE


class DeviceMemoryError(RecipeError):
    """A GPU ran out of memory, in training or before. A restart cannot fix it: the recipe has to change."""


class TrainingDiverged(RecipeError):
    """The loss or the gradient was not finite in too many steps. A restart cannot fix it: the recipe has to change."""


class CheckpointUnusable(AutomodelError):
    """A checkpoint cannot be used: it is damaged, incomplete, incompatible, or missing."""

    exit_code = EXIT_UNUSABLE


TAKE_ANOTHER = "take the files from another copy, or use another checkpoint"


def unusable(
    what: str, where: object, value: object, hint: str = TAKE_ANOTHER
) -> CheckpointUnusable:
    """Return the error for a file or directory *where*, with the *value* that shows the damage."""
    return CheckpointUnusable(what, where, value, hint)


class SaveFailed(AutomodelError):
    """A save failed; the previous checkpoint is unchanged."""

    exit_code = EXIT_SAVE_FAILED


class LeaseLost(AutomodelError):
    """Another run took over the run directory; this run must not write to it anymore."""

    exit_code = EXIT_SAVE_FAILED


class ExportFailed(SaveFailed):
    """The export of a checkpoint failed; the checkpoint itself is complete."""


class Stopped(AutomodelError):
    """Training was stopped by a signal after saving; running the same command again resumes it."""

    exit_code = EXIT_STOPPED


class SystemLimit(AutomodelError):
    """A system limit on open files, file sizes, threads or memory was reached."""


class OutputFailed(AutomodelError):
    """Standard output could not be written, for example because its disk is full."""


def replaced_forward_pass(what: str, hint: str) -> RecipeError:
    """The error of a recipe that replaces the standard forward pass, which *what* requires."""
    return RecipeError(
        f"{what} requires the standard forward pass, which this recipe replaces",
        "Objective.loss",
        "row_loss() was not called for a micro-batch",
        f"return super().loss(micro_batch), or {hint}",
    )


def os_problem(error: OSError, what: str, *, hint: str, restart: str = "") -> Problem:
    """Build the :class:`Problem` of a failed system call: its path, the name and text of errno, and the system limit
    that was reached, if any."""
    name = errno_names.errorcode.get(error.errno or 0, "unknown errno")
    paths = [str(path) for path in (error.filename, error.filename2) if path]
    value = f"{name} ({error.strerror or error})"
    limit = _limit(error)
    if limit is not None:
        value += limit.limits()
        hint = limit.hint
    return Problem(what, " -> ".join(paths), value, hint, restart)


NOT_ALLOWED = (errno_names.EACCES, errno_names.EPERM, errno_names.EROFS)
"""The codes of system calls that the system does not permit."""
TO_UTF8 = "convert it to UTF-8, for example with iconv"
PERMISSIONS_HINT = (
    "check the owner and the permissions of the directory, and whether it is mounted read-only"
)


def writing_hint(error: OSError) -> str:
    """What to do first if a file could not be written, as the beginning of a hint."""
    return PERMISSIONS_HINT if error.errno in NOT_ALLOWED else "free space"


@dataclass(frozen=True)
class _Limit:
    """A kind of system limit: the message, the limits in ``resource`` that may cause it, and the hint."""

    what: str
    names: tuple[tuple[int, str, int], ...]
    """(limit in ``resource``, command that prints it, size of its unit)"""
    hint: str

    def limits(self) -> str:
        """The current limits as text to append, such as ``; ulimit -n is 32``; empty if there are none."""
        found = []
        for number, command, unit in self.names:
            soft, _ = resource.getrlimit(number)
            text = "unlimited" if soft == resource.RLIM_INFINITY else str(soft // unit)
            found.append(f"{command} is {text}")
        return "; " + ", ".join(found) if found else ""


_MEMORY_LIMIT = (resource.RLIMIT_AS, "ulimit -v", 1024)
_OPEN_FILES = _Limit(
    "too many open files",
    ((resource.RLIMIT_NOFILE, "ulimit -n", 1),),
    "raise the limit on open files: ulimit -n 65536",
)
_THREADS = _Limit(
    "cannot start a thread",
    (
        (resource.RLIMIT_NPROC, "ulimit -u", 1),
        _MEMORY_LIMIT,
        (resource.RLIMIT_STACK, "ulimit -s", 1024),
    ),
    "raise the limit on processes (ulimit -u; in a container pids.max) or on memory (ulimit -v), or lower the limit on "
    "stack size (ulimit -s)",
)
_MEMORY = _Limit(
    "out of memory: the system refused to allocate more",
    (_MEMORY_LIMIT,),
    "raise the memory limit (ulimit -v, or the job's or container's), or use less: a smaller local batch, fewer "
    "workers or threads",
)
_DEVICE_MEMORY = _Limit(
    "the GPU ran out of memory",
    (),
    "use less: a smaller step_scheduler.local_batch_size, model.activation_checkpointing, or distributed.strategy "
    "fsdp2 on more GPUs; nvidia-smi shows whether other processes use the GPU",
)
_FILE_SIZE = _Limit(
    "the file is larger than the limit on file sizes",
    ((resource.RLIMIT_FSIZE, "ulimit -f", 1024),),
    "raise the limit on file sizes (ulimit -f unlimited, or the job's); if it is unlimited, use a file system "
    "that allows larger files",
)
# CPython and torch raise RuntimeError without an errno for these: only the text shows the limit.
_LIMIT_TEXTS = {
    "CUDA out of memory": _DEVICE_MEMORY,
    "can't start new thread": _THREADS,
    "Too many open files": _OPEN_FILES,
    "too many open files": _OPEN_FILES,
    "Cannot allocate memory": _MEMORY,
    "DefaultCPUAllocator: can't allocate memory": _MEMORY,
}
_NOT_MAPPED = "failed to map segment from shared object"
_LIMIT_CODES = {
    errno_names.EMFILE: _OPEN_FILES,
    errno_names.ENFILE: _OPEN_FILES,
    errno_names.ENOMEM: _MEMORY,
    errno_names.EFBIG: _FILE_SIZE,
}


def _limit(error: BaseException) -> _Limit | None:
    """Return the limit that an exception reports, without its causes. Returns None when it reports none."""
    if isinstance(error, OSError) and error.errno in _LIMIT_CODES:
        return _LIMIT_CODES[error.errno]
    if isinstance(error, MemoryError):
        return _MEMORY
    # The dynamic loader, which does not state the reason. Without a limit, the file system may forbid to execute files.
    if isinstance(error, ImportError) and _NOT_MAPPED in str(error):
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        return None if soft == resource.RLIM_INFINITY else _MEMORY
    if isinstance(error, RuntimeError):
        for text, limit in _LIMIT_TEXTS.items():
            if text in str(error):
                return limit
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, at most 20: a chain may be circular."""
    for _ in range(20):
        if error is None:
            return
        yield error
        has_cause = error.__cause__ is not None or error.__suppress_context__
        error = error.__cause__ if has_cause else error.__context__


def limit_error(error: BaseException) -> SystemLimit | None:
    """Return the :class:`SystemLimit` that caused an exception. Returns None when no limit did."""
    for each in _chain(error):
        limit = _limit(each)
        if limit is None:
            continue
        where = ""
        if isinstance(each, OSError) and each.filename:
            where = str(each.filename)
        first_line = str(each).splitlines()[0] if str(each) else "no message"
        return SystemLimit(
            limit.what,
            where,
            f"{type(each).__name__}: {first_line}{limit.limits()}",
            limit.hint,
        )
    return None


def describe(error: BaseException) -> tuple[int, str]:
    """Return (exit code, message) of an exception. Exceptions of other types are internal errors."""
    if isinstance(error, AutomodelError):
        kind = "" if isinstance(error, Stopped) else "error: "
        return error.exit_code, f"{kind}{error}"
    if isinstance(error, KeyboardInterrupt):
        # 128 plus the number of SIGINT, as shells report it.
        return 130, "interrupted"
    limit = limit_error(error)
    if limit is not None:
        return limit.exit_code, f"error: {limit}"
    return EXIT_INTERNAL, without_hidden(f"internal error: {type(error).__name__}: {error}")
