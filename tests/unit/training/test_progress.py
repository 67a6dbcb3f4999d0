"""The progress line on a terminal and elsewhere, and log records beside it."""

from __future__ import annotations

import io
import logging
from typing import TextIO

import pytest

from automodel_ckpt.training.progress import Progress, StepView, duration, set_up_logging, tear_down_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def view(step: int) -> StepView:
    return StepView(step=step, epoch=0, loss=2.5, lr=1e-3, num_tokens=1000, seconds=0.5)


def progress(stream: TextIO, clock: Clock) -> Progress:
    return Progress(total_steps=60, every_seconds=10.0, stream=stream, clock=clock)


def test_elsewhere_than_on_a_terminal_a_line_is_printed_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    line = progress(stream, clock)
    for step in range(1, 31):
        line.update(view(step))
        clock.now += 1.0
    line.close()
    printed = stream.getvalue().splitlines()
    assert [text[:10] for text in printed] == ["step  1/60", "step 11/60", "step 21/60"]
    assert printed[0] == "step  1/60  epoch 0  loss 2.5000  lr 1.00e-03  2,000 tok/s"


def test_on_a_terminal_the_line_is_rewritten_and_log_records_stand_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream, clock = Terminal(), Clock()
    line = progress(stream, clock)
    line.note_saved(20)
    clock.now += 90
    line.update(view(20))
    line.write_above("Saving checkpoint to checkpoints/epoch_0_step_20")
    line.close()
    screen = stream.getvalue()
    assert screen.count("\n") == 2
    above, last, rest = screen.split("\n")
    assert above.endswith("\r\x1b[KSaving checkpoint to checkpoints/epoch_0_step_20")
    assert last.endswith("saved 20, 1 min 30 s ago")
    assert rest == ""


def test_ranks_that_do_not_lead_show_no_progress() -> None:
    stream = io.StringIO()
    Progress(enabled=False, stream=stream).update(view(1))
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("rank", "expected"), [(0, "hello\nwarning: careful\n"), (1, "")])
def test_only_the_leader_shows_what_is_no_error(rank: int, expected: str) -> None:
    stream = io.StringIO()
    handler = set_up_logging(Progress(stream=stream), "info", rank)
    log = logging.getLogger("automodel_ckpt.somewhere")
    log.debug("hidden")
    log.info("hello")
    log.warning("careful")
    tear_down_logging(handler)
    log.error("too late for this stream")
    assert stream.getvalue() == expected


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(8.4, "8 s"), (200, "3 min 20 s"), (18240, "5 h 04 min"), (2 * 86400 + 3 * 3600, "2 d 3 h")],
)
def test_durations_are_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
