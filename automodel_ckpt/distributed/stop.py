"""A signal asks this process to stop: remembered for the training loop, and obeyed at once when it comes again.

A Python signal handler runs only between two instructions of the main thread, so not while that thread waits in a
collective. The interpreter's C handler runs always and writes the signal's number to a pipe; a thread reads it there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_SIGNAL_SECONDS = 1.0
"""One Ctrl-C reaches a rank from the terminal and from the launcher; what comes this close together is one request."""


class StopRequest:
    """Whether a signal has asked for a stop. One per process: :func:`stop_request`."""

    requested: int = 0
    """The number of the first signal, 0 while there was none. Read it at a point where stopping is safe."""
    at_once: Callable[[int], None] | None = None
    """Called with a second signal's number before the process ends with 128 + number; must be quick."""

    def __init__(self) -> None:
        self._first_at = 0.0
        self._installed = False

    def install(self) -> None:
        """Handle SIGTERM, SIGUSR1 and SIGINT from now on. Main thread only; harmless when repeated."""
        if self._installed:
            return
        self._installed = True
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._handle)
        os.register_at_fork(after_in_child=self._let_go)
        threading.Thread(target=self._watch, args=(receiver,), name="stop-request", daemon=True).start()

    def note(self, number: int) -> None:
        """Take this signal as the request, if it is the first."""
        if not self.requested:
            self._first_at = time.monotonic()
            self.requested = number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.note(number)

    def _watch(self, receiver: int) -> None:
        while True:
            for number in os.read(receiver, 64):
                if number in SIGNALS:
                    self._arrived(number)

    def _arrived(self, number: int) -> None:
        self.note(number)
        if time.monotonic() - self._first_at < SAME_SIGNAL_SECONDS:
            return
        try:
            if self.at_once is not None:
                self.at_once(number)
        finally:
            os._exit(128 + number)

    def _let_go(self) -> None:
        """In a forked child (a data loader's worker) signals are not the child's affair, but SIGTERM ends it."""
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)


_this_process = StopRequest()


def stop_request() -> StopRequest:
    """This process's request; the command line installs it before anything slow is imported."""
    return _this_process
