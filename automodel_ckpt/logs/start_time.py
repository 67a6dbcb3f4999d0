"""When this start of the run began: the launcher or the rank notes it, and the timeline counts start-up from there."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_noted: float | None = None


def note_process_start(process: int) -> None:
    """Note that this start of the run began when a *process* of this system was started."""
    global _noted
    _noted = _process_start(process)


def noted() -> float | None:
    """Return the noted time in seconds since 1970.

    Returns None when there is none, as in a program that calls a recipe.
    """
    return _noted


def _process_start(process: int) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        # Field 22 of proc(5) is in clock ticks since the boot.
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    return time.time()
