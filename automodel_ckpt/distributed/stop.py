"""A signal asks this process to stop: remembered for the training loop, and obeyed at once when it comes again.

A Python signal handler runs only between two instructions of the main thread, so not while that thread waits in a
collective. The interpreter's C handler runs always and writes the signal's number to a pipe; a thread reads it there.

Where the main thread waits for data (:meth:`StopRequest.interrupting`) the handler ends the wait by an exception. A
rank whose peers wait for it does not know of a signal that only they got: :class:`PeerStop` tells it, by their store.
"""

from __future__ import annotations

import contextlib
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
"""What asks for a stop unless the recipe says otherwise (``step_scheduler.stop_signals``)."""
SAME_SIGNAL_SECONDS = 1.0
"""One Ctrl-C reaches a rank from the terminal and from the launcher; what comes this close together is one request."""
WAKE = signal.SIGURG
"""What a thread sends to have the main thread look up from a wait; other programs' SIGURG changes nothing."""
UNHEARD_SECONDS = 2.0
"""So long the main thread has to hear of a signal before training, where nothing can be lost."""
AGAIN_SECONDS = 0.02
"""After so long the main thread is interrupted again, where an interruption was lost."""
PEER_SECONDS = 1.0
"""How often a rank that waits for data asks whether another one was told to stop."""


class StoppedWaiting(BaseException):
    """A stop was asked for while this thread waited for data. No Exception: data sets catch those and try again."""


