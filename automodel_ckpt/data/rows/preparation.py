"""Tokenize all rows of a table in parts, on all cores, into flat arrays in the files of a directory.

Worker processes are forked, so that the function that they compute needs no pickling. Results come back in the order of
the ranges of rows. If the function raised for a range, the process that asked computes the range again, so that it gets
the exception itself, and the exception of the first such range.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from automodel_ckpt.base.python_child import freeze_in_forked_processes
from automodel_ckpt.data.collate import Integers
from automodel_ckpt.data.rows.rows import RowRange, Rows
from automodel_ckpt.data.samples.encoder import one_thread
from automodel_ckpt.data.samples.tokenized import (
    ARRAYS,
    COUNTS,
    NUMBERS,
    Counts,
    Samples,
    Truncation,
    too_long,
)

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Range = tuple[int, int]
_PR_SET_PDEATHSIG = 1
_MOST_WORKERS = 32
_BLOCK = 256
"""Ranges that are computed together. It bounds the memory for results that are not used yet."""

_function: Callable[[int, int], object] | None = None
"""The function of the workers that are forked next."""


def in_order(
    function: Callable[[int, int], _Result], ranges: Sequence[_Range], num_workers: int
) -> Iterator[_Result]:
    """Yield ``function(start, stop)`` for each range, in order, computed by *num_workers* processes.

    With one worker, or if worker processes cannot be started or die, this process computes the rest. Raises what
    *function* raises for the first range that fails.
    """
    global _function
    if num_workers < 2:
        yield from itertools.starmap(function, ranges)
        return
    _function = function
    freeze_in_forked_processes()
    context = multiprocessing.get_context("fork")
    workers = ProcessPoolExecutor(num_workers, context, _begin_worker, (os.getpid(),))
    try:
        for first in range(0, len(ranges), _BLOCK):
            block = ranges[first : first + _BLOCK]
            results: Iterator[Any] = iter(())
            # The first block forks all workers. Threads of the tokenizers library do not survive it.
            with one_thread(), warnings.catch_warnings():
                # Python 3.12 warns of a fork in a process with threads, such as torch's, which the workers do not use.
                warnings.simplefilter("ignore", DeprecationWarning)
                # AssertionError: multiprocessing lets a daemonic process have no children.
                with contextlib.suppress(BrokenProcessPool, OSError, AssertionError):
                    results = workers.map(_compute, *zip(*block, strict=True))
            for bounds in block:
                result = None
                # None when workers cannot be started, one has died, or the function raised.
                with contextlib.suppress(BrokenProcessPool):
                    result = next(results, None)
                yield function(*bounds) if result is None else result
    finally:
        # Also after Ctrl-C: what the workers compute now takes less than a second.
        workers.shutdown(wait=True, cancel_futures=True)
        _function = None


def _compute(start: int, stop: int) -> object | None:
    """Compute the function in a worker. Returns None when it raises: some exceptions cannot be pickled."""
    assert _function is not None
    with contextlib.suppress(Exception):
        return _function(start, stop)
    return None


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


Encode = Callable[[Rows], Samples]
"""A function that makes a sample of each row of a table, or for each row the samples of a group."""
ROWS_PER_PART = 1000
"""Rows that are in memory as Python objects, in each process."""
FEWEST_ROWS_FOR_WORKERS = 5000
"""Fewer rows are tokenized faster than processes start."""
_LINE_SECONDS = 30.0


class Part(NamedTuple):
    """The samples of a range of rows after truncation, concatenated, and the *counts* of the policy.

    *ends* counts from the start of the part. *too_long* are rows -> tokens that the policy ``error`` rejects.
    """

    num_rows: int
    tokens: npt.NDArray[np.int32]
    ends: Integers
    labelled: npt.NDArray[np.bool_]
    numbers: list[Any]
    counts: Counts
    too_long: dict[int, int]


def prepare(
    rows: Rows,
    encode: Encode,
    policy: Truncation,
    directory: Path,
    group_size: int,
) -> None:
    """Write the data set of all *rows* into *directory*. *encode* makes its samples, and *policy* truncates them.

    *encode* makes *group_size* samples of a row. :class:`TokenizedDataset` reads the files. Raises
    :class:`RecipeError` for the first row that *encode* does not accept, and then for all samples that are too long.
    """
    show = progress(rows.path, rows.num_rows)
    lengths: dict[int, int] = {}
    numbers: list[Any] = []
    counts = Counts()
    num_tokens = 0
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context((directory / name).open("wb")) for name in ARRAYS]
        for part in _encoded_parts(rows, encode, policy, group_size):
            values: list[npt.NDArray[Any]] = [part.tokens, part.ends + num_tokens, part.labelled]
            for file, array in zip(files, values, strict=True):
                file.write(array.tobytes())
            num_tokens += len(part.tokens)
            counts.update(part.counts)
            lengths |= part.too_long
            numbers += part.numbers
            show(part.num_rows)
    if lengths:
        raise too_long(lengths, policy.seq_length, rows.num_rows, rows.place)
    np.save(directory / NUMBERS, np.array(numbers))
    (directory / COUNTS).write_text(json.dumps(counts), encoding="utf-8")


def _encoded_parts(
    rows: Rows, encode: Encode, policy: Truncation, group_size: int
) -> Iterator[Part]:
    """Yield the samples of all *rows* in parts."""
    num_rows = rows.num_rows
    encode_range = partial(_encode_range, rows, encode, policy, group_size)
    # The first part is encoded here: without rows, this raises the error for that, and the workers inherit what
    # encoders find out once, with its log lines.
    first = min(ROWS_PER_PART, num_rows)
    yield encode_range(0, first)
    ranges = [
        (start, min(start + ROWS_PER_PART, num_rows))
        for start in range(first, num_rows, ROWS_PER_PART)
    ]
    num_workers = 1
    if num_rows >= FEWEST_ROWS_FOR_WORKERS:
        num_workers = min(len(os.sched_getaffinity(0)), _MOST_WORKERS, len(ranges))
    yield from in_order(encode_range, ranges, num_workers)


def _encode_range(
    rows: Rows,
    encode: Encode,
    policy: Truncation,
    group_size: int,
    start: int,
    stop: int,
) -> Part:
    samples = encode(RowRange(rows, start, stop))
    policy = replace(policy)
    remaining = []
    rejected = {}
    for number in range(start, stop):
        first = (number - start) * group_size
        group = samples[first : first + group_size]
        # The first token is never predicted. One error reports all long samples after the last row.
        longest = max(len(sample.tokens) * any(sample.labelled[1:]) for sample in group)
        if policy.policy == "error" and longest > policy.seq_length:
            rejected[number] = longest
        else:
            remaining += policy.apply(group, partial(rows.place, number))
    tokens = chain.from_iterable(sample.tokens for sample in remaining)
    labelled = chain.from_iterable(sample.labelled for sample in remaining)
    return Part(
        num_rows=stop - start,
        tokens=np.fromiter(tokens, np.int32),
        ends=np.cumsum([len(sample.tokens) for sample in remaining], dtype=np.int64),
        labelled=np.fromiter(labelled, np.bool_),
        numbers=[sample.number for sample in remaining],
        counts=policy.counts,
        too_long=rejected,
    )


def progress(what: str, num_rows: int) -> Callable[[int], None]:
    """Return a function to call with the number of rows of each part that is done. It logs a line every 30 seconds."""
    began = shown = time.monotonic()
    done = 0

    def show(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.monotonic()
        if now - shown < _LINE_SECONDS or done == num_rows:
            return
        shown = now
        rate = done / (now - began)
        log.info("%s: %d of %d rows are tokenized, %.0f rows/s", what, done, num_rows, rate)

    return show
