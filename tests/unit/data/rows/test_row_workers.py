"""Processes that compute ranges of rows: how many, what they inherit, and what happens if they cannot be started."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from automodel_ckpt.data.rows import row_workers
from automodel_ckpt.data.rows.row_workers import in_order

RANGES = [(number, number + 1) for number in range(50)]


def doubled(start: int, stop: int) -> int:
    return 2 * start


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
