"""What ends a rank when a step hangs, so that its launcher starts all ranks again. The module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

restart: Callable[[str], None] | None = None
"""Ends this process with a message; None if nothing would start it again. A thread of the rank calls it."""


def may_restart(environment: Mapping[str, str]) -> bool:
    """Whether the launcher, this program's or torchrun, starts failed ranks again at least once more."""
    counts: list[Any] = [
        environment.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT")
    ]
    return (
        restart is not None and all(map(str.isdecimal, counts)) and int(counts[0]) > int(counts[1])
    )
