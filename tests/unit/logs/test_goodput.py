"""The time of a run by category: measured by ``Timeline``, read by ``ckpt goodput``; each second counts once."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.files.layout import TIMELINE_LOG, TIMELINE_STATE, TRAINING_LOG
from automodel_ckpt.checkpoint.run.notes import (
    DATA,
    PHASES,
    SAVES,
    STEPS,
    VALIDATION,
)
from automodel_ckpt.cli import ckpt
from automodel_ckpt.errors import EXIT_DONE, EXIT_UNUSABLE
from automodel_ckpt.logs import timeline as module
from automodel_ckpt.logs.goodput import CATEGORIES, Goodput, read_goodput
from automodel_ckpt.logs.history import read_history
from automodel_ckpt.logs.page import page
from automodel_ckpt.logs.timeline import Timeline

BEGAN = 1_000_000.0


class Clock:
    """Replaces the clock of the timeline: :meth:`pass_` lets seconds pass."""

    def __init__(self) -> None:
        self.now = BEGAN

    def time(self) -> float:
        return self.now

    monotonic = time

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Run:
    """A run in a directory, whose starts take as many seconds in each phase as is given."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.directory, self.clock = directory, clock

    def start(self, step: int, startup: float = 10.0) -> Timeline:
        """Start after *step*, and remove the later lines of the log, as a resume does."""
        timeline = Timeline()
        self.clock.pass_(startup)
        self._truncate(step)
        name = f"epoch_0_step_{step}" if step else None
        timeline.open(self.directory, lambda: None, step=step, resumed_from=name, world_size=2)
        timeline.enter(STEPS)
        return timeline

    def go_back(self, timeline: Timeline, step: int) -> None:
        """Continue after *step*, as after a spike."""
        self._truncate(step)
        timeline.step = step

    def _truncate(self, step: int) -> None:
        kept = [line for line in self._lines() if json.loads(line)["step"] <= step]
        (self.directory / TRAINING_LOG).write_text("".join(kept))

    def steps(self, timeline: Timeline, last: int, seconds: float = 2.0) -> None:
        """Make the steps up to *last*, each after half a second of waiting for its data."""
        for step in range(timeline.step + 1, last + 1):
            batches: Iterator[int] = timeline.waiting_for(self._slow_batch())
            assert next(batches) == 1
            self.clock.pass_(seconds)
            record = {
                "step": step,
                "timestamp": self.clock.now,
                "seconds": timeline.seconds_of_step(step),
            }
            with (self.directory / TRAINING_LOG).open("a") as log:
                log.write(json.dumps(record) + "\n")

    def kill(self, timeline: Timeline) -> None:
        """Close the files of a start without the line of its end."""
        assert timeline._log is not None
        assert timeline._state is not None
        timeline._log.close()
        os.close(timeline._state)

    def _slow_batch(self) -> Iterator[int]:
        self.clock.pass_(0.5)
        yield 1

    def _lines(self) -> list[str]:
        path = self.directory / TRAINING_LOG
        return path.read_text().splitlines(keepends=True) if path.exists() else []


def seconds_of(found: Goodput) -> dict[str, float]:
    """The categories that are not zero."""
    return {name: seconds for name, seconds in found.seconds.items() if seconds}


def test_each_second_of_three_starts_is_in_one_category(tmp_path: Path, clock: Clock) -> None:
    run = Run(tmp_path, clock)
    first = run.start(0)
    run.steps(first, 4)
    with first.phase(VALIDATION):
        clock.pass_(3)
        with first.phase(SAVES):
            clock.pass_(5)
    run.steps(first, 6)
    # In the seventh step, and last seen when that began.
    first.enter(DATA)
    clock.pass_(1)
    first.enter(STEPS)
    clock.pass_(1)
    first.enter(STEPS)
    run.kill(first)
    clock.pass_(60)
    second = run.start(4, startup=7)
    run.steps(second, 8)
    clock.pass_(0.25)
    second.outcome = "stopped"
    second.close()
    clock.pass_(100)
    third = run.start(8, startup=8)
    run.steps(third, 9)
    third.enter(DATA)
    third.outcome = "done"
    third.close()

    found = read_goodput(tmp_path)
    assert seconds_of(found) == pytest.approx(
        {
            "steps": 9 * 2,
            "startup": 10,
            "validation": 3,
            "saves": 5,
            "data": 6 * 0.5 + 1 + 4 * 0.5 + 0.5,
            "lost_steps": 2 * 2 + 1,
            "restarts": 7 + 8,
            "down": 60 + 100,
            "other": 0.25,
        }
    )
    assert found.total == pytest.approx(clock.now - BEGAN), "from the first start to the last end"
    assert found.share == pytest.approx(18 / found.total)
    assert (found.num_steps, found.num_lost_steps) == (9, 2)
    assert [start.outcome for start in found.starts] == ["killed", "stopped", "done"]


