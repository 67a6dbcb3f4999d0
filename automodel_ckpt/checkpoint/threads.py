"""Threads that a rank may use beside its own, and the cores for them. Imports nothing of the package."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any


def cores_of_rank() -> int:
    """How many cores this process may keep busy: those of the node, divided among its ranks."""
    num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def started_pool(num_threads: int, name: str) -> ThreadPoolExecutor | None:
    """A pool whose threads have all started; None if they cannot start, so that no later call of ``submit`` fails.

    A process cannot start threads at a limit of the machine, and after the end of its main thread: in functions of
    ``atexit``, and in other threads that still run.
    """
    pool = ThreadPoolExecutor(num_threads, name)
    may_end = threading.Event()
    try:
        for _ in range(num_threads):
            # It starts a thread only while all others have work.
            pool.submit(may_end.wait)
    except RuntimeError:
        may_end.set()
        pool.shutdown()
        return None
    finally:
        may_end.set()
    return pool


class CallingThread(Executor):
    """Calls each function in the thread that submits it: where :func:`started_pool` returns None."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