class StopRequest:
    """Whether a signal has asked for a stop. One per process: :func:`stop_request`."""

    signals: Sequence[signal.Signals] = SIGNALS
    """What asks for a stop; to be set before :meth:`install`."""
    requested: int = 0
    """The number of the first signal, 0 while there was none. Read it at a point where stopping is safe."""
    at_once: Callable[[int], None] | None = None
    """Called with a second signal's number before the process ends with 128 + number; must be quick."""

    finished: bool = False
    """Whether the work of this process is done: signals are ignored from then on, so that the exit code stays."""

    elsewhere: bool = False
    """Whether another rank was asked to stop."""
    interrupted: bool = False
    """Whether it was waiting for data when it was asked."""
    announce: Callable[[], None] | None = None
    """Called by a thread when the first signal has come; must be quick."""
    on_request: Callable[[int], None] | None = None
    """Called once by a thread as soon as this process knows of the request, with the signal's number (0: it was sent
    to another rank), so that the user sees that it has arrived; must be quick."""
    exit_code: int = 0
    """What the process will exit with after it has saved."""

    def __init__(self) -> None:
        self._first_at = 0.0
        self._installed = False
        self._interrupts = False
        self._is_acknowledged = False
        self._catches_unraisable = False
        self._leave: Callable[[int], None] | None = None

    def install(self) -> None:
        """Handle :attr:`signals` from now on. Main thread only; harmless when repeated."""
        if self._installed:
            return
        self._installed = True
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        for number in self.signals:
            signal.signal(number, self._handle)
        os.register_at_fork(after_in_child=self._let_go)
        threading.Thread(
            target=self._watch, args=(receiver,), name="stop-request", daemon=True
        ).start()

    def note(self, number: int) -> None:
        """Take this signal, which came to somebody else, as the request, if it is the first."""
        self._first_at = self._first_at or time.monotonic()
        self.requested = self.requested or number

    @property
    def wanted(self) -> bool:
        """Whether this rank has to stop."""
        return bool(self.requested) or self.elsewhere

    def interrupting(self) -> AbstractContextManager[None]:
        """Inside, in the main thread, a request raises :class:`StoppedWaiting`: now, or when it comes."""
        return _Interrupting(self)

    @contextlib.contextmanager
    def before_training(self, leave: Callable[[int], None]) -> Iterator[None]:
        """The same while nothing can be lost. A main thread that hears nothing (it waits for other ranks, or reads
        weights) is not waited for: another thread calls *leave* with the signal's number, to end the process."""
        self._leave = leave
        try:
            with self.interrupting():
                yield
        finally:
            self._leave = None

    def interrupt(self) -> None:
        """Another rank was asked to stop: end a wait of the main thread. To be called by another thread."""
        self.elsewhere = True
        self._acknowledge(self.requested)
        if self._interrupts:
            self._wake_main_thread()

    def follow(self) -> None:
        """Another rank was stopped before training and is gone: leave too, without waiting for it. To be called by
        another thread."""
        self.elsewhere = True
        self._leave_soon(0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or number
        self.wake(number, frame)

    def wake(self, number: int, frame: FrameType | None) -> None:
        """The handler of :data:`WAKE`."""
        if self._interrupts and self.wanted and not self.finished:
            self._interrupts = False
            self.interrupted = True
            self._catch_unraisable()
            raise StoppedWaiting

    def _catch_unraisable(self) -> None:
        """Repeat the interruption where the interpreter swallows it.

        A handler may run inside a ``__del__`` method or a callback of a weak reference, where Python prints any
        exception and drops it: then nothing is printed, and the main thread is interrupted again a little later.
        """
        previous = sys.unraisablehook

        def hook(unraisable: Any) -> None:
            if not issubclass(unraisable.exc_type, StoppedWaiting):
                previous(unraisable)
                return
            self._interrupts = True
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
            self._first_arrived(number)
        if is_first or time.monotonic() - self._first_at < SAME_SIGNAL_SECONDS:
            return
        try:
            if self.at_once is not None:
                self.at_once(number)
        finally:
            os._exit(128 + number)

    def _first_arrived(self, number: int) -> None:
        if self.announce is not None:
            self.announce()
        self._acknowledge(number)
        self._leave_soon(number)

    def _acknowledge(self, number: int) -> None:
        if self.on_request is not None and not self._is_acknowledged:
            self._is_acknowledged = True
            self.on_request(number)

    def _leave_soon(self, number: int) -> None:
        if self._leave is not None:
            waiting = threading.Timer(UNHEARD_SECONDS, self._leave_unheard, (number,))
            waiting.daemon = True
            waiting.start()

    def _leave_unheard(self, number: int) -> None:
        if self._leave is not None and self._interrupts:
            self._leave(number)

    def _let_go(self) -> None:
        """In a forked child (a data loader's worker) signals are not the child's affair, but SIGTERM ends it; unless it
        is a trainer itself and installs its own handlers."""
        self._installed = False
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in self.signals:
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_this_process = StopRequest()


def stop_request() -> StopRequest:
    """This process's request; the command line installs it before anything slow is imported."""
    return _this_process


class PeerStop:
    """Tells the other ranks of a request to stop, and this one of theirs, while the training step cannot.

    *store* is the ranks' store. A thread asks it now and then; nothing is sent before somebody was asked to stop.
    """

    KEY = "automodel_ckpt/stop"

    def __init__(self, request: StopRequest, store: Any) -> None:
        self._request, self._store = request, store
        self._closed = threading.Event()
        signal.signal(WAKE, request.wake)
        request.announce = self._announce
        if request.requested:
            self._announce()
        threading.Thread(target=self._watch, name="peer-stop", daemon=True).start()

    def close(self) -> None:
        """Ask no more; before the ranks part."""
        self._closed.set()
        self._request.announce = None

    def _announce(self) -> None:
        with contextlib.suppress(RuntimeError):  # the base of torch's store and network errors
            self._store.set(self.KEY, "1")

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):
            while not self._closed.wait(PEER_SECONDS):
                if self._store.check([self.KEY]):
                    self._until_heard()

    def _until_heard(self) -> None:
        """The signal can arrive between two waits: repeat it until the run ends."""
        while not self._closed.wait(PEER_SECONDS):
            self._request.interrupt()


class _Interrupting(AbstractContextManager[None]):
    """What :meth:`StopRequest.interrupting` returns; a generator would take three times as long, in each step."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def __enter__(self) -> None:
        self._request._interrupts = True
        if self._request.wanted:
            self._request._interrupts = False
            raise StoppedWaiting

    def __exit__(self, *_: object) -> None:
        self._request._interrupts = False
