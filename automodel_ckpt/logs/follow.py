"""Send a run's log lines to trackers: first all lines that they do not have yet, then new lines during training.

The trainer starts it as a separate process that only reads files, so that no tracker can slow down, block or crash
training. It reads a job from standard input. The steps that each tracker received are recorded in ``.trackers.json`` of
the run. Steps that a resume repeats are not sent again, because they give the same values. A run that went back to an
earlier checkpoint or started anew is a new run for trackers. So is a run if the tracker's library may have lost values
when this process was killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from automodel_ckpt.base.durable_io import flock
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import open_regular, open_to_append
from automodel_ckpt.checkpoint.files.type_aliases import Metrics, Strings, ValueDict, Values
from automodel_ckpt.checkpoint.run.notes import read_note, write_note
from automodel_ckpt.logs.log_records import records_in
from automodel_ckpt.logs.trackers import TRACKERS, Tracker

MEMORY = ".trackers.json"
OUTPUT = ".trackers.log"
# Options that select where the values go. Another place gets the whole log.
_PLACES = ("log_dir", "entity", "project", "id", "tracking_uri", "experiment", "space_id")
POLL_SECONDS = 1.0
LAST_SECONDS = 60
"""How long the process may take to send the last values after the trainer has ended."""
# Fields of a step that are no value to display; its other numbers are, with the metrics of the objective.
_NOT_VALUES = frozenset({"step", "epoch", "timestamp", "samples", "event"})
# Name of the generated text in trackers, and of its group.
_TEXT = "completions"
_SAVE: Strings = ("stall_seconds", "total_seconds", "bytes", "free_bytes")

Options = Mapping[str, Values]


def disabled_text(name: str, reason: str) -> str:
    """The message about a tracker that fails during training."""
    return f"tracker {name} is disabled, training continues: {reason}"


@contextmanager
def upload_lock(run: Path, *, wait: bool) -> Iterator[bool]:
    """Lock the uploading of this run's log inside the context, and yield True.

    With *wait*, waits for another process that uploads it; without, yields False if there is one.
    """
    # The output file is also the lock: if it is replaced, two processes can hold a lock each.
    with open_to_append(run / OUTPUT) as file:
        try:
            # The kernel releases the lock when the process ends, even by SIGKILL.
            flock(file.fileno(), waits=wait)
        except BlockingIOError:
            yield False
        else:
            yield True


class Follower:
    """Sends the lines of the logs of *run* to *trackers* (options by name) that they do not have yet.

    *after* is the step that a starting run continues from (None: no run starts). *went_back* means that the run ignores
    later checkpoints. Only the training steps that *every_steps* divides are sent. A tracker that raises is disabled,
    and *warn* is called once with its name and the reason.
    """

    def __init__(
        self,
        run: Path,
        trackers: Options,
        after: int | None,
        warn: Callable[[str, str], None] = lambda name, reason: None,
        *,
        went_back: bool = False,
        every_steps: int = 1,
    ) -> None:
        self.run = run
        self._every_steps = every_steps
        self._warn = warn
        self._memory = _read_memory(run)
        self._trackers: dict[str, Tracker] = {}
        # The last step that each tracker has, for each group of values
        self._sent: dict[str, dict[str, int]] = {}
        self._logs = [
            _LogReader(run / layout.TRAINING_LOG),
            _LogReader(run / layout.VALIDATION_LOG),
        ]
        for name, options in trackers.items():
            self._try(name, partial(self._start, name, options, after, went_back))
        self._write_memory()

    def feed(self) -> None:
        """Send the complete lines that were added since the last call, in the order of their steps."""
        records = [record for reader in self._logs for record in reader.new_records()]
        # The sort is stable: the lines of one step keep their order.
        records.sort(key=lambda record: record["step"])
        for record in records:
            step = record["step"]
            if is_training_step(record) and step % self._every_steps:
                continue
            values, text = values_of(record), completions_text(record)
            for name, tracker in list(self._trackers.items()):
                if values:
                    self._send(name, step, _group(values), partial(tracker.log, step, values))
                if text:
                    self._send(name, step, _TEXT, partial(tracker.log_text, step, _TEXT, text))
        if records:
            for name in list(self._trackers):
                self._try(name, self._trackers[name].flush)
            self._write_memory()

    def close(self) -> None:
        """Send the last lines, and close the trackers, which send their buffered values."""
        self.feed()
        for name in list(self._trackers):
            self._try(name, self._trackers[name].close)
            if name in self._trackers:
                del self._memory[name]["open"]
        self._write_memory()

    def _start(self, name: str, options: Values, after: int | None, went_back: bool) -> None:
        """Connect to a tracker. Starts a new run of it if the values that it has do not belong to this run, or
        are in another place, such as another project."""
        memory = self._memory.setdefault(name, {"sent": {}})
        place = {option: options[option] for option in _PLACES if option in options}
        # A new entry has none.
        if memory.get("place", place) != place:
            memory = self._memory[name] = {"sent": {}}
        was_killed = memory.pop("open", False)
        sent = memory["sent"]
        has_later_steps = after is not None and any(step > after for step in sent.values())
        goes_back = has_later_steps and (went_back or after == 0)
        may_have_lost = bool(sent) and was_killed and not TRACKERS[name].is_durable
        if may_have_lost or goes_back:
            memory = {"sent": {}, "attempt": memory.get("attempt", 1) + 1}
            self._memory[name] = memory
        memory["place"] = place
        # If the next start finds it, this process was killed, perhaps with values not sent yet.
        memory["open"] = True
        # The constructor stores the id of the tracker's run in the memory.
        self._trackers[name] = TRACKERS[name](self.run, memory, **options)
        self._sent[name] = memory["sent"]

    def _send(self, name: str, step: int, group: str, action: Callable[[], None]) -> None:
        """Send the values of a step, unless the tracker has the group's values of this step or a later one."""
        sent = self._sent[name]
        if step > sent.get(group, 0):
            self._try(name, action)
            if name in self._trackers:
                # Only after success: a tracker that raised has been removed.
                sent[group] = step

    def _try(self, name: str, action: Callable[[], None]) -> None:
        """Call *action*; if it raises, disable the tracker and warn."""
        try:
            action()
        # SystemExit: a library must not end the uploads to the other trackers.
        except (Exception, SystemExit) as error:
            self._trackers.pop(name, None)
            self._warn(name, f"{type(error).__name__}: {error}".splitlines()[0])

    def _write_memory(self) -> None:
        write_note(self.run / MEMORY, self._memory)


