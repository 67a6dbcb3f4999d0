"""What a run prints: a live line on a terminal, a line at intervals elsewhere, log records, and ``log.txt``."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TextIO

from automodel_ckpt.base.terminal import columns, for_terminal, takes_escapes
from automodel_ckpt.base.units import duration, size_text
from automodel_ckpt.checkpoint.files.safe_open import open_to_append
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.errors import LeaseLost, printable

# Messages that are kept before the file is opened: a run without checkpoints never opens it.
_MAX_WAITING = 1000


class TextLog:
    """An append-only text file with a timestamp before each message. Thread-safe, and raises nothing.

    Messages before :meth:`open` are written when the file is opened: the run directory belongs to this run only then.
    The file is never shortened, also not by a resume from an earlier step. A message that cannot be written, for
    example on a full disk, is dropped: this file must never fail a run.
    """

    def __init__(self) -> None:
        self._waiting: list[str] | None = []
        self._file: IO[bytes] | None = None
        self._before_writing: Callable[[], None] = lambda: None
        self._is_writing = False
        self._lock = threading.RLock()

    def open(self, path: Path, before_writing: Callable[[], None]) -> None:
        """Append to *path* from here on, first the messages so far.

        *before_writing* is called before each change of the file. It raises :class:`LeaseLost` if another run owns the
        directory; then nothing is written.
        """
        with self._lock:
            waiting = self._waiting or []
            self._waiting = None
            self._before_writing = before_writing
            with suppress(OSError):
                self._file = open_to_append(path)
            self._append("".join(waiting))

    def write(self, message: str) -> None:
        """Append a message of one or more lines, with the present date and time."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        text = "".join(f"{stamp} {line}\n" for line in message.split("\n"))
        with self._lock:
            if self._waiting is None:
                self._append(text)
            elif len(self._waiting) < _MAX_WAITING:
                self._waiting.append(text)

    def close(self) -> None:
        """Write nothing more."""
        with self._lock:
            self._waiting = None
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            self._file = None

    def _append(self, text: str) -> None:
        # before_writing() may log a message itself.
        if self._file is None or self._is_writing or not text:
            return
        self._is_writing = True
        try:
            with suppress(OSError, LeaseLost):
                self._before_writing()
                # A name that is not valid UTF-8 has surrogates.
                self._file.write(text.encode("utf-8", "backslashreplace"))
        finally:
            self._is_writing = False


Record = Values
PACKAGE_LOGGER = "automodel_ckpt"
_CLEAR = "\r\x1b[K"
_LIVE_PAUSE_SECONDS = 0.1
_SMOOTHING = 0.9
_TICK_SECONDS = 0.2
_LINES_PER_RUN = 25
# The first step of a process is slow: the time left is known after a few.
_FIRST_LINE = 3
_LONGEST_PAUSE_SECONDS = 600.0
# Between lines when the number of steps is not known.
_PAUSE_SECONDS = 60.0
# Between lines about a save or an upload when the output is not a terminal.
_SAVING_SECONDS = 10.0
_BREAK = re.compile(r"[\n\r](?! )")
# The figures that a narrow terminal omits, in this order.
_DROPPED_FIRST = ("epoch", "saved", "aux", "mem", "lr", "MFU", "tok/s", "left", "ends")


