"""The progress line on a terminal and elsewhere, and log records beside it."""

import io
import logging
import re
from pathlib import Path
from typing import Any, TextIO

import pytest

from automodel_ckpt.errors import LeaseLost, RecipeError
from automodel_ckpt.logs.progress import Progress, TextLog, set_up_logging, tear_down_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def line_of(step: int) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "loss": 2.5, "lr": 1e-3, "tokens": 1000}


def progress(stream: TextIO, clock: Clock) -> Progress:
    return Progress(total_steps=60, every_seconds=10.0, stream=stream, clock=clock)


def test_elsewhere_than_on_a_terminal_a_line_is_printed_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    line = progress(stream, clock)
    for step in range(1, 31):
        line.update(line_of(step), 0.5)
        clock.now += 1.0
    line.close()
    printed = stream.getvalue().splitlines()
    assert [text[:10] for text in printed] == ["step  1/60", "step 11/60", "step 21/60"]
    assert printed[0] == "step  1/60  epoch 0  loss 2.5000  lr 1.00e-03  2,000 tok/s"


def test_with_a_number_of_steps_a_line_is_printed_after_each_multiple_and_the_last_step() -> None:
    stream, clock = io.StringIO(), Clock()
    line = Progress(total_steps=10, every_seconds=0.0, every_steps=4, stream=stream, clock=clock)
    for step in range(1, 11):
        line.update(line_of(step), 0.5)
    line.close()
    printed = stream.getvalue().splitlines()
    assert [text[:10] for text in printed] == ["step  4/10", "step  8/10", "step 10/10"]


def test_on_a_terminal_the_line_is_rewritten_and_log_records_stand_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = Terminal(), Clock()
    line = progress(stream, clock)
    line.note_saved(20)
    clock.now += 90
    line.update(line_of(20), 0.5)
    line.write_above("Saving checkpoint to checkpoints/epoch_0_step_20")
    line.close()
    screen = stream.getvalue()
    printed, above, last = screen.split("\n")
    # On a separate screen, the line about the step stays, and the live line goes.
    assert printed == "step 20/60  epoch 0  loss 2.5000  lr 1.00e-03  2,000 tok/s"
    assert above.endswith("\r\x1b[KSaving checkpoint to checkpoints/epoch_0_step_20")
    live, rest = last.split("\r\x1b[K")
    assert live.endswith("saved 20, 1 min 30 s ago")
    assert rest == ""
    # A terminal that cannot rewrite a line.
    monkeypatch.setenv("TERM", "dumb")
    progress(dumb := Terminal(), clock).update(line_of(20), 0.5)
    assert dumb.getvalue() == f"{printed}\n"


def test_a_text_log_keeps_what_was_logged_before_and_after_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.txt"
    log = logging.getLogger("automodel_ckpt.somewhere")

    def lease() -> None:
        log.warning("logged while the lease is checked")
        if path.exists() and b"two" in path.read_bytes():
            raise LeaseLost("lost", where="run", value="", hint="")

    for _ in range(2):
        text_log = TextLog()
        handler = set_up_logging(Progress(stream=io.StringIO()), "info", 0, text_log)
        log.info("before")
        text_log.open(path, lease)
        log.info("two\nlines %s", "y" * 10_000)
        text_log.close()
        log.info("after")
        tear_down_logging(handler)
    lines = path.read_text().splitlines()
    assert [line[20:29] for line in lines] == ["before", "two", "lines yyy"]


def test_line_breaks_in_names_begin_no_lines_and_messages_keep_theirs() -> None:
    stream = io.StringIO()
    handler = set_up_logging(Progress(stream=stream), "info", 0)
    log = logging.getLogger("automodel_ckpt")
    try:
        name = "a\nb\x1b[31m\u202ec"
        log.info("saved %s in %s", Path(name), name)
        log.info("%d names differ:%s", 2, "\n    one\n    two")
        log.info("first\n%s", name)
        log.warning(
            "%s", RecipeError("what", where=name, value="\n    several\n    lines", hint="x")
        )
    finally:
        tear_down_logging(handler)
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    shown = [re.sub(stamp, "", line) for line in stream.getvalue().splitlines()]
    escaped = r"a\nb\x1b[31m\u202ec"
    assert shown == [
        f"saved {escaped} in {escaped}",
        "2 names differ:",
        "    one",
        "    two",
        "first",
        escaped,
        "warning: what",
        f"  where:  {escaped}",
        "  value:  ",
        "    several",
        "    lines",
        "  hint:   x",
    ]
