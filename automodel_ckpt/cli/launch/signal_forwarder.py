"""Forward the signals of the launcher to the ranks that it forked. They save and return 75, which may take long."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from threading import Thread
from types import FrameType
from typing import Any, TypeVar

from automodel_ckpt.cli.launch.process import print_message
from automodel_ckpt.parallel.ranks.stop import SAME_SIGNAL_SECONDS, StoppedWaiting, stop_request

Result = TypeVar("Result")


class SignalForwarder:
    """Forwards this process's signals to *processes* while it is entered.

    *received* is the first signal that requests a stop, or 0. If there was one, further signals are ignored after the
    context: the exit code of a run that was stopped must not change while this process ends. *code* is the exit code of
    ranks that are done.
    """

    def __init__(self) -> None:
        self.received = 0
        self.processes: Sequence[BaseProcess] = ()
        self.code: int | None = None
        self._first_at = 0.0
        self._is_waiting = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalForwarder:
        for number in stop_request().handled:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, _ignore if self.received else handler)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """A context in which signals wait, so that each one reaches all ranks that are forked in it.

        The ranks inherit the mask, and unblock the signals when they handle them.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_request().handled)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_request().handled)

    def wait_for(self, action: Callable[[], Result]) -> Result:
        """Return the result of *action*, which may wait in C++, where no signal handler runs.

        Raises :class:`StoppedWaiting` for a signal.
        """
        outcome: Future[Result] = Future()

        def run() -> None:
            try:
                outcome.set_result(action())
            except BaseException as error:
                outcome.set_exception(error)

        thread = Thread(target=run, daemon=True)
        thread.start()
        try:
            self._is_waiting = True
            if self.received:
                raise StoppedWaiting
            result = outcome.result()
        finally:
            self._is_waiting = False
        # Ranks are forked next: no thread may hold a lock.
        thread.join()
        return result

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_stop = number in stop_request().signals
        is_second = self.received and time.monotonic() - self._first_at >= SAME_SIGNAL_SECONDS
        if is_stop and not self.received:
            self.received, self._first_at = number, time.monotonic()
            stop_request().note(number)
        running = [process for process in self.processes if process.exitcode is None]
        for process in running:
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)
        if not is_stop:
            return
        if is_second and not running:
            if self.code is None:
                print_message(f"stopped immediately by a second {signal.Signals(number).name}")
            os._exit(128 + number if self.code is None else self.code)
        if self._is_waiting:
            self._is_waiting = False
            raise StoppedWaiting
        stop_request().wake(number, frame)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal after the work is done. SIG_IGN in its place would be taken for nohup's by a later run."""
