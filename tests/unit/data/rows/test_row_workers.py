"""Processes that compute ranges of rows: how many, what they inherit, and what happens if they cannot be started."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

from automodel_ckpt.data.rows import row_workers
from automodel_ckpt.data.rows.row_workers import in_order, usable_cores

RANGES = [(number, number + 1) for number in range(50)]
_PR_GET_PDEATHSIG = 2


def doubled(start: int, stop: int) -> int:
    return 2 * start


@pytest.mark.parametrize(
    ("cores", "num_sharing", "expected"), [(8, 1, 8), (8, 4, 2), (8, 16, 1), (100, 2, 32)]
)
def test_processes_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, num_sharing: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert usable_cores(num_sharing) == expected


def test_signals_are_the_parents_and_a_worker_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")

    def found(start: int, stop: int) -> tuple[Any, Any, int, str]:
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
        handlers = [int(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)]
        return *handlers, number.value, os.environ["TOKENIZERS_PARALLELISM"]

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        results = list(in_order(found, RANGES[:4], 2))
    finally:
        signal.signal(signal.SIGTERM, before)
    # A worker that ignored SIGTERM could not be ended by the pool.
    expected = (int(signal.SIG_IGN), int(signal.SIG_DFL), int(signal.SIGKILL), "false")
    assert results == [expected] * 4
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_only_a_few_ranges_are_computed_before_their_results_are_used() -> None:
    num_computed = multiprocessing.get_context("fork").Value("i", 0)

    def counted(start: int, stop: int) -> int:
        with num_computed.get_lock():
            num_computed.value += 1
        return start

    results = in_order(counted, RANGES, 2)
    assert next(results) == 0
    time.sleep(0.2)
    assert num_computed.value <= 4
    assert list(results) == list(range(1, 50))


def test_an_exception_that_cannot_be_pickled_is_raised_itself() -> None:
    class Unusable(Exception):
        def __init__(self, row: int) -> None:
            super().__init__(row)
            self.place = lambda: row

    def failing(start: int, stop: int) -> int:
        if start >= 3:
            raise Unusable(start)
        return start

    with pytest.raises(Unusable, match=r"^3$"):
        list(in_order(failing, RANGES, 2))


def test_a_process_that_may_not_have_others_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [2 * number for number in range(50)]

    def raise_error(*_: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(row_workers.ProcessPoolExecutor, "submit", raise_error)
    assert list(in_order(doubled, RANGES, 2)) == expected
    monkeypatch.undo()
    # multiprocessing lets a daemonic process have no children.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(all_doubled) == expected


def all_doubled() -> list[int]:
    return list(in_order(doubled, RANGES, 2))
