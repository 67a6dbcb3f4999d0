"""The installed commands ``ckpt`` and ``ckpt-train``: import the command and run it.

A Ctrl-C during the imports would print a traceback of them. Until the command runs, and after it, SIGINT therefore has
its default action, which ends the process and prints nothing. This module imports nothing that takes time.
"""

from __future__ import annotations

import sys
from importlib import import_module
from signal import SIG_DFL, SIGINT, default_int_handler, getsignal, signal


def ckpt() -> int:
    """Run ``ckpt`` with ``sys.argv`` and return its exit code."""
    return _run("automodel_ckpt.cli.ckpt")


def ckpt_train() -> int:
    """Run ``ckpt-train`` with ``sys.argv`` and return its exit code. May end the process."""
    return _run("automodel_ckpt.cli.train")


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