def _group(values: Metrics) -> str:
    """Return the group of *values*: ``train``, ``val`` or ``save``. Each group of a step has its own log line."""
    return next(iter(values)).partition("/")[0]


class _LogReader:
    """Reads the records that are appended to a log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bytes_read = 0

    def new_records(self) -> Iterator[ValueDict]:
        """Yield the records of the complete lines that were added since the last call. Other lines are ignored."""
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                file.seek(self._num_bytes_read)
                # The last line may still be written.
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        self._num_bytes_read += len(complete) + len(newline)
        yield from records_in(complete.splitlines())


def completions_text(record: Values) -> str:
    """Return the completions in a log line as Markdown; empty if it has none."""
    completions = record.get("completions")
    if record.get("event") != "completions" or not isinstance(completions, list):
        return ""
    parts = [
        f"**{each.get('prompt')}**\n\n{each.get('text')}"
        for each in completions
        if isinstance(each, dict)
    ]
    return "\n\n---\n\n".join(parts)


def is_training_step(record: Values) -> bool:
    """Whether a log line is about a training step, and not about a validation or an event."""
    return "event" not in record and "val_loss" not in record


def values_of(record: Values) -> dict[str, float]:
    """Return the values of a log line, by the names that trackers display. Values that are not numbers are omitted."""
    fields = {}
    event = record.get("event")
    if "val_loss" in record or event == "evaluation":
        # val_loss, val_accuracy_NAME and so on.
        group = "eval_" if event == "evaluation" else "val_"
        fields = {field: field.replace("_", "/", 1) for field in record if field.startswith(group)}
    elif event is None:
        fields = {field: f"train/{field}" for field in record if field not in _NOT_VALUES}
    elif event == "save":
        fields = {field: f"save/{field}" for field in _SAVE}
    return {
        name: record[field]
        for field, name in fields.items()
        if type(record.get(field)) in (int, float)
    }


def _read_memory(run: Path) -> dict[str, ValueDict]:
    """Read what previous processes have sent to each tracker; empty if the file is missing or damaged."""
    memory = read_note(run, MEMORY)
    for entry in memory.values():
        sent = entry.get("sent") if isinstance(entry, dict) else None
        if not isinstance(sent, dict) or not all(isinstance(step, int) for step in sent.values()):
            return {}
    return memory


def main(arguments: list[str]) -> None:
    """Follow a run until standard input closes, which happens when the trainer ends in any way."""
    run = Path(arguments[0])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # A terminal sends them to all processes, but only the end of the trainer matters.
        signal.signal(number, signal.SIG_IGN)
    warn = _redirect_output(run)
    job = json.loads(sys.stdin.readline())
    with upload_lock(run, wait=True):  # the process of a previous start may still be sending
        follower = Follower(
            run,
            job["trackers"],
            job["after"],
            warn,
            went_back=job["went_back"],
            every_steps=job["every_steps"],
        )
        pipe = sys.stdin.fileno()
        # Until the other end of the pipe is closed.
        while not select.select([pipe], [], [], POLL_SECONDS)[0] or os.read(pipe, 1):
            follower.feed()
        # The default action of SIGALRM ends the process even if a library hangs.
        signal.alarm(LAST_SECONDS)
        follower.close()


def _redirect_output(run: Path) -> Callable[[str, str], None]:
    """Redirect the output of libraries to a file, and return a function that still reports a tracker to the user."""
    user = os.fdopen(os.dup(2), "w")
    with open_to_append(run / OUTPUT) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)

    def warn(name: str, reason: str) -> None:
        message = disabled_text(name, reason)
        sys.stderr.write(f"{time.strftime('%F %T')} {message}\n")
        user.write(f"warning: {message} ({run / OUTPUT} has its output)\n")
        user.flush()

    return warn
