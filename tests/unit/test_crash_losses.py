"""What the campaigns count as lost after a failure, and how they stop a process at a point."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from tools.crash import points, sigterm
from tools.crash.losses import Loss, Losses, completed, has_completed, resumed
from tools.crash.points import Armed, Point
from tools.crash.record import Record
from tools.crash.strikes import Result
from tools.crash.trainer import Mark

MARKS = [Mark(1.0, "data", 4), Mark(2.0, "data", 5), Mark(2.1, "agree", 5)]
RESTARTED = [*MARKS, Mark(4.0, "data", 3), Mark(5.0, "data", 4), Mark(7.0, "data", 6)]


def test_lost_steps_are_those_from_the_step_that_was_loaded() -> None:
    assert completed(MARKS) == 5
    assert resumed(RESTARTED, 3.0, 5) == 3
    assert resumed(MARKS, 3.0, 5) == 5
    assert not has_completed(RESTARTED[:-1], 6, since=3.0)
    assert has_completed(RESTARTED, 6, since=3.0)
    assert not has_completed(RESTARTED, 6, since=8.0)


def test_losses_are_listed_by_way_and_target_with_all_of_a_way() -> None:
    losses = Losses("killed")
    for steps, seconds in ((0, 3.0), (3, 5.0)):
        losses.add("disk", "a rank", Loss(steps, seconds))
    losses.add("disk", "a node", Loss(1, 9.0))
    lines = losses.table().splitlines()
    assert "| disk | a rank | 2 | 3 (1.50) | 4.0 |" in lines
    assert "| **disk** | **all** | 3 | 3 (1.33) | 5.0 |" in lines
    assert losses.notes()["disk: a rank"]["lost steps, most"] == 3


def test_the_losses_of_several_processes_are_one_table() -> None:
    results = [Result(Record("goodput", {})) for _ in range(2)]
    for seconds, result in enumerate(results):
        result.record.require(["memory: a copy begins", "memory: a copy ends"])
        result.record.add("memory: a rank")
        result.by_target.add("memory", "a rank", Loss(1, float(seconds)))
    results[0].record.count_at("memory: a copy begins")
    results[0].record.add("memory: a launcher")
    results[0].add(results[1])
    record = results[0].finished()
    assert "| memory | a rank | 2 | 1 (1.00) | 0.5 |" in record.table
    assert "1 failures after which" in record.table
    # The time of the campaign has ended: no promise is broken.
    assert record.failures == []
    assert record.notes["no failure at"] == ["memory: a copy ends"]


def test_one_process_stops_at_an_armed_point_until_the_campaign_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRASH_MARKS", str(tmp_path))
    calls: list[int] = []
    function = points._stopping(Point("a call ends", "", end=True), calls.append)
    function(1)
    with Armed(tmp_path, Point("a call ends", "")) as armed:
        assert armed.stopped is None
        thread = threading.Thread(target=function, args=(2,))
        thread.start()
        while armed.stopped is None:
            time.sleep(0.001)
        function(3)
        assert thread.is_alive()
    thread.join(120)
    assert not thread.is_alive()
    assert calls == [1, 2, 3] and list(tmp_path.iterdir()) == []


def test_a_campaign_ends_after_a_sigterm_whose_exception_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sigterm, "_received", False)
    try:
        sigterm.end_in_order_on_sigterm()
        sigterm.check_sigterm()
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        # A second signal does not interrupt what the first one has begun.
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit, match="143"):
            sigterm.check_sigterm()
    finally:
        signal.signal(signal.SIGTERM, before)
