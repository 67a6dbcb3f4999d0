"""The installed commands ``ckpt`` and ``ckpt-train``: import the command and run it.

A Ctrl-C during the imports would print a traceback of them. Until the command runs, and after it, SIGINT therefore has
its default action, which ends the process and prints nothing. This module imports nothing that takes time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from signal import SIG_DFL, SIG_IGN, SIGINT, SIGUSR2, default_int_handler, getsignal, signal
from threading import current_thread, main_thread


def ckpt() -> int:
    """Run ``ckpt`` with ``sys.argv`` and return its exit code."""
    return _run("automodel_ckpt.cli.ckpt")


def ckpt_train() -> int:
    """Run ``ckpt-train`` with ``sys.argv`` and return its exit code. May end the process."""
    # A request to save (parallel/ranks/stop.py) before there is a run must not end the process, as is the default.
    signal(SIGUSR2, SIG_IGN)
    return _run("automodel_ckpt.cli.train")


@contextmanager
def ending_on_interrupt() -> Iterator[None]:
    """Let a Ctrl-C end the process inside this context, as during the imports of a command.

    For imports of large libraries: a KeyboardInterrupt in one of them is lost, becomes an ImportError, or aborts the
    process. Nothing may be written inside the context.
    """
    # A program that calls main() may have a handler, or call it in a thread, which cannot set one.
    is_default = getsignal(SIGINT) is default_int_handler and current_thread() is main_thread()
    if is_default:
        signal(SIGINT, SIG_DFL)
    try:
        yield
    finally:
        if is_default:
            signal(SIGINT, default_int_handler)


def _run(module: str) -> int:
    """Import *module*, call its ``main()``, and return what that returns."""
    # nohup and shells that start a job in the background ignore SIGINT: it stays ignored.
    is_ignored = getsignal(SIGINT) is not default_int_handler
    if not is_ignored:
        signal(SIGINT, SIG_DFL)
    main = import_module(module).main
    try:
        if not is_ignored:
            signal(SIGINT, default_int_handler)
        code: int = main()
        if not is_ignored:
            signal(SIGINT, SIG_DFL)
    except KeyboardInterrupt:
        # Before or after the part of main() that reports it.
        print("interrupted", file=sys.stderr)
        return 128 + SIGINT
    return code