class _WriteLock:
    """A lock for lines of several threads, which gives up after a second.

    In a process that was forked while another thread wrote a line, the lock is never released.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire(timeout=1)

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # it was not acquired in time
            self._lock.release()


class Progress:
    """Lines about steps: step of all, epoch, loss, rate, tokens per second in total and per device, MFU, peak memory,
    time left.

    About 25 lines are printed in a run, and one in ten minutes at least; with *every_seconds* or *every_steps*, as
    often as that asks for. On a terminal, there is also a live line below them, which is rewritten in place, at most
    ten times a second. It has the step and age of the newest checkpoint. A narrow terminal gets fewer figures. During a
    save or an upload at the end, the live line contains its progress (:meth:`follow`). Elsewhere, a long one gets a
    separate line every ten seconds. Prints nothing unless *enabled* (on rank 0). Log records must be printed with
    :meth:`write_above`, so that they do not mix with the live line. With *has_timestamps*, each line but the live one
    begins with the time, elsewhere than on a terminal also with the date.
    """

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        every_seconds: float | None = None,
        every_steps: int | None = None,
        enabled: bool = True,
        num_ranks: int = 1,
        device_word: str = "rank",
        has_timestamps: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.every_seconds = every_seconds
        self.every_steps = every_steps
        self.enabled = enabled
        self._num_ranks = num_ranks
        self._device_word = device_word
        self._has_timestamps = has_timestamps
        self._saved: tuple[int, float] | None = None
        self._stream = stream or sys.stderr
        self._clock = clock
        self._live = takes_escapes(self._stream)
        self._line = ""
        self._shown_at = self._printed_at = -math.inf
        self._num_seen = 0
        self._first_at = 0.0
        # Sums over the latest steps, which decay from step to step. Their ratios are averages by time, not by step.
        self._tokens = self._mfu_seconds = self._seconds = 0.0
        self._latest: Record | None = None
        self._saving = ""
        self._saving_since = 0.0
        self._lock = _WriteLock()
        self._closed = threading.Event()
        self._ticker: threading.Thread | None = None

    def update(self, step: Record, seconds: float, *, is_followed: bool = False) -> None:
        """Note a finished *step*, its line of training.jsonl, and show it if that is due.

        *is_followed*: another message has its figures, so that no line is printed.
        """
        if not self.enabled:
            return
        with self._lock:
            now = self._clock()
            self._num_seen += 1
            if self._num_seen == 1:
                self._first_at = now
            # The first step of a process is slow, so the average starts with the second.
            decay = _SMOOTHING if self._num_seen > 2 else 0.0
            self._tokens = decay * self._tokens + step["tokens"]
            self._mfu_seconds = decay * self._mfu_seconds + step.get("mfu", 0.0) * seconds
            self._seconds = decay * self._seconds + seconds
            self._latest = step
            if is_followed or self._is_due(step["step"], now - self._printed_at):
                self._printed_at = now
                if not is_followed:
                    width = columns(self._stream) - len(self._timestamp()) - 1
                    parts = self.figures()
                    self.write_above(fitting(parts, width) if self._live else "  ".join(parts))
            if self._live and now - self._shown_at >= _LIVE_PAUSE_SECONDS:
                self._shown_at = now
                self._show(self._parts(step))

    def _is_due(self, step: int, seconds: float) -> bool:
        """Whether a line about *step* is printed, *seconds* after the last one."""
        every, total = self.every_steps, self.total_steps
        if every is None and (self.every_seconds is not None or total is None):
            pause = _PAUSE_SECONDS if self.every_seconds is None else self.every_seconds
            return step == total or seconds >= pause
        if every is None:
            assert total is not None
            every = math.ceil(total / _LINES_PER_RUN)
            if self._num_seen == _FIRST_LINE < every or math.inf > seconds > _LONGEST_PAUSE_SECONDS:
                return True
        return step % every == 0 or step == total

    def follow(self, source: Callable[[], str]) -> None:
        """Start a thread that shows the progress of saves and uploads. *source* returns it, empty without one."""
        if not self.enabled or self._ticker is not None:
            return

        def tick() -> None:
            while not self._closed.wait(_TICK_SECONDS):
                self.show_saving(source())

        self._ticker = threading.Thread(target=tick, name="progress", daemon=True)
        self._ticker.start()

    def show_saving(self, saving: str) -> None:
        """Record the progress of a save, and show it if it has changed or, without a terminal, at intervals."""
        if self._closed.is_set():
            return
        with self._lock:
            before, self._saving = self._saving, saving
            now = self._clock()
            if not saving or not before:
                self._saving_since = now
            if self._live and saving != before:
                self._show([saving] if self._latest is None else self._parts(self._latest))
            elif not self._live and saving and now - self._saving_since >= _SAVING_SECONDS:
                self._saving_since = now
                self.write_above(saving)

    def note_saved(self, step: int, seconds_ago: float = 0.0) -> None:
        """Record that the newest checkpoint is from *step*, saved *seconds_ago*."""
        self._saved = (step, self._clock() - max(seconds_ago, 0.0))

    def write_above(self, text: str) -> None:
        """Print *text* on separate lines; a live line stays below it. On a terminal, lines break between words."""
        text = for_terminal(self._timestamp() + text, self._stream)
        with self._lock:
            if self._line:
                self._stream.write(_CLEAR)
            self._stream.write(text + "\n" + self._line)
            self._stream.flush()

    def _timestamp(self) -> str:
        if not self._has_timestamps:
            return ""
        return time.strftime("%H:%M:%S " if self._live else "%Y-%m-%d %H:%M:%S ")

    def figures(self) -> list[str]:
        """The figures of a line about the newest step, with the time when the run ends. Empty before the first step."""
        if self._latest is None:
            return []
        seconds, parts = self._seconds_left(self._latest), self._step_parts(self._latest)
        if seconds is not None:
            # The date, too, when it is another one.
            end = time.localtime(time.time() + seconds)
            is_today = end.tm_yday == time.localtime().tm_yday
            parts.append(f"ends {time.strftime('%H:%M' if is_today else '%b %d %H:%M', end)}")
        return parts

    def break_off(self) -> None:
        """Keep the current line and print nothing after it, because an error report follows. Does not wait."""
        self._closed.set()
        with self._lock:
            if self._line:
                self._stream.write("\n")
                self._stream.flush()
            self._line, self._latest = "", None

    def close(self) -> None:
        """Remove the live line, and end the thread."""
        self._closed.set()
        if self._ticker is not None:
            # Not while holding the lock, which the thread takes to show a line.
            self._ticker.join()
            self._ticker, self._saving = None, ""
        if self._line:
            self._stream.write(_CLEAR)
            self._stream.flush()
            self._line = ""
        self.break_off()

    def _show(self, parts: list[str]) -> None:
        self._line = fitting(parts, columns(self._stream) - 1)
        self._stream.write(_CLEAR + self._line)
        self._stream.flush()

    def _parts(self, step: Record) -> list[str]:
        """The figures of the live line."""
        parts = self._step_parts(step)
        if self._saving:
            return [*parts, self._saving]
        seconds_left = self._seconds_left(step)
        if seconds_left is not None:
            parts.append(f"{duration(seconds_left)} left")
        if self._saved is not None:
            saved_step, saved_at = self._saved
            parts.append(f"saved {saved_step}, {duration(self._clock() - saved_at)} ago")
        return parts

    def _seconds_left(self, step: Record) -> float | None:
        """The time until the run ends. Returns None while that is unknown, and after the last step."""
        total = self.total_steps
        if total is None or step["step"] >= total or self._num_seen < 2:
            return None
        # Wall-clock time includes validations and saves. It starts after the first step, which is slow.
        seconds_per_step = (self._clock() - self._first_at) / (self._num_seen - 1)
        return float((total - step["step"]) * seconds_per_step)

    def _step_parts(self, step: Record) -> list[str]:
        number, of_all = step["step"], ""
        width = 0
        if self.total_steps is not None:
            width, of_all = len(str(self.total_steps)), f"/{self.total_steps}"
        parts = [f"step {number:>{width}}{of_all}", f"epoch {step['epoch']}"]
        parts.append(f"loss {step['loss']:.4f}")
        if "aux_loss" in step:
            parts.append(f"aux {step['aux_loss']:.4f}")
        if not math.isnan(step["lr"]):
            parts.append(f"lr {step['lr']:.2e}")
        tokens_per_second = self._tokens / self._seconds if self._seconds > 0 else 0.0
        of_all = f"{tokens_per_second:,.0f} tok/s"
        if self._num_ranks > 1:
            of_all += f" ({tokens_per_second / self._num_ranks:,.0f}/{self._device_word})"
        parts.append(of_all)
        if "mfu" in step and self._seconds > 0:
            parts.append(f"MFU {self._mfu_seconds / self._seconds:.1%}")
        if step.get("mem"):
            parts.append(f"mem {size_text(step['mem'])}")
        return parts


class ProgressHandler(logging.Handler):
    """Prints the package's log records of *level* and above over the progress line. A text log, if any, gets all."""

    def __init__(self, progress: Progress, level: int, text_log: TextLog | None = None) -> None:
        super().__init__()
        self.shown_level = level
        self.progress = progress
        self.text_log = text_log
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(_with_plain_arguments(record))
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        # Records contain names from files. Their control characters must not reach the terminal.
        lines = [[printable(part) for part in line.split("\t")] for line in text.split("\n")]
        text = "\n".join(map("\t".join, lines))
        if record.levelno >= self.shown_level:
            self.progress.write_above(text)
        if self.text_log is not None:
            self.text_log.write(text)


