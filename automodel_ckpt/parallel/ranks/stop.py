"""Stop requests by signal: recorded for the training loop; a second signal ends the process immediately.

One more signal, :data:`SAVE`, requests a save, after which training continues.

A Python signal handler runs only between two instructions of the main thread, and so not while that thread waits in a
collective. The interpreter's C handler always runs and writes the signal's number to a pipe, which a thread reads.

While the main thread waits for data (:meth:`StopRequest.interrupting`), the handler ends the wait with an exception. A
rank does not see a signal that only another rank received: :class:`PeerStop` transfers it through the ranks' store.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""The default signals that request a stop (``step_scheduler.stop_signals``)."""
SAVE = signal.SIGUSR2
"""The signal that requests a save, unless the recipe makes it one that requests a stop."""
SAME_SIGNAL_SECONDS = 1.0
"""Signals within this time are one request: one Ctrl-C reaches a rank from the terminal and from the launcher."""
WAIT_END_SECONDS = 5.0
"""How long a wait after a save may go on after the signal that ends it. The next signal ends the process."""
# By default the kernel ignores SIGURG, so that it does no harm before a handler is installed.
WAKE = signal.SIGURG
"""The signal that a thread sends to interrupt a wait of the main thread. A SIGURG of other programs has no effect."""
UNHEARD_SECONDS = 2.0
"""How long the main thread may take to handle a signal before training, when there is nothing to save."""
AGAIN_SECONDS = 0.02
"""The delay before a lost interruption of the main thread is repeated."""
PEER_SECONDS = 1.0
"""How often a rank checks whether another rank received a stop request."""


class StoppedWaiting(BaseException):
    """A stop was requested while this thread waited for data.

    Not an Exception, because data sets catch exceptions and retry.
    """