def test_a_running_start_and_one_with_a_lost_disk_are_counted(tmp_path: Path, clock: Clock) -> None:
    run = Run(tmp_path, clock)
    start = run.start(0)
    run.steps(start, 3)
    clock.pass_(1)
    start.enter(STEPS)
    found = read_goodput(tmp_path)
    assert found.starts[-1].outcome == "running or killed"
    assert found.seconds["lost_steps"] == 0, "the step that is being made is not lost"
    assert found.total == pytest.approx(clock.now - BEGAN)
    run.kill(start)
    (tmp_path / TIMELINE_STATE).unlink()
    clock.pass_(50)
    run.start(3, startup=2).close()
    found = read_goodput(tmp_path)
    assert found.total == pytest.approx(clock.now - BEGAN)


def test_a_killed_process_leaves_its_times(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        timeline = Timeline()
        timeline.open(tmp_path, lambda: None, step=0, resumed_from=None, world_size=1)
        with timeline.phase(SAVES):
            time.sleep(0.1)
        timeline.enter(VALIDATION)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    following = Timeline()
    following.open(tmp_path, lambda: None, step=0, resumed_from=None, world_size=1)
    following.close()
    first, second = read_goodput(tmp_path).starts
    assert (first.outcome, second.outcome) == ("killed", "failed")
    assert 0.1 <= first.seconds["saves"] < 60
    lines = (tmp_path / TIMELINE_LOG).read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["start", "end", "start", "end"]


def test_the_command_and_the_report_show_it(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt.main(["goodput", str(tmp_path)]) == EXIT_UNUSABLE
    assert "no record of its time" in capsys.readouterr().err
    run = Run(tmp_path, clock)
    start = run.start(0)
    run.steps(start, 4)
    start.outcome = "done"
    start.close()
    assert ckpt.main(["goodput", str(tmp_path)]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "40.0% of 20.0 s in 1 start was useful" in text
    for title in CATEGORIES.values():
        assert title in text
    assert ckpt.main(["goodput", "--json", str(tmp_path)]) == EXIT_DONE
    document = json.loads(capsys.readouterr().out)
    assert sum(document["seconds"].values()) == pytest.approx(document["total_seconds"])
    assert document["starts"][0]["seconds"].keys() == set(PHASES)
    html = page([read_history(tmp_path)])
    assert "steps 8 s (40.0%)" in html
    assert html.count('<i class="t-steps"') == 2


def test_damaged_lines_are_ignored(tmp_path: Path, clock: Clock) -> None:
    run = Run(tmp_path, clock)
    start = run.start(0)
    run.steps(start, 2)
    with (tmp_path / TIMELINE_LOG).open("a") as log:
        log.write('{"event": "start", "start": 7, "time": 1, "step": 0}\n{"event": "end", "start"')
        log.write('\n{"event": "end", "start": "x", "time": -1, "step": true, "seconds": {}}\n[]\n')
        log.write(f'{{"event": "start", "start": "x", "time": 1{"0" * 400}, "step": 0}}\n')
    run.kill(start)
    with (tmp_path / "training.jsonl").open("a") as log:
        log.write(f'{{"step": 3, "seconds": 1{"0" * 400}}}\n')
    (tmp_path / TIMELINE_STATE).write_bytes(b"{" * 5000)
    found = read_goodput(tmp_path)
    assert len(found.starts) == 1
