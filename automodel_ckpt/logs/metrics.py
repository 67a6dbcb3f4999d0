"""``training.jsonl`` and ``validation.jsonl``: one JSON object per line, each step once, across kills and resumes."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch

from automodel_ckpt.base.durable_io import naming, replace_file
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.safe_open import open_regular, open_to_append, parse_json
from automodel_ckpt.checkpoint.files.type_aliases import AnyPath, ValueDict
from automodel_ckpt.errors import SaveFailed, os_problem

log = logging.getLogger("automodel_ckpt")

PAUSE_SECONDS = 0.1
"""Shorter steps share a write and a measurement of memory: with cold caches, each costs as much as their other work."""


class JsonlLog:
    """An append-only log of records with a ``step``. Thread-safe.

    :meth:`append` passes lines to the operating system, so a killed process loses none, or with ``soon`` at most the
    lines of the last tenth of a second. :meth:`flush` makes them survive a power cut; it is called before a checkpoint
    is published. A full disk does not stop the run: lines that could not be written are written with the next ones, and
    the next save fails if they still cannot be written. An error names the file.

    *before_writing* is called before each change of the file. If it raises an error, nothing is written.
    """

    def __init__(self, path: AnyPath, *, before_writing: Callable[[], None] = lambda: None) -> None:
        self.path = Path(path)
        self._before_writing = before_writing
        self._file: IO[bytes] | None = None
        self._records: list[ValueDict] = []
        self._unwritten = b""
        self._write_after = 0.0
        self._lock = threading.RLock()

    def append(self, record: ValueDict, *, soon: bool = False) -> None:
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

    def truncate_after(self, step: float, *, max_rollbacks: float = math.inf) -> int | None:
        """Remove the records of later steps and repair the rest, by an atomic rewrite.

        Of the rollbacks, the first *max_rollbacks* are kept.
        Of two records of one step, the earlier one is removed, and so are damaged lines. Records without a step are
        unchanged. All three cases are logged, except for a torn last line, which a killed process leaves. Returns the
        last of the later steps that were removed. Raises :class:`SaveFailed` if the file cannot be rewritten.
        """
        try:
            return self._truncate_after(step, max_rollbacks)
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise SaveFailed.of_system(
                error,
                "a log of the run cannot be truncated",
                hint="remove what is stored there or free space, then run the same command",
            ) from error

    def _truncate_after(self, step: float, max_rollbacks: float) -> int | None:
        # The rewrite renames a new file into place: an open descriptor would still append to the
        # old one.
        self.close()
        if not os.path.lexists(self.path):
            return None
        # By what a line is about: a later line of the same step replaces an earlier one.
        kept: dict[object, bytes] = {}
        later: list[int] = []
        num_lines = num_damaged = num_duplicates = num_without_step = 0
        for line, record in _lines(self.path):
            num_lines += 1
            number = None if record is None else record.get("step", 0)
            # Not isinstance, which accepts true and false.
            if record is None or type(number) is not int or number < 0:
                num_damaged += line.endswith(b"\n")
            elif number > step:
                later.append(number)
            elif record.get("event") != "rollback" or (max_rollbacks := max_rollbacks - 1) >= 0:
                num_without_step += "step" not in record
                identity: object = line
                # A run may be resumed several times from one step: only equal events are the same event.
                if "step" in record and "event" not in record:
                    identity = (number, frozenset(record))
                num_duplicates += kept.pop(identity, None) is not None
                kept[identity] = line
        if len(kept) < num_lines:
            self._before_writing()
            replace_file(self.path, b"".join(kept.values()))
        for count, message in (
            (num_damaged, "damaged and removed (their steps now have no record)"),
            (num_duplicates, "removed, because a later line repeats their steps"),
            (num_without_step, "from another run, kept unchanged"),
        ):
            if count:
                log.warning("%s: %s: %s", self.path, counted(count, "line"), message)
        return max(later, default=None)

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
            self._file = open_to_append(self.path)
        return self._file


def _line_of(record: ValueDict) -> bytes:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(finite).encode() + b"\n"


def _lines(path: Path) -> Iterator[tuple[bytes, ValueDict | None]]:
    """Each line with its record. The record is None when the line is torn or not a JSON object."""
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