class StopRequest:
    """Whether a signal has requested a stop. There is one object per process: :func:`stop_request`."""

    signals: Sequence[signal.Signals] = SIGNALS
    """The signals that request a stop. Set it before :meth:`install`."""
    requested: int = 0
    """The number of the first signal, or 0. Read it at a point where stopping is safe."""
    on_immediate_end: Callable[[int], None] | None = None
    """Called with the number of a second signal before the process ends with 128 + number. Must be fast."""

    finished: bool = False
    """Whether the work of this process is done. Signals are then ignored, so that the exit code stays."""

    save_requested: bool = False
    """Whether :data:`SAVE` arrived since the last save, which resets it."""
    elsewhere: bool = False
    """Whether another rank received a stop request."""
    interrupted: bool = False
    """Whether the request interrupted a wait for data."""
    announce: Callable[[], None] | None = None
    """Called by a thread after the first signal. Must be fast."""
    on_request: Callable[[int], None] | None = None
    """Called once by a thread, to inform the user of the request, with the signal's number (0: another rank received
    it). Must be fast."""
    exit_code: int = 0
    """The exit code of the process after it has saved."""
    grace_seconds: float = math.inf
    """How long the launcher waits from a signal to the end of this process before it kills it, if that is known."""

    def __init__(self) -> None:
        self._first_at = 0.0
        self._installed = False
        self._interrupts = False
        self._is_acknowledged = False
        self._catches_unraisable = False
        self._leave: Callable[[int], None] | None = None
        self._ends_wait: threading.Event | None = None
        self._wait_ended_at = 0.0

    @property
    def handled(self) -> set[signal.Signals]:
        """All signals that the processes of a run handle."""
        return {*self.signals, SAVE}

    def install(self) -> None:
        """Handle the signals from now on. Main thread only. Calling it again has no effect."""
        if self._installed:
            return
        self._installed = True
        receiver, sender = os.pipe()
        # set_wakeup_fd requires a descriptor that does not block. It is set before the handlers:
        # otherwise, the thread would miss a signal that arrives in between.
        os.set_blocking(sender, False)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        for number in self.handled:
            signal.signal(number, self._handle)
        os.register_at_fork(after_in_child=self._reset_in_child)
        watcher = threading.Thread(
            target=self._watch, args=(receiver,), name="stop-request", daemon=True
        )
        watcher.start()

    def note(self, number: int) -> None:
        """Record a signal that another process received, if it is the first."""
        self._first_at = self._first_at or time.monotonic()
        self.requested = self.requested or number

    def reset(self) -> None:
        """Forget an earlier run of this process, at the start of another: its request, and that its work is done."""
        self.requested = 0
        self.elsewhere = self.interrupted = self.finished = self.save_requested = False
        self._first_at = 0.0
        self._is_acknowledged = False
        self.grace_seconds = math.inf

    @property
    def seconds_since_request(self) -> float:
        """The seconds since this process received the first signal; 0 if it received none."""
        return time.monotonic() - self._first_at if self._first_at else 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[threading.Event]:
        """A context for a wait after a save. A second signal sets the event instead of ending the process.

        If the process is still in the context WAIT_END_SECONDS later, because another rank has died or the store
        hangs, a further signal ends it.
        """
        self._ends_wait = threading.Event()
        try:
            yield self._ends_wait
        finally:
            self._ends_wait = None

    @property
    def wanted(self) -> bool:
        """Whether this rank has to stop."""
        return bool(self.requested) or self.elsewhere

    def interrupting(self) -> AbstractContextManager[None]:
        """A context, for the main thread, in which a request raises :class:`StoppedWaiting`: now or when it arrives."""
        return _Interrupting(self)

    @contextlib.contextmanager
    def before_training(self, leave: Callable[[int], None]) -> Iterator[None]:
        """A context like :meth:`interrupting` for the time before training, when there is nothing to save.

        If the main thread cannot handle the signal (it waits for other ranks or reads weights inside a library), a
        thread calls *leave* with the signal's number after UNHEARD_SECONDS, to end the process.
        """
        self._leave = leave
        try:
            with self.interrupting():
                yield
        finally:
            self._leave = None

    def interrupt(self) -> None:
        """End a wait of the main thread, because another rank received a request. For other threads."""
        self.elsewhere = True
        self._acknowledge(self.requested)
        if self._interrupts:
            self._wake_main_thread()

    def follow(self) -> None:
        """End this process too, because another rank stopped before training and has ended. For other threads."""
        self.elsewhere = True
        self._leave_soon(0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number not in self.signals:
            self.save_requested = True
            return
        self.requested = self.requested or number
        # Not :attr:`_first_at`: the thread may read this signal's byte more than
        # SAME_SIGNAL_SECONDS later, and would take it for a second signal.
        self.wake(number, frame)

    def wake(self, number: int, frame: FrameType | None) -> None:
        """Handle :data:`WAKE`: raise :class:`StoppedWaiting` if the main thread waits and a stop is requested."""
        if self._interrupts and self.wanted and not self.finished:
            self._interrupts = False
            # The flag is already cleared: another WAKE must not interrupt the code that handles
            # this exception.
            self.interrupted = True
            self._catch_unraisable()
            raise StoppedWaiting

    def _catch_unraisable(self) -> None:
        """Repeat an interruption that the interpreter drops.

        A handler may run inside a ``__del__`` method or a callback of a weak reference, where Python prints and drops
        any exception. Then nothing is printed, and the main thread is interrupted again after AGAIN_SECONDS.
        """
        previous = sys.unraisablehook

        def hook(unraisable: Any) -> None:
            if not issubclass(unraisable.exc_type, StoppedWaiting):
                previous(unraisable)
                return
            self._interrupts = True
            # Later, because this hook still runs inside the finalizer, where an exception would be
            # dropped again.
            again = threading.Timer(AGAIN_SECONDS, self._wake_main_thread)
            again.daemon = True
            again.start()

        if not self._catches_unraisable:
            self._catches_unraisable = True
            signal.signal(WAKE, self.wake)
            sys.unraisablehook = hook

    def _wake_main_thread(self) -> None:
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, WAKE)

    def _watch(self, receiver: int) -> None:
        while True:
            for number in os.read(receiver, 64):
                if number in self.signals:
                    self._arrived(number)

    def _arrived(self, number: int) -> None:
        if self.finished:
            return
        is_first = not self._first_at
        self.note(number)
        if is_first:
            if self.announce is not None:
                self.announce()
            self._acknowledge(number)
            self._leave_soon(number)
        if is_first or time.monotonic() - self._first_at < SAME_SIGNAL_SECONDS:
            return
        ends_wait = self._ends_wait
        if ends_wait is not None:
            now = time.monotonic()
            if not ends_wait.is_set():
                self._wait_ended_at = now
                ends_wait.set()
            # The terminal and the launcher may both send the same signal.
            if now - self._wait_ended_at < WAIT_END_SECONDS:
                return
        try:
            if self.on_immediate_end is not None:
                self.on_immediate_end(number)
        finally:
            # In `finally` and with os._exit: a failing callback must not keep the process, and
            # sys.exit would end only this thread.
            os._exit(128 + number)

    def _acknowledge(self, number: int) -> None:
        if self.on_request is None or self._is_acknowledged:
            return
        self._is_acknowledged = True
        self.on_request(number)

    def _leave_soon(self, number: int) -> None:
        if self._leave is not None:
            waiting = threading.Timer(UNHEARD_SECONDS, self._leave_unheard, (number,))
            waiting.daemon = True
            waiting.start()

    def _leave_unheard(self, number: int) -> None:
        # Checked again, because training may have begun, or the main thread handled the signal,
        # meanwhile.
        if self._leave is not None and self._interrupts:
            self._leave(number)

    def _reset_in_child(self) -> None:
        """Ignore the signals in a forked child, such as a data loader's worker; only SIGTERM ends it.

        A child that is a trainer installs handlers again.
        """
        self._installed = False
        with contextlib.suppress(ValueError):  # forked by another thread than the main thread
            # The pipe is shared with the parent. The parent's thread would take the child's signals for its own.
            signal.set_wakeup_fd(-1)
            for number in self.handled:
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_this_process = StopRequest()


