"""Examine the ranks of this node during a hang, if none of them can: all are suspended, or hold the interpreter."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from automodel_ckpt.parallel.ranks import hangs
from automodel_ckpt.parallel.ranks.process_stacks import address_of, report_on


class HangExaminer:
    """The part of a launcher in :mod:`automodel_ckpt.parallel.ranks.hangs`, for runs on several nodes.

    Ranks of other nodes that find a hang write their states to a directory in *root*. If no rank of this node answers
    in time, the launcher writes what it finds out about its ranks.
    """

    def __init__(self, root: Path, poll_seconds: float) -> None:
        """*root* is the directory ``hangs`` of the run, and *poll_seconds* how often ranks look into it."""
        self._root = root
        self._poll_seconds = poll_seconds
        self._next_poll = 0.0
        self._changed_at: dict[Path, int] | None = None
        """When directories of hangs were changed, in nanoseconds of their file system; None before the first poll."""
        self._noticed: dict[Path, float] = {}
        self._examined: Path | None = None

    def poll(self, processes: Callable[[], Mapping[int, int]]) -> None:
        """Look for a hang, now and then. *processes* returns the process ids of this node by rank. Raises nothing."""
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._next_poll = now + self._poll_seconds
        with contextlib.suppress(OSError):
            self._notice(now)
            for directory, since in list(self._noticed.items()):
                # Ranks that respond have answered by then, and the one that reports still waits.
                if now - since > 2 * self._poll_seconds + 1.0:
                    del self._noticed[directory]
                    self._examine(directory, processes())

    def _notice(self, now: float) -> None:
        changed_at = {path: path.stat().st_mtime_ns for path in self._root.glob("step_*")}
        known = changed_at if self._changed_at is None else self._changed_at
        for path, nanoseconds in changed_at.items():
            if known.get(path) != nanoseconds:
                self._noticed.setdefault(path, now)
        self._changed_at = changed_at

    def _examine(self, directory: Path, processes: Mapping[int, int]) -> None:
        start = hangs.newest_start(directory)
        states = hangs.read_states(directory, start)
        if not states or states.keys() & processes.keys():
            return
        self._examined = directory
        notes = hangs.read_notes(directory, start)
        for rank, process in processes.items():
            address = address_of(process)
            report = report_on(address) if address is not None else None
            if report is not None and rank not in notes:
                hangs.write_note(directory, rank, start, report)

    def take_report(self) -> str:
        """Return the report on the hang for which ranks of this node were examined, once; empty if there is none.

        No rank of this node can print it.
        """
        directory, self._examined = self._examined, None
        if directory is None:
            return ""
        text, _, outcome = hangs.read_text(directory / hangs.REPORT).strip().rpartition("\n")
        return text if hangs.newest_start(directory) in outcome else ""
