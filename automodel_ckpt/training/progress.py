"""What the leader shows while it trains: a live line on a terminal, a line now and then elsewhere, and the log."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

PACKAGE_LOGGER = "automodel_ckpt"
_CLEAR = "\r\x1b[K"
_LIVE_PAUSE_SECONDS = 0.1
_SMOOTHING = 0.9
_BAR_CELLS = 10
_TICK_SECONDS = 0.2
_COLUMNS = 80
_DROPPED_FIRST = ("epoch", "aux", "lr", "tok/s", "left")
"""What a narrow terminal does without, in this order."""


@dataclass(frozen=True, slots=True)
class StepView:
    """The figures of one step that the line shows."""

    step: int
    epoch: int
    loss: float
    lr: float
    num_tokens: int
    seconds: float
    aux_loss: float | None = None


@dataclass(frozen=True, slots=True)
class SavingView:
    """How far the save of *step* is: its *share* that is written, 0 to 1, and *amount*, the same in words."""

    step: int
    share: float
    amount: str

    def __str__(self) -> str:
        filled = round(_BAR_CELLS * min(max(self.share, 0.0), 1.0))
        return f"saving {self.step} [{'#' * filled}{'.' * (_BAR_CELLS - filled)}] {self.amount}"


class _Alone:
    """Lines come from several threads. A process forked while one of them writes must not wait for it for ever."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire(timeout=1)

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # it was not to be had
            self._lock.release()


class Progress:
    """One line: step of all, epoch, loss, rate, tokens per second, time left, step and age of the newest checkpoint.

    On a terminal it is rewritten in place, at most ten times a second; elsewhere a new one is printed every
    *every_seconds*. A narrow terminal gets fewer figures rather than a line that is cut. While a save is under way its
    bar stands in the line, between steps too (:meth:`follow`); elsewhere a longer one gets a line of its own
    every *every_seconds*. Only an *enabled* one (the leader's) prints at all. Log records go through
    :meth:`write_above`, so that they do not tear the live line.
    """

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        every_seconds: float = 10.0,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.every_seconds = every_seconds
        self.enabled = enabled
        self._saved: tuple[int, float] | None = None
        self._stream = stream or sys.stderr
        self._clock = clock
        self._live = self._stream.isatty()
        self._line = ""
        self._shown_at = -float("inf")
        self._num_seen = 0
        self._first_at = 0.0
        self._tokens_per_second = 0.0
        self._latest: StepView | None = None
        self._saving: SavingView | None = None
        self._saving_since = 0.0
        self._alone = _Alone()
        self._closed = threading.Event()
        self._ticker: threading.Thread | None = None

    def update(self, view: StepView) -> None:
        """Take in a finished step, and show it when the pause since the last line is over."""
        if not self.enabled:
            return
        with self._alone:
            self._average(view)
            self._latest = view
            now = self._clock()
            if now - self._shown_at >= (_LIVE_PAUSE_SECONDS if self._live else self.every_seconds):
                self._shown_at = now
                self._show(self._parts(view))

    def follow(self, source: Callable[[], SavingView | None]) -> None:
        """From now on show, in a thread, how far the save is that *source* tells of; None: there is none."""
        if not self.enabled or self._ticker is not None:
            return

        def tick() -> None:
            while not self._closed.wait(_TICK_SECONDS):
                self.show_saving(source())

        self._ticker = threading.Thread(target=tick, name="progress", daemon=True)
        self._ticker.start()

    def show_saving(self, saving: SavingView | None) -> None:
        """Take in how far a save is, and show it when that is due."""
        if self._closed.is_set():
            return
        with self._alone:
            before, self._saving, now = self._saving, saving, self._clock()
            if saving is None or before is None or before.step != saving.step:
                self._saving_since = now
            if self._live and saving != before:
                self._show(self._parts(self._latest) if self._latest else [str(saving or "")])
            elif (
                saving is not None
                and not self._live
                and now - self._saving_since >= self.every_seconds
            ):
                self._saving_since = now
                self._show([str(saving)])

    def note_saved(self, step: int, seconds_ago: float = 0.0) -> None:
        """The newest checkpoint is that of *step*, which was made *seconds_ago*."""
        self._saved = (step, self._clock() - max(seconds_ago, 0.0))

    def write_above(self, text: str) -> None:
        """Print *text* as lines of its own; a live line stays below it."""
        with self._alone:
            if self._line:
                self._stream.write(_CLEAR)
            self._stream.write(text + "\n" + self._line)
            self._stream.flush()

    def break_off(self) -> None:
        """Leave the line as it stands and show no more: what comes next is the last word. Waits for nothing."""
        self._closed.set()
        with self._alone:
            if self._line:
                self._stream.write("\n")
                self._stream.flush()
            self._line, self._latest = "", None

    def close(self) -> None:
        """Leave the last step's line standing."""
        self._closed.set()
        if self._ticker is not None:
            self._ticker.join()
            self._ticker, self._saving = None, None
        if self._latest is not None and self._live:
            self._show(self._parts(self._latest))
            self._stream.write("\n")
            self._stream.flush()
        self._line = ""
        self._latest = None

    def _average(self, view: StepView) -> None:
        speed = view.num_tokens / view.seconds if view.seconds > 0 else 0.0
        self._num_seen += 1
        if self._num_seen == 1:
            self._first_at = self._clock()
        if (
            self._num_seen <= 2
        ):  # the first step of a process is slow, and says nothing about the others
            self._tokens_per_second = speed
        self._tokens_per_second += (1 - _SMOOTHING) * (speed - self._tokens_per_second)

    def _show(self, parts: list[str]) -> None:
        if self._live:
            self._line = fitting(parts, _columns(self._stream) - 1)
            self._stream.write(_CLEAR + self._line)
        else:
            self._stream.write("  ".join(parts) + "\n")
        self._stream.flush()

    def _parts(self, view: StepView) -> list[str]:
        shown = (
            f"step {view.step}"
            if self.total_steps is None
            else f"step {view.step:>{self._width}}/{self.total_steps}"
        )
        parts = [
            shown,
            f"epoch {view.epoch}",
            f"loss {view.loss:.4f}",
            *([f"aux {view.aux_loss:.4f}"] if view.aux_loss is not None else []),
            f"lr {view.lr:.2e}",
            f"{self._tokens_per_second:,.0f} tok/s",
        ]
        if self._saving is not None:
            return [*parts, str(self._saving)]
        if self.total_steps is not None and view.step < self.total_steps and self._num_seen > 1:
            # By the clock, so that validations and saves count; from the end of the first step, which is slow.
            seconds = (self._clock() - self._first_at) / (self._num_seen - 1)
            parts.append(f"{duration((self.total_steps - view.step) * seconds)} left")
        if self._saved is not None:
            step, at = self._saved
            parts.append(f"saved {step}, {duration(self._clock() - at)} ago")
        return parts

    @property
    def _width(self) -> int:
        return len(str(self.total_steps))


