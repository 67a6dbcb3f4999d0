"""What ends a rank when a step hangs, so that its launcher starts all ranks again. The module imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from automodel_ckpt.errors import EXIT_INTERNAL

restart: Callable[[str], None] | None = None
"""Ends this process with a message. It is None when nothing would start it again. A thread of the rank calls it."""


@contextmanager
def ending_processes() -> Iterator[None]:
    """Within the context, a hang ends this process, so that torchrun, which has started it, restarts the ranks."""
    global restart
    before = restart
    restart = _print_and_end
    try:
        yield
    finally:
        restart = before


def _print_and_end(message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"error: {message}\n")
    for stream in (sys.stdout, sys.stderr):
        # A closed terminal.
        with suppress(OSError, ValueError):
            stream.flush()
    # No cleanup: the main thread waits in a collective.
    os._exit(EXIT_INTERNAL)


def may_restart(environment: Mapping[str, str]) -> bool:
    """Whether the launcher, this program's or torchrun, starts failed ranks again at least once more."""
    return restart is not None and has_restarts_left(environment)


def has_restarts_left(environment: Mapping[str, str]) -> bool:
    """Whether torch's elastic agent, from torchrun or this program's launcher, restarts ranks that fail now."""
    counts: list[Any] = [
        environment.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT")
    ]
    return all(map(str.isdecimal, counts)) and int(counts[0]) > int(counts[1])
