"""How long this process was suspended (SIGSTOP, a frozen container): a thread that wakes up late shows it.

The timeouts of gloo and NCCL count this time. After it, each rank that waited for another one has waited too long,
although all ranks continue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

POLL_SECONDS = 1.0
RECENT_SECONDS = 30.0
"""A wait that was too long because of a suspension ends as soon as the process continues."""
MIN_SECONDS = 5.0
"""Shorter times are not noted: a busy machine, or code that holds the interpreter, delays a thread as well."""


class SuspensionTime:
    """Notes when this process did not run for a while. There is one object per process: :data:`suspension`."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._is_watched = False
        self._polled = (clock(), cpu_clock())
        self._seconds = 0.0
        self._ended_at = 0.0

    def watch(self) -> None:
        """Start the thread, once."""
        if not self._is_watched:
            self._is_watched = True
            self._polled = (self._clock(), self._cpu_clock())
            threading.Thread(target=self._poll, name="suspension-time", daemon=True).start()

    def just_ended(self) -> float:
        """The seconds of a suspension that has ended a moment ago; 0 without one."""
        if self._is_watched:
            # The thread may wake up after the one that asks.
            self.note()
        recent = self._clock() - self._ended_at < RECENT_SECONDS
        return self._seconds if recent else 0.0

    def _poll(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            self.note()

    def note(self) -> None:
        """Compare the time and the processor time with those of the last call."""
        (before, cpu_before), now, cpu_now = self._polled, self._clock(), self._cpu_clock()
        self._polled = (now, cpu_now)
        late = now - before - POLL_SECONDS
        # A process that computes is not suspended, however late its threads are.
        if late >= MIN_SECONDS and cpu_now - cpu_before < late / 2:
            self._seconds, self._ended_at = late, now


suspension = SuspensionTime()
