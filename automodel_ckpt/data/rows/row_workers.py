"""Worker processes that compute a function of ranges of rows. They are forked, so that the function needs no pickling.

A result comes back in the order of the ranges. A range whose function raised is computed again by the process that
asked, so that it gets the exception itself, and that of the first such range.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar, cast

from automodel_ckpt.base.forks import freeze_in_forked_processes

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Range = tuple[int, int]
_PR_SET_PDEATHSIG = 1
_MOST_WORKERS = 32
_AHEAD = 2
"""Ranges per worker that are computed or waiting. It bounds the memory for results that are not used yet."""
_PARALLELISM = "TOKENIZERS_PARALLELISM"

_function: Callable[[int, int], object] | None = None
"""The function of the workers that are forked next."""


def usable_cores() -> int:
    """Return how many workers a process may start."""
    return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)


def in_order(
    function: Callable[[int, int], _Result], ranges: Sequence[_Range], num_workers: int
) -> Iterator[_Result]:
    """Yield ``function(start, stop)`` for each range, in order, computed by *num_workers* processes.

    With one worker, or if worker processes cannot be started or die, this process computes the rest. Raises what
    *function* raises for the first range that fails.
    """
    if num_workers < 2:
        yield from itertools.starmap(function, ranges)
        return
    waiting = deque(ranges)
    submitted: deque[tuple[_Range, Future[object] | None]] = deque()
    with _workers(function, num_workers) as workers:
        while waiting or submitted:
            while waiting and len(submitted) < num_workers * _AHEAD:
                bounds = waiting.popleft()
                submitted.append((bounds, _submit(workers, bounds)))
            bounds, future = submitted.popleft()
            result = _result_of(future)
            if result is None:
                yield function(*bounds)
            else:
                yield cast("_Result", result)


def _submit(workers: ProcessPoolExecutor, bounds: _Range) -> Future[object] | None:
    """Pass a range to a worker; None if workers cannot be started, or have died."""
    try:
        return workers.submit(_compute, *bounds)
    except (BrokenProcessPool, OSError, AssertionError):
        # AssertionError: multiprocessing lets a daemonic process have no children.
        return None


def _result_of(future: Future[object] | None) -> object | None:
    """Wait for the result of a range; None if the function raised or the worker died."""
    if future is None:
        return None
    try:
        return future.result()
    except BrokenProcessPool:
        log.debug("a worker process died; this process tokenizes the rest")
        return None


def _compute(start: int, stop: int) -> object | None:
    """Compute the function in a worker. Returns None if it raises: some exceptions cannot be pickled."""
    assert _function is not None
    with contextlib.suppress(Exception):
        return _function(start, stop)
    return None


@contextlib.contextmanager
def _workers(
    function: Callable[[int, int], object], num_workers: int
) -> Iterator[ProcessPoolExecutor]:
    """Start processes that compute *function*. They end with the block, or with this process."""
    global _function
    before = os.environ.get(_PARALLELISM)
    # Threads of the tokenizers library do not survive a fork, and each worker has one core.
    os.environ[_PARALLELISM] = "false"
    _function = function
    freeze_in_forked_processes()
    context = multiprocessing.get_context("fork")
    workers = ProcessPoolExecutor(num_workers, context, _begin_worker, (os.getpid(),))
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork in a process with threads, such as torch's, which the workers do not use.
            warnings.simplefilter("ignore", DeprecationWarning)
            # The first task forks all workers.
            with contextlib.suppress(BrokenProcessPool, OSError, AssertionError):
                workers.submit(os.getpid)
        yield workers
    finally:
        # Also after Ctrl-C: what the workers compute now takes less than a second.
        workers.shutdown(wait=True, cancel_futures=True)
        _function = None
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before


def _begin_worker(parent: int) -> None:
    """Leave signals to the parent, and end with it."""
    # Ctrl-C and a scheduler's signals reach all processes. The parent handles them, and ends the workers.
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The kernel sends it when the thread that forked this process ends (prctl(2)).
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
