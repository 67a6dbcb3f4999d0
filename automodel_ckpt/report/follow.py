"""Send a run's log lines to trackers: first all lines that they do not have yet, then new lines during training.

    python -m automodel_ckpt.report.follow RUN     # started by the trainer; reads a job from standard input

The trainer starts it as a separate process that only reads files, so that no tracker can slow down, block or crash
training. The steps that each tracker received are recorded in ``.trackers.json`` of the run. Steps that a resume
repeats are sent again to trackers that can drop values; other trackers keep their values, because repeated steps give
the same ones. For those trackers, a run that went back to an earlier checkpoint or started anew is a new run, and so is
a run whose library may have lost values when this process was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.files.safe_open import open_regular, read_safely
from automodel_ckpt.report.trackers import TRACKERS, Tracker

log = logging.getLogger("automodel_ckpt.trackers")

MEMORY = ".trackers.json"
OUTPUT = ".trackers.log"
_MEMORY_BYTES = 1 << 20
POLL_SECONDS = 1.0
LAST_SECONDS = 60
_TRAIN: tuple[str, ...] = ("loss", "grad_norm", "lr", "tps", "tokens", "label_tokens", "mem")
_SAVE: tuple[str, ...] = ("stall_seconds", "total_seconds", "bytes", "free_bytes")

Options = Mapping[str, Mapping[str, Any]]


@contextlib.contextmanager
def holding(run: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of the process that sends this run's log.

    Yields True if the lock is held. With *wait*, waits for it; without, yields False if another process holds it.
    """
    with _appending(run / OUTPUT) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


class Follower:
    """Sends the lines of the logs of *run* that *trackers* (options by name) do not have yet.

    *after* is the step that a starting run continues from, None if no run starts; *went_back* means that the run
    ignores later checkpoints. A tracker that raises is reported once with *complain*, and disabled.
    """

    def __init__(
        self,
        run: Path,
        trackers: Options,
        after: int | None,
        complain: Callable[[str], None] = log.warning,
        *,
        went_back: bool = False,
    ) -> None:
        self.run = run
        self._complain = complain
        self._memory = _read_memory(run)
        self._trackers: dict[str, Tracker] = {}
        self._sent: dict[str, dict[str, int]] = {}
        self._lines = [_Lines(run / layout.TRAINING_LOG), _Lines(run / layout.VALIDATION_LOG)]
        self._waiting = [record for lines in self._lines for record in lines.new()]
        for name, options in trackers.items():
            self._guarded(name, partial(self._start, name, options, after, went_back))
        self._remember()

    def feed(self) -> None:
        """Send the complete lines that were added since the last call, in the order of their steps."""
        records = self._waiting + [record for lines in self._lines for record in lines.new()]
        self._waiting = []
        for record in sorted(records, key=lambda record: record["step"]):
            if values := values_of(record):
                for name in [*self._trackers]:
                    self._log(name, record["step"], values)
        if records:
            for name in [*self._trackers]:
                self._guarded(name, self._trackers[name].flush)
            self._remember()

    def close(self) -> None:
        """Send the last lines, and close the trackers, which send their buffered values."""
        self.feed()
        for name in [*self._trackers]:
            self._guarded(name, self._trackers[name].close)
            if name in self._trackers:
                del self._memory[name]["open"]
        self._remember()

    def _start(
        self, name: str, options: Mapping[str, Any], after: int | None, went_back: bool
    ) -> None:
        kind, memory = TRACKERS[name], self._memory.setdefault(name, {"sent": {}})
        had, is_torn = bool(memory["sent"]), memory.pop("open", False)
        is_behind = after is not None and any(step > after for step in memory["sent"].values())
        others = is_behind and (went_back or after == 0) and not kind.forgets
        if others or (had and is_torn and not kind.is_durable):
            memory = self._memory[name] = {"sent": {}, "attempt": memory.get("attempt", 1) + 1}
        had, sent = bool(memory["sent"]), memory["sent"]
        memory["open"] = True
        tracker = kind(self.run, memory, **options)
        if kind.forgets and had:
            first = min(
                [*_steps_to_send(self._waiting, sent), *([] if after is None else [after + 1])],
                default=None,
            )
            if first is not None:
                sent |= {group: min(step, first - 1) for group, step in sent.items()}
                self._remember()  # first: a kill after the forgetting would leave a gap
                tracker.forget(first)
        self._trackers[name], self._sent[name] = tracker, sent

    def _log(self, name: str, step: int, values: Mapping[str, float]) -> None:
        group, sent = _group(values), self._sent[name]
        if step > sent.get(group, 0):
            self._guarded(name, lambda: self._trackers[name].log(step, values))
            if name in self._trackers:
                sent[group] = step

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:
            self._trackers.pop(name, None)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._complain(f"tracker {name} is disabled, training continues: {reason}")

    def _remember(self) -> None:
        staged = self.run / (MEMORY + ".tmp")
        with os.fdopen(open_regular(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump(self._memory, file)
        staged.replace(self.run / MEMORY)


def _appending(path: Path) -> IO[bytes]:
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def _steps_to_send(records: Sequence[Mapping[str, Any]], sent: Mapping[str, int]) -> Iterator[int]:
    for record in records:
        if (values := values_of(record)) and record["step"] > sent.get(_group(values), 0):
            yield record["step"]


def _group(values: Mapping[str, float]) -> str:
    """The group of *values*: ``train``, ``val`` or ``save``. A step's values are logged in separate lines per group."""
    return next(iter(values)).partition("/")[0]


class _Lines:
    """Reads the records that are appended to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                file.seek(self._read)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        self._read += len(complete) + len(newline)
        for line in complete.splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def values_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The values of a log line, by the names that trackers display."""
    if "val_loss" in record:
        return _numbers({"val/loss": record["val_loss"]})
    event = record.get("event")
    event = event if event is None or isinstance(event, str) else ""
    prefix = "save" if event else "train"
    fields = {None: _TRAIN, "save": _SAVE}.get(event, ())
    return _numbers({f"{prefix}/{field}": record.get(field) for field in fields})


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)
    }


