"""Steps that do not end: who is late, and what counts as a hang; ranks that are slower than others."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_ckpt.checkpoint.run.timeline import DATA, SAVES, STEPS, VALIDATION
from automodel_ckpt.config.schema import HangsConfig
from automodel_ckpt.distributed import hang_action, hangs
from automodel_ckpt.distributed.hangs import RankState, StackDump, stacks_of, stragglers, verdict
from automodel_ckpt.recipes import hang_watch
from automodel_ckpt.recipes import loop as loop_module
from automodel_ckpt.recipes.hang_watch import HangWatch
from automodel_ckpt.recipes.loop import TrainingLoop
from automodel_ckpt.training.timeline import Timeline

STATE = RankState(0, 100.0, 12, STEPS, 5.0, {"0": 30, "1": 4}, "in a step: f (a.py:1)")
WORKING = (STEPS, DATA)


def states(*changes: dict[str, Any]) -> dict[int, RankState]:
    """A state per rank, each with changes."""
    return {rank: replace(STATE, rank=rank, **change) for rank, change in enumerate(changes)}


@pytest.mark.parametrize(
    ("found", "late"),
    [
        (states({}, {"completed": 11}), [1]),
        (states({"collectives": {"0": 29, "1": 4}}, {}, {}), [0]),
        (states({"collectives": {"0": 30, "1": 4}}, {"collectives": {"0": 30, "2": 9}}), []),
        (states({}, {}), []),
    ],
)
def test_the_rank_that_is_behind_is_named(found: dict[int, RankState], late: list[int]) -> None:
    outcome = verdict(found, len(found), {}, WORKING)
    assert outcome is not None
    assert list(outcome.ranks) == late
    if late:
        assert f"rank {late[0]} did not arrive: in a step: f (a.py:1)" in outcome.text
    else:
        assert "all ranks are at the same collective" in outcome.text


def test_a_rank_without_a_state_is_named_and_one_that_saves_excuses_the_others() -> None:
    outcome = verdict(states({}, {}), 3, {2: "is suspended (process 7)"}, WORKING)
    assert outcome is not None
    assert (outcome.ranks, outcome.text) == ([2], "rank 2 is suspended (process 7)")
    assert verdict(states({}, {"phase": SAVES}), 2, {}, WORKING) is None


def test_states_are_read_as_they_were_written_and_nothing_else_is(tmp_path: Path) -> None:
    hangs.write_state(tmp_path, STATE)
    (tmp_path / "rank_1.txt").write_text('{"rank": 1, "time": [1]}\n')
    (tmp_path / "rank_2.txt").write_bytes(b"\xff\n")
    assert hangs.read_states(tmp_path, 99.0) == {0: STATE}
    assert hangs.read_states(tmp_path, 101.0) == {}, "that of an earlier start"
    assert "in test_states_are_read_as" in (tmp_path / "rank_0.txt").read_text()


HOLDS_THE_INTERPRETER = """
import ctypes, os
from automodel_ckpt.distributed.hangs import StackDump
dump = StackDump()
print(*dump.address, flush=True)
library = ctypes.PyDLL(None)  # PyDLL keeps the interpreter's lock
def held():
    while True:
        library.sleep(60)  # a signal ends it
held()
"""


def test_stacks_of_a_process_that_holds_the_interpreter_are_dumped_by_a_signal() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_INTERPRETER], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        host, number, descriptor = process.stdout.readline().split()
        end = time.monotonic() + 10
        # The process may not hold the interpreter yet, or be slow to write.
        stacks, note = "", ""
        while "in held" not in stacks:
            assert time.monotonic() < end, note
            stacks, note = stacks_of((host, int(number), int(descriptor)))
        os.kill(process.pid, hangs.signal.SIGSTOP)
        end = time.monotonic() + 10
        while stacks_of((host, int(number), int(descriptor))) != (
            "",
            f"is suspended (process {number})",
        ):
            assert time.monotonic() < end
        process.kill()
    assert "in held" in stacks
    assert "its stacks were dumped" in note
    assert stacks_of(("another-host", 1, 1)) == ("", "")


class Clock:
    """Replaces the clock of the timeline."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("automodel_ckpt.training.timeline.time", clock)
    monkeypatch.setattr(hang_watch, "gather_objects", lambda _, mine: [mine, *WAITS_OF_OTHERS])
    return clock


WAITS_OF_OTHERS = [0.9, 1.0]


def watch(timeline: Timeline, run: Path, **settings: Any) -> HangWatch:
    """A watch of rank 0 of three, whose thread does not run."""
    layout: Any = SimpleNamespace(rank=0, world_size=3, gloo_group=None, is_rank0=True)
    found = HangWatch(HangsConfig(**settings), layout, timeline, run)
    found._worked_before = found._worked()
    return found