def stop_request() -> StopRequest:
    """The stop request of this process. The command line installs it before slow imports."""
    return _this_process


class PeerStop:
    """Exchanges stop requests between ranks outside of training steps, through the ranks' *store*.

    A thread polls the store every PEER_SECONDS. Nothing is written before a rank receives a request.
    """

    KEY = "automodel_ckpt/stop"

    def __init__(self, request: StopRequest, store: Any) -> None:
        self._request, self._store = request, store
        self._closed = threading.Event()
        signal.signal(WAKE, request.wake)
        request.announce = self._announce
        # After `announce` is set: a signal in between is announced twice instead of never.
        if request.requested:
            self._announce()
        threading.Thread(target=self._watch, name="peer-stop", daemon=True).start()

    def close(self) -> None:
        """Stop polling. Call it before the process group is destroyed."""
        self._closed.set()
        self._request.announce = None

    def _announce(self) -> None:
        with contextlib.suppress(RuntimeError):  # the base of torch's store and network errors
            self._store.set(self.KEY, "1")

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):
            while not self._closed.wait(PEER_SECONDS):
                # check returns immediately; get would wait for the key.
                if self._store.check([self.KEY]):
                    break
            # Repeated until the run ends, because an interruption has no effect between two waits.
            while not self._closed.wait(PEER_SECONDS):
                self._request.interrupt()


class _Interrupting(AbstractContextManager[None]):
    """The context of :meth:`StopRequest.interrupting`; a generator would take three times as long in each step."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def __enter__(self) -> None:
        self._request._interrupts = True
        # The flag is set before this check: a signal in between is raised by the handler instead of
        # missed.
        if self._request.wanted:
            self._request._interrupts = False
            raise StoppedWaiting

    def __exit__(self, *_: object) -> None:
        self._request._interrupts = False