def _read_memory(run: Path) -> dict[str, dict[str, Any]]:
    try:
        memory = json.loads(read_safely(run, MEMORY, limit=_MEMORY_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    good = isinstance(memory, dict) and all(_is_memory(entry) for entry in memory.values())
    return memory if good else {}


def _is_memory(entry: Any) -> bool:
    sent = entry.get("sent") if isinstance(entry, dict) else None
    return isinstance(sent, dict) and all(isinstance(step, int) for step in sent.values())


def main(run: Path) -> None:
    """Follow *run* until standard input closes, which happens when the trainer ends in any way."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(
            number, signal.SIG_IGN
        )  # a terminal sends them to all processes, but only the trainer's end counts
    complain = _redirected(run)
    job = json.loads(sys.stdin.readline())
    with holding(run, wait=True):  # the process of a previous start may still be sending
        follower = Follower(
            run, job["trackers"], job["after"], complain, went_back=job["went_back"]
        )
        while not _ended(sys.stdin.fileno()):
            follower.feed()
        signal.alarm(LAST_SECONDS)
        follower.close()


def _ended(descriptor: int) -> bool:
    readable, _, _ = select.select([descriptor], [], [], POLL_SECONDS)
    return bool(readable) and not os.read(descriptor, 1)


def _redirected(run: Path) -> Callable[[str], None]:
    """Redirect the output of libraries to a file, and return a function that still reports to the user."""
    user = os.fdopen(os.dup(2), "w")
    with _appending(run / OUTPUT) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)

    def complain(message: str) -> None:
        sys.stderr.write(f"{time.strftime('%F %T')} {message}\n")
        user.write(f"warning: {message} ({run / OUTPUT} has its output)\n")
        user.flush()

    return complain


if __name__ == "__main__":
    main(Path(sys.argv[1]))
