"""Steps that do not end: who is late, and what counts as a hang; ranks that are slower than others."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_ckpt.checkpoint.run.notes import DATA, SAVES, STEPS, VALIDATION
from automodel_ckpt.config.keys.monitoring import HangsConfig
from automodel_ckpt.logs.timeline import Timeline
from automodel_ckpt.parallel.ranks import hangs
from automodel_ckpt.parallel.ranks.hangs import (
    ProcessAddress,
    ProcessReport,
    RankState,
    StackDump,
    report_on,
    verdict,
)
from automodel_ckpt.parallel.ranks.stop import StopRequest
from automodel_ckpt.training.watch.hang_watch import HangWatch

STATE = RankState(0, "now", 12, STEPS, 5.0, {"0": 30, "1": 4}, "in a step: f (a.py:1)")
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
    outcome = verdict(found, found, {}, WORKING)
    assert outcome is not None
    assert list(outcome.ranks) == late
    if late:
        assert f"rank {late[0]} did not arrive: in a step: f (a.py:1)" in outcome.text
    else:
        assert "all ranks are at the same collective" in outcome.text


HOLDS_THE_INTERPRETER = """
import ctypes, dataclasses, json, os
from automodel_ckpt.parallel.ranks.hangs import StackDump
dump = StackDump()
print(json.dumps(dataclasses.asdict(dump.address)), flush=True)
library = ctypes.PyDLL(None)  # PyDLL keeps the interpreter's lock
def held():
    while True:
        library.sleep(60)  # a signal ends it
held()
"""


def test_stacks_of_a_process_that_holds_the_interpreter_are_dumped_by_a_signal() -> None:
    def report() -> ProcessReport:
        found = report_on(address)
        assert found is not None
        return found

    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_INTERPRETER], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = ProcessAddress(**json.loads(process.stdout.readline()))
        # The process may not hold the interpreter yet, or be slow to write.
        end = time.monotonic() + 60
        while "in held" not in (awake := report()).text:
            assert time.monotonic() < end, awake
        os.kill(process.pid, signal.SIGSTOP)
        end = time.monotonic() + 60
        while (stopped := report()).note != f"is suspended (process {process.pid})":
            assert time.monotonic() < end, stopped
        process.kill()
    assert "its stacks were dumped" in awake.note
    assert report_on(address) is None


def test_no_signal_is_sent_to_another_process_that_has_the_id_of_a_rank() -> None:
    """Containers may share a host name, and ids are used again: the signal would end another program."""
    with StackDump() as dump, subprocess.Popen(["sleep", "60"]) as other:
        # The first file that it opens has the number of the dump's or less.
        for descriptor in range(dump.address.descriptor + 1):
            elsewhere = replace(dump.address, process=other.pid, descriptor=descriptor)
            assert report_on(elsewhere) is None
        assert other.poll() is None
        other.kill()


class Clock:
    """Replaces the clock of the timeline."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("automodel_ckpt.logs.timeline.time", clock)
    return clock


def watch(
    timeline: Timeline, run: Path, stop_request: StopRequest | None = None, **settings: Any
) -> HangWatch:
    """A watch of rank 0 of three, whose thread does not run."""
    found = HangWatch(
        SimpleNamespace(
            config=SimpleNamespace(
                hangs=HangsConfig(**settings), distributed=SimpleNamespace(timeout_minutes=math.inf)
            ),
            layout=SimpleNamespace(rank=0, world_size=3, gloo_group=None, is_rank0=True),
            run_log=SimpleNamespace(timeline=timeline),
            checkpointer=SimpleNamespace(directory=run, nodes=None),
            stop_request=stop_request or StopRequest(),
        )
    )
    found._worked_before = found._worked()
    found.hosts, found._addresses = ["here"] * 3, [None] * 3
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


def test_after_a_stop_request_a_hang_that_was_only_reported_ends_the_run(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save waits for the step, and launchers do not wait long."""
    messages: list[str] = []
    monkeypatch.setattr(hangs, "restart", messages.append)
    timeline, request = Timeline(), StopRequest()
    timeline.enter(STEPS)
    watched = watch(timeline, tmp_path, min_seconds=600.0, restart=False, stop_request=request)
    for step in range(1, 20):
        clock.now += 0.1
        watched.note_step(step)
    for rank in (1, 2):
        state = replace(STATE, rank=rank, start=watched._start, completed=20 - rank)
        hangs.write_state(tmp_path / "hangs" / "step_20", replace(state, is_overdue=False))
    for seconds, requested in ((61, 0), (540, 0), (0, signal.SIGTERM)):
        assert not messages
        clock.now += seconds
        request.requested = requested
        for _ in range(2):
            watched._check()
    (text,) = messages
    assert "rank 2 did not arrive" in text and "nothing was saved" in text
    request.requested, watched._num_overdue = signal.SIGTERM, 0
    watched.note_step(20)
    clock.now += 61
    assert is_reported(watched, monkeypatch), "after 60 s in place of hangs.min_seconds"
