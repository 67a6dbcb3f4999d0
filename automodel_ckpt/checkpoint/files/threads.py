"""Threads that a rank may use in addition to its own, and the cores for them. Imports nothing of the package."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_PAUSE_SECONDS = 0.001


def cores_of_rank() -> int:
    """How many cores this process may keep busy: the cores of the node, divided among its ranks."""
    num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


class Pool(ThreadPoolExecutor):
    """Threads that no longer use files and memory of the caller after :meth:`end`, even if it is interrupted.

    The exception of a signal's handler ends the wait of ``shutdown``. In Python 3.11 and 3.12, a thread counts as ended
    then, and further calls of ``shutdown`` do not wait for it. It would go on with descriptors that the caller closes,
    and that may belong to another file soon. As a context manager, the pool is ended like this.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, name)
        # Only the threads of the pool lock it: an interruption could leave it locked.
        self._counting = threading.Lock()
        self._num_running = 0
        self._has_ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return super().submit(self._call, partial(fn, *args, **kwargs))

    def _call(self, function: Callable[[], T]) -> T:
        with self._counting:
            self._num_running += 1
        try:
            # After the call is counted: end() may count now.
            if self._has_ended:
                raise CancelledError
            return function()
        finally:
            with self._counting:
                self._num_running -= 1

    def end(self, stop: Callable[[], None] = lambda: None) -> None:
        """Wait for the calls in progress; the others are left out.

        An interruption is raised after that; *stop* is called first, so that the wait is short.
        """
        interruption: BaseException | None = None
        while True:
            try:
                self._has_ended = True
                while self._num_running:
                    time.sleep(_PAUSE_SECONDS)
                break
            except BaseException as error:
                interruption = interruption or error
                stop()
        self.shutdown(wait=interruption is None, cancel_futures=True)
        if interruption is not None:
            raise interruption

    def __exit__(self, *_: object) -> None:
        self.end()


class CallingThread(Executor):
    """Calls each function in the thread that submits it: where :func:`started_pool` returns None."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def end(self, stop: Callable[[], None] = lambda: None) -> None:
        """All calls have ended."""


def started_pool(num_threads: int, name: str) -> Pool | None:
    """A pool with all threads started, so that no later call of ``submit`` fails. None when they cannot start.

    A process cannot start threads at a limit of the machine, and after the end of its main thread: in functions of
    ``atexit``, and in other threads that still run.
    """
    pool = Pool(num_threads, name)
    may_end = threading.Event()
    try:
        for _ in range(num_threads):
            # It starts a thread only while all others have work.
            pool.submit(may_end.wait)
    except RuntimeError:
        may_end.set()
        pool.end()
        return None
    finally:
        may_end.set()
    return pool


@contextmanager
def collector_paused() -> Iterator[None]:
    """Run a block, or as a decorator a function, without the garbage collector.

    A save or a load of tens of thousands of tensors creates a million objects. The collector visits all of them, and
    all others of the program, several times, and finds nothing: a third of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