def _with_plain_arguments(record: logging.LogRecord) -> logging.LogRecord:
    """The record with escaped line breaks in its arguments that are paths and texts: names must not begin new lines.

    A break before a space begins a further line of a message, and an argument that is the whole message may have lines.
    """
    if record.msg == "%s" or not isinstance(record.args, tuple):
        return record
    arguments = []
    for argument in record.args:
        if isinstance(argument, os.PathLike):
            argument = printable(str(argument))
        elif isinstance(argument, str):
            argument = _BREAK.sub(lambda found: printable(found[0]), argument)
        arguments.append(argument)
    return logging.makeLogRecord({**record.__dict__, "args": tuple(arguments)})


def set_up_logging(
    progress: Progress, level: str, rank: int, text_log: TextLog | None = None
) -> ProgressHandler:
    """Print the package's log records: *level* and above on rank 0, only errors on other ranks.

    A *text_log* gets all records of rank 0. Returns the handler for :func:`tear_down_logging`. It replaces the handler
    of an earlier call.
    """
    logger = logging.getLogger(PACKAGE_LOGGER)
    for old in list(logger.handlers):
        if isinstance(old, ProgressHandler):
            logger.removeHandler(old)
    shown_level = logging.getLevelNamesMapping()[level.upper()]
    handler = ProgressHandler(progress, shown_level, text_log)
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR if rank else shown_level if text_log is None else logging.DEBUG)
    return handler


def tear_down_logging(handler: ProgressHandler) -> None:
    """Remove *handler* and reset the level of the package's logger."""
    logger = logging.getLogger(PACKAGE_LOGGER)
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def fitting(parts: list[str], width: int) -> str:
    """Join *parts* to a line of at most *width* characters: omit the least important, then truncate the line."""
    for word in _DROPPED_FIRST:
        if len("  ".join(parts)) > width:
            parts = [part for part in parts if word not in part.split()]
    return "  ".join(parts)[:width]
