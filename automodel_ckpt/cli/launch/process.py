"""This process as a rank: its limits and directory, its number, its messages, and its end without teardown."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from automodel_ckpt.base.terminal import for_terminal
from automodel_ckpt.errors import EXIT_STOPPED, RecipeError, SystemLimit

LEAST_FILES = 128
"""A rank opens some dozens of files and sockets. With fewer, it would fail where the cause cannot be determined."""
_WANTED_FILES = 65536


def print_message(text: str) -> None:
    """Print a message on standard error, after everything that this process has printed."""
    sys.stdout.flush()
    sys.stderr.write(for_terminal(text, sys.stderr) + "\n")
    sys.stderr.flush()


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def exit_now(code: int) -> NoReturn:
    """End the process without the interpreter's teardown, where libraries that ran threads sometimes abort."""
    flush()
    os._exit(code)


def flush() -> None:
    """Flush the standard streams. Errors are ignored: a closed terminal is not a failure of the run."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def report_stop(number: int, when: str) -> int:
    """Print which signal stopped the run, and *when* ("before training began"); return the exit code."""
    print_message(f"stopped by {signal.Signals(number).name} {when}")
    return EXIT_STOPPED


def exit_process(code: int) -> NoReturn:
    """Run the exit handlers, and end the process without the interpreter's teardown.

    After distributed work, that teardown sometimes aborts in a library's threads, and a finished run must not fail.
    """
    # atexit offers no public way to run its callbacks, and exit_now() skips them.
    atexit._run_exitfuncs()
    exit_now(code)


def raise_file_limit() -> None:
    """Raise this process's soft limit on open files, which the ranks inherit, up to the hard limit.

    Raises :class:`SystemLimit` if the hard limit is too low for a run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        raise SystemLimit(
            "the limit on open files is too low",
            "ulimit -n",
            soft,
            f"raise it to {LEAST_FILES} or more: ulimit -n 4096 (as root, or in the settings of the job)",
        )


def check_working_directory() -> None:
    """Raise :class:`RecipeError` if the working directory was removed. An import of torch would abort the process."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise RecipeError(
            "the current directory was removed", os.environ.get("PWD", "."), ""
        ) from error