class ProgressHandler(logging.Handler):
    """Sends the package's log records above the progress line."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        # Records tell of names that others chose: they must not steer the terminal.
        self.progress.write_above(
            "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
        )


def set_up_logging(progress: Progress, level: str, rank: int) -> ProgressHandler:
    """Show the package's records of *level* and above: all of the leader's, errors only of the other ranks.

    Returns the handler, to be given to :func:`tear_down_logging`; one of an earlier call is replaced.
    """
    logger = logging.getLogger(PACKAGE_LOGGER)
    for old in [handler for handler in logger.handlers if isinstance(handler, ProgressHandler)]:
        logger.removeHandler(old)
    handler = ProgressHandler(progress)
    logger.addHandler(handler)
    logger.setLevel(level.upper() if rank == 0 else logging.ERROR)
    return handler


def tear_down_logging(handler: ProgressHandler) -> None:
    """Leave the package's logger as it was found."""
    logger = logging.getLogger(PACKAGE_LOGGER)
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def fitting(parts: list[str], width: int) -> str:
    """*parts* in one line of at most *width* characters: those that matter least are left out, then the end is cut."""
    for word in _DROPPED_FIRST:
        if len("  ".join(parts)) > width:
            parts = [part for part in parts if word not in part.split()]
    return "  ".join(parts)[:width]


def _columns(stream: TextIO) -> int:
    """The width of the terminal that *stream* is, which need not be that of standard output; COLUMNS overrules it."""
    with suppress(ValueError):
        return (
            int(os.environ["COLUMNS"])
            if os.environ.get("COLUMNS")
            else _columns_of(stream.fileno())
        )
    return _COLUMNS


def _columns_of(descriptor: int) -> int:
    with suppress(OSError):
        return os.get_terminal_size(descriptor).columns or _COLUMNS
    return _COLUMNS


def duration(seconds: float) -> str:
    """Seconds in words of at most two units: ``8 s``, ``3 min 20 s``, ``5 h 04 min``, ``2 d 3 h``."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"
