"""The directory in which the ranks of a node report to their launcher how they end.

attempt_0/rank_1.json    the failure record of a rank; each start of the ranks has a directory
attempt_0/rank_1.done    the rank is about to end because its work is done, or stopped after a save
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from pathlib import Path

from automodel_ckpt.cli.launch.failures import FailureRecord


class FailureDirectory:
    """The directory that a launcher and its ranks share; the docstring of this module lists its files.

    *attempt* is the number of the current start of the ranks, which inherit it; -1 before the first.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.attempt = -1

    def begin_attempt(self) -> None:
        """Begin another start of the ranks, without records."""
        self.attempt += 1
        self._current.mkdir()

    def write(self, record: FailureRecord) -> None:
        """Write a record, unless its rank already has one: a later one describes what followed from the first one."""
        path = self._current / f"rank_{record.rank}.json"
        if path.exists():
            return
        # The launcher must not read half of it, and two threads of a rank can write at the same time.
        staged = self._current / f".{path.name}.{os.getpid()}.{threading.get_native_id()}"
        staged.write_text(json.dumps(asdict(record)))
        staged.rename(path)

    def records(self) -> list[FailureRecord]:
        """Return the records of the current attempt, in no particular order."""
        paths = self._current.glob("rank_*.json")
        return [FailureRecord(**json.loads(path.read_text())) for path in paths]

    def mark_done(self, rank: int) -> None:
        """Record that a rank is about to end with its own exit code."""
        (self._current / f"rank_{rank}.done").touch()

    def is_done(self, rank: int) -> bool:
        """Whether a rank has ended, or is about to end, with its own exit code."""
        return (self._current / f"rank_{rank}.done").exists()

    @property
    def _current(self) -> Path:
        return self._directory / f"attempt_{self.attempt}"
