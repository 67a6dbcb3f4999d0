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
from typing import IO, Any

import torch

from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.durable_io import replace_file
from automodel_ckpt.errors import SaveFailed, os_problem

log = logging.getLogger("automodel_ckpt")

_SHOWN_LINES, _SHOWN_BYTES = 5, 200
PAUSE_SECONDS = 0.1
"""Of steps that take less, several share a write and a look at the memory: each costs more with cold caches."""


class JsonlLog:
    """An append-only log of records that carry a ``step``.

    :meth:`append` hands lines to the operating system, so that a killed process loses none, or with ``soon`` those of
    the last tenth of a second at most; :meth:`flush` makes them survive a power cut, and is called before a checkpoint
    is published. A disk that is full for a while stops nothing: lines that could not be written wait for the next ones,
    and the next save needs them all. Threads may share it.

    *before_writing* is called before each change of the file; what it raises is raised, and nothing is written.
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
        """Write one line, or *soon*: with those of the next tenth of a second, or at the next :meth:`flush`.

        Numbers that JSON does not know (NaN, infinities) become null.
        """
        with self._lock:
            self._records.append(record)
            if soon and time.monotonic() < self._write_after:
                return
            waiting = bool(self._unwritten)
            try:
                self._write()
            except OSError as error:
                if not waiting:
                    log.warning(
                        "%s",
                        os_problem(error, f"{self.path} cannot be written now", hint="free space"),
                    )

    def flush(self) -> None:
        """Return when everything appended is on disk. Raises OSError where it cannot be."""
        with self._lock:
            self._write()
            if self._file is not None:
                os.fsync(self._file.fileno())

    def _write(self) -> None:
        self._unwritten += b"".join(_line_of(record) for record in self._records)
        self._records.clear()
        self._write_after = time.monotonic() + PAUSE_SECONDS
        if self._unwritten:
            self._before_writing()
        while self._unwritten:
            count = self._open().write(self._unwritten)
            self._unwritten = self._unwritten[count:]

    def truncate_after(self, step: float) -> int:
        """Drop the records of later steps and repair the rest, by an atomic rewrite; returns how many lines went.

        Of two records of one step the later one stays, a damaged line goes, and a record without a step stays. All
        three are logged, with their text; a torn last line, which is what a kill leaves, goes without a message.
        Raises :class:`SaveFailed` where the file cannot be rewritten.
        """
        with self._failing():
            return self._cut_back(step)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Raise :class:`SaveFailed` in place of an OSError."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.path)
            hint = "remove what is stored there or free space, then run the same command"
            raise SaveFailed.all_of(
                [os_problem(error, "a log of the run cannot be truncated", hint=hint)]
            ) from error

    def _cut_back(self, step: float) -> int:
        self.close()
        if not os.path.lexists(self.path):
            return 0
        content = _Content(_lines(self.path), step)
        if content.num_dropped:
            self._before_writing()
            replace_file(self.path, b"".join(content.kept))
        for message, lines in content.reports():
            log.warning("%s: %s:%s", self.path, message, _shown(lines))
        return content.num_dropped

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
            self._file = os.fdopen(
                open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0
            )
        return self._file


class _Content:
    """The *lines* of a log, sorted by what becomes of them in a run that goes on after *step*."""

    def __init__(self, lines: Iterable[tuple[bytes, dict[str, Any] | None]], step: float) -> None:
        self.kept: list[bytes] = []
        self.num_dropped = 0
        self._damaged: list[bytes] = []
        self._duplicates: list[bytes] = []
        self._without_step: list[bytes] = []
        places: dict[object, int] = {}
        for line, record in lines:
            if record is None or not _is_step(record.get("step", 0)):
                self.num_dropped += 1
                self._damaged += [line] if line.endswith(b"\n") else []
            elif record.get("step", 0) > step:
                self.num_dropped += 1
            else:
                self._keep(line, record, places)

    def _keep(self, line: bytes, record: dict[str, Any], places: dict[object, int]) -> None:
        """Keep a line, in the place of an earlier one about the same; *places* are those of the lines kept so far."""
        if "step" not in record:
            self._without_step.append(line)
        # A run may be resumed several times from one step: only equal events are the same event.
        same = (
            line
            if "event" in record or "step" not in record
            else (record["step"], frozenset(record))
        )
        if same in places:
            self.num_dropped += 1
            self._duplicates.append(self.kept[places[same]])
            self.kept[places[same]] = b""
        places[same] = len(self.kept)
        self.kept.append(line)

    def reports(self) -> Iterator[tuple[str, list[bytes]]]:
        """What a user has to know, each with the lines that it is about."""
        if self._damaged:
            yield "removed damaged lines (their steps now have no record)", self._damaged
        if self._duplicates:
            yield "removed lines for steps that a later line repeats", self._duplicates
        if self._without_step:
            yield "found lines from another run and kept them unchanged", self._without_step


def _is_step(value: object) -> bool:
    return type(value) is int and value >= 0


def _shown(lines: list[bytes]) -> str:
    """The first of some lines, shortened and printable, each on a line of its own."""
    texts = [line[:_SHOWN_BYTES].decode(errors="replace").rstrip() for line in lines[:_SHOWN_LINES]]
    texts += [f"... and {len(lines) - _SHOWN_LINES} more"] if len(lines) > _SHOWN_LINES else []
    return "".join(
        f"\n    {''.join(c if c.isprintable() else '?' for c in text)}" for text in texts
    )


def _line_of(record: dict[str, Any]) -> bytes:
    return json.dumps({key: _finite(value) for key, value in record.items()}).encode() + b"\n"


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line with its record, or None for one that is torn or no record."""
    with os.fdopen(open_regular(path), "rb") as file:
        lines = file.read().splitlines(keepends=True)
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        yield line, record if isinstance(record, dict) and line.endswith(b"\n") else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class PeakMemory:
    """This process's peak so far: allocated on a CUDA *device*, else resident in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nbytes = 0
        self._look_after = 0.0

    @property
    def nbytes(self) -> int:
        """In bytes, as it was at most a tenth of a second ago."""
        now = time.monotonic()
        if now >= self._look_after:
            self._nbytes, self._look_after = _peak_memory(self._device), now + PAUSE_SECONDS
        return self._nbytes


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
