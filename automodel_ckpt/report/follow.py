"""Send a run's log lines to trackers: all that they do not have yet, then, while training goes on, what is added.

    python -m automodel_ckpt.report.follow RUN     # started by the trainer; reads a job from standard input

The trainer starts it as a process of its own, so that no tracker can slow, hang or crash the training: it only reads
files. What each tracker has got is noted in ``.trackers.json`` of the run; a run that was resumed from an earlier step
sends the steps after that again.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.report.history import TRAINING, VALIDATION
from automodel_ckpt.report.trackers import TRACKERS, Tracker

log = logging.getLogger("automodel_ckpt.trackers")

MEMORY = ".trackers.json"
OUTPUT = ".trackers.log"
POLL_SECONDS = 1.0
LAST_SECONDS = 60
_TRAIN: tuple[str, ...] = ("loss", "grad_norm", "lr", "tps", "tokens", "label_tokens", "mem")
_SAVE: tuple[str, ...] = ("stall_seconds", "total_seconds", "bytes", "free_bytes")

Options = Mapping[str, Mapping[str, Any]]


class Follower:
    """Feeds *trackers* (options by name) with what stands in the logs of *run* and comes after step *after*.

    *after* is None where each tracker goes on from what it has got. A tracker that raises is told of once, by
    *complain*, and gets nothing more.
    """

    def __init__(
        self, run: Path, trackers: Options, after: int | None, complain: Callable[[str], None] = log.warning
    ) -> None:
        self.run = run
        self._complain = complain
        self._memory = _read_memory(run)
        self._trackers: dict[str, Tracker] = {}
        self._after: dict[str, int] = {}
        self._lines = [_Lines(run / TRAINING), _Lines(run / VALIDATION)]
        for name, options in trackers.items():
            self._start(name, options, after)

    def feed(self) -> None:
        """Hand on the complete lines that have come since the last time, in the order of their steps."""
        records = [record for lines in self._lines for record in lines.new()]
        for record in sorted(records, key=lambda record: record["step"]):
            if values := values_of(record):
                for name in [*self._trackers]:
                    self._log(name, record["step"], values)
        if records:
            self._remember()

    def close(self) -> None:
        """Feed once more, and let the trackers send what they hold back."""
        self.feed()
        for name in [*self._trackers]:
            self._guarded(name, self._trackers[name].close)
        self._remember()

    def _start(self, name: str, options: Mapping[str, Any], after: int | None) -> None:
        memory = self._memory.setdefault(name, {"step": 0})
        known = memory["step"] if after is None else min(after, memory["step"])
        self._after[name] = memory["step"] = known

        def begin() -> None:
            self._trackers[name] = TRACKERS[name](self.run, memory, known, **options)

        self._guarded(name, begin)

    def _log(self, name: str, step: int, values: Mapping[str, float]) -> None:
        if step > self._after[name]:
            self._guarded(name, lambda: self._trackers[name].log(step, values))
            if name in self._trackers:
                self._memory[name]["step"] = max(step, self._memory[name]["step"])

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:
            self._trackers.pop(name, None)
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            self._complain(f"tracker {name} gets nothing more, training goes on: {told}")

    def _remember(self) -> None:
        staged = self.run / (MEMORY + ".tmp")
        staged.write_text(json.dumps(self._memory))
        staged.replace(self.run / MEMORY)


class _Lines:
    """The records that are appended to a file, as they come."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        self._read += len(complete) + len(newline)
        for line in complete.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def values_of(record: Mapping[str, Any]) -> dict[str, float]:
    """What a line of the logs says, under the names that trackers show."""
    if "val_loss" in record:
        return _numbers({"val/loss": record["val_loss"]})
    event = record.get("event")
    prefix = "save" if event else "train"
    fields = {None: _TRAIN, "save": _SAVE}.get(event, ())
    return _numbers({f"{prefix}/{field}": record.get(field) for field in fields})


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _read_memory(run: Path) -> dict[str, dict[str, Any]]:
    try:
        memory = json.loads((run / MEMORY).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    good = isinstance(memory, dict) and all(isinstance(m, dict) and isinstance(m.get("step"), int)
                                            for m in memory.values())  # fmt: skip
    return memory if good else {}


def main(run: Path) -> None:
    """Follow *run* until standard input ends, which it does with the trainer, however that ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to all; the trainer's end is what counts
    complain = _redirected(run)
    job = json.loads(sys.stdin.readline())
    follower = Follower(run, job["trackers"], job["after"], complain)
    while not _ended(sys.stdin.fileno()):
        follower.feed()
    signal.alarm(LAST_SECONDS)
    follower.close()


def _ended(descriptor: int) -> bool:
    readable, _, _ = select.select([descriptor], [], [], POLL_SECONDS)
    return bool(readable) and not os.read(descriptor, 1)


def _redirected(run: Path) -> Callable[[str], None]:
    """Send what libraries print to a file; what is returned still speaks to the user."""
    user = os.fdopen(os.dup(2), "w")
    with open(run / OUTPUT, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)

    def complain(message: str) -> None:
        sys.stderr.write(f"{time.strftime('%F %T')} {message}\n")
        user.write(f"warning: {message} ({run / OUTPUT} has what it printed)\n")
        user.flush()

    return complain


if __name__ == "__main__":
    main(Path(sys.argv[1]))
