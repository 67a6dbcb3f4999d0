"""``training.jsonl`` and ``validation.jsonl``: one JSON object per line, each step once, across kills and resumes."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from automodel_ckpt.base.durable_io import naming, replace_file
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.errors import SaveFailed, os_problem

log = logging.getLogger("automodel_ckpt")

PAUSE_SECONDS = 0.1
"""Shorter steps share a write and a measurement of memory: with cold caches, each costs as much as their other work."""


class JsonlLog:
    """An append-only log of records with a ``step``. Thread-safe.

    :meth:`append` passes lines to the operating system, so a killed process loses none, or with ``soon`` at most those
    of the last tenth of a second. :meth:`flush` makes them survive a power cut; it is called before a checkpoint is
    published. A full disk does not stop the run: lines that could not be written are written with the next ones, and
    the next save fails if they still cannot be written. An error names the file.

    *before_writing* is called before each change of the file. If it raises an error, nothing is written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, before_writing: Callable[[], None] = lambda: None
    ) -> None:
        self.path = Path(path)
        self._before_writing = before_writing
        self._file: IO[bytes] | None = None
        self._records: list[dict[str, Any]] = []
        self._unwritten = b""
        self._write_after = 0.0
        self._lock = threading.RLock()

    def append(self, record: dict[str, Any], *, soon: bool = False) -> None:
        """Write one line. With *soon*, it may be written up to a tenth of a second later, or by :meth:`flush`.

        Numbers that JSON cannot represent (NaN, infinities) become null.
        """
        with self._lock:
            self._records.append(record)
            if soon and time.monotonic() < self._write_after:
                return
            has_failed_before = bool(self._unwritten)
            try:
                self._write()
            except OSError as error:
                if not has_failed_before:
                    what = "a log of the run cannot be written now"
                    hint = "free space, or check the disk: the lines are kept, and written later"
                    log.warning("%s", os_problem(error, what, hint=hint))

    def flush(self) -> None:
        """Write all appended records and wait until they are on disk. Raises OSError."""
        with self._lock:
            self._write()
            if self._file is not None:
                with naming(self.path):
                    os.fsync(self._file.fileno())

    def _write(self) -> None:
        for record in self._records:
            self._unwritten += _line_of(record)
        self._records.clear()
        self._write_after = time.monotonic() + PAUSE_SECONDS
        if self._unwritten:
            # May raise: another run may own the file since this process was suspended.
            self._before_writing()
        # An unbuffered write may write only a part, for example on a full disk.
        while self._unwritten:
            file = self._open()
            with naming(self.path):
                count = file.write(self._unwritten)
            # What is left of a line after an error is written first next time, and completes the
            # line.
            self._unwritten = self._unwritten[count:]

    def truncate_after(self, step: float, *, max_rollbacks: float = math.inf) -> Removed:
        """Remove the records of later steps and repair the rest, by an atomic rewrite.

        Of the rollbacks, the first *max_rollbacks* are kept.
        Of two records of one step, the earlier one is removed, and so are damaged lines. Records without a step are
        unchanged. All three cases are logged, except for a torn last line, which a killed process leaves. Returns what
        was removed. Raises :class:`SaveFailed` if the file cannot be rewritten.
        """
        with self._os_errors_as_save_failed():
            return self._truncate_after(step, max_rollbacks)

    @contextlib.contextmanager
    def _os_errors_as_save_failed(self) -> Iterator[None]:
        """Raise :class:`SaveFailed` in place of an OSError."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.path)
            hint = "remove what is stored there or free space, then run the same command"
            problem = os_problem(error, "a log of the run cannot be truncated", hint=hint)
            raise SaveFailed.all_of([problem]) from error

    def _truncate_after(self, step: float, max_rollbacks: float) -> Removed:
        # The rewrite renames a new file into place: an open descriptor would still append to the
        # old one.
        self.close()
        if not os.path.lexists(self.path):
            return Removed(0, None)
        content = _Content(_lines(self.path), step, max_rollbacks)
        if content.num_dropped:
            self._before_writing()
            replace_file(self.path, b"".join(content.kept))
        for count, message in content.reports():
            if count:
                log.warning("%s: %s: %s", self.path, counted(count, "line"), message)
        return Removed(content.num_dropped, content.last_later_step)

    def close(self) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self.flush()
            finally:
                self._file.close()
                self._file = None

    def _open(self) -> IO[bytes]:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._file = os.fdopen(descriptor, "ab", buffering=0)
        return self._file


class Removed(NamedTuple):
    """What a log lost when it was truncated: a number of lines, and the last of the later steps among them, if any."""

    num_lines: int
    last_step: int | None


class _Content:
    """The *lines* of a log, divided into those that a run which continues after *step* keeps and those it removes."""

    def __init__(
        self,
        lines: Iterable[tuple[bytes, dict[str, Any] | None]],
        step: float,
        max_rollbacks: float,
    ) -> None:
        self.kept: list[bytes] = []
        self.num_dropped = 0
        self.last_later_step: int | None = None
        self._num_damaged = self._num_duplicates = self._num_without_step = 0
        positions: dict[object, int] = {}
        for line, record in lines:
            if record is None or not _is_step(record.get("step", 0)):
                self.num_dropped += 1
                self._num_damaged += line.endswith(b"\n")
            elif record.get("step", 0) > step:
                self.num_dropped += 1
                self.last_later_step = max(record["step"], self.last_later_step or 0)
            elif record.get("event") == "rollback" and (max_rollbacks := max_rollbacks - 1) < 0:
                self.num_dropped += 1
            else:
                self._keep(line, record, positions)

    def _keep(self, line: bytes, record: dict[str, Any], positions: dict[object, int]) -> None:
        """Append a line to :attr:`kept`, and remove an earlier line for the same step.

        *positions* maps the identity of each line to its index in :attr:`kept`.
        """
        self._num_without_step += "step" not in record
        # A run may be resumed several times from one step: only equal events are the same event.
        identity: object = line
        if "step" in record and "event" not in record:
            identity = (record["step"], frozenset(record))
        earlier = positions.get(identity)
        if earlier is not None:
            self.num_dropped += 1
            self._num_duplicates += 1
            # Emptied instead of removed, so that the indices in *positions* stay valid.
            self.kept[earlier] = b""
        positions[identity] = len(self.kept)
        self.kept.append(line)

    def reports(self) -> Iterator[tuple[int, str]]:
        """Yield numbers of lines, and what happened to them."""
        yield self._num_damaged, "damaged and removed (their steps now have no record)"
        yield self._num_duplicates, "removed, because a later line repeats their steps"
        yield self._num_without_step, "from another run, kept unchanged"


def _is_step(value: object) -> bool:
    # Not isinstance, which accepts true and false.
    return type(value) is int and value >= 0


def _line_of(record: dict[str, Any]) -> bytes:
    finite = {key: _finite(value) for key, value in record.items()}
    return json.dumps(finite).encode() + b"\n"


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line with its record; the record is None if the line is torn or not a JSON object."""
    with os.fdopen(open_regular(path), "rb") as file:
        # Bytes: splitlines of text also splits at characters such as U+2028 inside a JSON string.
        lines = file.read().splitlines(keepends=True)
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        is_record = isinstance(record, dict) and line.endswith(b"\n")
        yield line, record if is_record else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class PeakMemory:
    """The peak memory of this process: allocated on a CUDA *device*, otherwise resident in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nbytes = 0
        self._measure_after = 0.0

    @property
    def nbytes(self) -> int:
        """The peak in bytes, measured at most PAUSE_SECONDS ago."""
        now = time.monotonic()
        if now >= self._measure_after:
            self._nbytes = _peak_memory(self._device)
            self._measure_after = now + PAUSE_SECONDS
        return self._nbytes


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss is in bytes on macOS and in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