def is_reported(watched: HangWatch, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the thread reports the present step."""
    reports: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(watched, "_report", lambda step, _: reports.append(step))
        for _ in range(3):
            watched._check()
    return bool(reports)


def test_only_a_step_far_beyond_the_median_and_the_limit_hangs(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = Timeline()
    watched = watch(timeline, tmp_path, min_seconds=60.0, factor=10.0)
    clock.now += 10_000
    assert not is_reported(watched, monkeypatch), "start-up"
    timeline.enter(STEPS)
    clock.now += 10_000
    assert not is_reported(watched, monkeypatch), "the first step compiles"
    for step in range(1, 9):
        watched.note_step(step)
        clock.now += 2
    watched.note_step(9)
    for phase in (SAVES, VALIDATION):
        with timeline.phase(phase):
            clock.now += 10_000
            assert not is_reported(watched, monkeypatch), phase
    clock.now += 59
    assert not is_reported(watched, monkeypatch), "below hangs.min_seconds"
    timeline.enter(DATA)
    clock.now += 2
    assert is_reported(watched, monkeypatch), "in data"
    watched.note_step(10)
    assert not is_reported(watched, monkeypatch)
    slow = watch(timeline, tmp_path, min_seconds=60.0, factor=10.0)
    for step in range(1, 20):
        clock.now += 30
        slow.note_step(step)
    clock.now += 299
    assert not is_reported(slow, monkeypatch), "below hangs.factor times the median"
    clock.now += 2
    assert is_reported(slow, monkeypatch)


@pytest.mark.parametrize("may_restart", [True, False])
def test_a_hang_is_reported_or_the_ranks_are_restarted(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    may_restart: bool,
) -> None:
    """With hangs.restart false, or without restarts, it is reported."""
    messages: list[str] = []
    monkeypatch.setattr(hang_action, "restart", messages.append)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    timeline = Timeline()
    timeline.enter(STEPS)
    watched = watch(timeline, tmp_path, min_seconds=1.0, restart=may_restart)
    for step in range(1, 20):
        clock.now += 0.1
        watched.note_step(step)
    directory = tmp_path / "hangs" / "step_20"
    for rank in (1, 2):
        hangs.write_state(
            directory,
            replace(
                STATE, rank=rank, time=time.time(), completed=19 - (rank == 2), is_overdue=False
            ),
        )
    monkeypatch.setattr(watched._timeline, "started", 0.0)
    clock.now += 5
    watched._check()
    watched._check()
    (text,) = messages if may_restart else [record.getMessage() for record in caplog.records]
    assert "step 20 hangs: it takes 5 s, and the median is 0.1 s" in text
    assert "rank 2 did not arrive" in text
    assert str(directory) in text
    assert bool(messages) == may_restart
    assert (directory / "report.txt").read_text() == f"{text}\n"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_RESTART_COUNT": "0"}, True),
        ({"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({}, False),
    ],
)
def test_a_restart_needs_one_that_is_left(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_action, "restart", print)
    assert hang_action.may_restart(environment) == expected
    monkeypatch.setattr(hang_action, "restart", None)
    assert not hang_action.may_restart(environment)


def test_a_rank_that_others_wait_for_in_two_windows_is_reported_with_numbers(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    assert stragglers([0.05, 0.9, 1.0, 1.1], 4.0, 0.1) == [0]
    assert stragglers([0.05, 0.1, 0.2, 0.1], 4.0, 0.1) == []
    timeline = Timeline()
    timeline.enter(STEPS)
    watched = watch(timeline, tmp_path, straggler_share=0.1)
    with caplog.at_level(logging.WARNING, "automodel_ckpt"):
        for step in range(1, 2 * hang_watch.WINDOW_STEPS + 1):
            assert not caplog.records
            clock.now += 2
            watched.note_wait(0.01)
            watched.note_step(step)
    (record,) = caplog.records
    assert "rank 0 is slower than the others: in the last 100 steps, they waited 0.89 s" in (
        record.getMessage()
    )
    caplog.clear()
    tolerant = watch(timeline, tmp_path, straggler_share=0.9)
    for step in range(1, 2 * hang_watch.WINDOW_STEPS + 1):
        clock.now += 2
        tolerant.note_wait(0.01)
        tolerant.note_step(step)
    assert not caplog.records, "hangs.straggler_share"


def test_the_thread_ends_with_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "gather_objects", lambda _, mine: [mine])
    before = threading.active_count()
    with watch(Timeline(), tmp_path, min_seconds=1.0):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    with StackDump() as dump:
        assert dump.address[1] == os.getpid()


def test_the_section_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """hangs: null."""
    made: list[Any] = []
    monkeypatch.setattr(
        loop_module, "HangWatch", lambda *given: made.append(given) or nullcontext()
    )
    for section, expected in ((None, 0), (HangsConfig(), 1)):
        loop: Any = SimpleNamespace(
            config=SimpleNamespace(hangs=section),
            checkpointer=SimpleNamespace(directory=Path("run")),
            layout=SimpleNamespace(world_size=2),
            run_log=SimpleNamespace(timeline=Timeline()),
        )
        with TrainingLoop._hang_watch(loop):
            assert len(made) == expected
