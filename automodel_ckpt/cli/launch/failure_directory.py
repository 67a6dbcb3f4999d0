"""The directory in which the launcher and the ranks of a node report how each rank ends.

Each rank writes its process id when it starts, and a record when it fails.

    stop                         one byte for each signal that the launcher received
    attempt_0/rank_1.pid         each start of the ranks has a directory: attempt_0, attempt_1, ...
    attempt_0/forked             the ranks of all nodes have been forked
    attempt_0/rank_1.json        the failure record
    attempt_0/rank_1.training    the rank has begun to train
    attempt_0/rank_1.done        the rank ended with its own exit code
    attempt_0/rank_1.vanished    a peer found that its process ended without either; contains the time
    attempt_0/joining_nodes      the ranks are stopped because nodes join
    attempt_0/store              host and port of the ranks' store
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path

from automodel_ckpt.cli.launch.failures import FailureRecord, death_record, root_cause
from automodel_ckpt.cli.launch.process_state import has_ended
from automodel_ckpt.errors import EXIT_STOPPED


class FailureDirectory:
    """The directory that the launcher and its ranks share; the docstring of this module lists its files.

    *attempt* is the number of the current start of the ranks, which inherit it; -1 before the first. It is not torch's
    count of restarts, which does not change when nodes join. *is_elastic* states whether nodes may join.
    """

    def __init__(self, directory: str | Path, *, is_elastic: bool = False) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(exist_ok=True)
        self.attempt = -1
        self.is_elastic = is_elastic

    def register_process(self, attempt: int, rank: int) -> None:
        """Write this process's id, with which the launcher sends signals and other ranks detect its end."""
        self._write(attempt, f"rank_{rank}.pid", str(os.getpid()))

    def processes(self, attempt: int) -> dict[int, int]:
        """Map the ranks that started on this node to their process ids."""
        processes = {}
        for rank, path in self._files(attempt, "pid").items():
            processes[rank] = int(path.read_text())
        return processes

    def write(self, attempt: int, record: FailureRecord) -> None:
        """Write a record, unless its rank already has one: the first one is kept."""
        name = f"rank_{record.rank}.json"
        # A later record of a rank describes what followed from the first one.
        if not (self._directory_of(attempt) / name).exists():
            self._write(attempt, name, json.dumps(asdict(record)))

    def records(self, attempt: int) -> list[FailureRecord]:
        """Return all records of one attempt, in no particular order."""
        records = []
        for path in self._files(attempt, "json").values():
            records.append(FailureRecord(**json.loads(path.read_text())))
        return records

    def mark_forked(self) -> None:
        """Record that the ranks of all nodes have been forked in the current attempt."""
        self._write(self.attempt, "forked", "")

    def has_forked(self, attempt: int) -> bool:
        """Whether the ranks of all nodes have been forked."""
        return (self._directory_of(attempt) / "forked").exists()

    def mark_training(self, attempt: int, rank: int) -> None:
        """Record that the start of a rank is complete."""
        self._write(attempt, f"rank_{rank}.training", "")

    def starting(self, attempt: int) -> dict[int, int]:
        """Return, by rank, the process ids of the ranks of this node that have neither begun to train nor ended."""
        beyond = set(self._files(attempt, "training"))
        beyond.update(self._files(attempt, "done"), self._files(attempt, "json"))
        processes = self.processes(attempt)
        return {rank: process for rank, process in processes.items() if rank not in beyond}

    def mark_done(self, attempt: int, rank: int) -> None:
        """Record that a rank is about to end with its own exit code."""
        self._write(attempt, f"rank_{rank}.done", "")

    def is_done(self, attempt: int, rank: int) -> bool:
        """Whether a rank has ended, or is about to end, with its own exit code."""
        return rank in self._files(attempt, "done")

    def mark_vanished(self, attempt: int) -> None:
        """Record which ranks of this node ended without a failure record, and when that was first seen.

        Such a rank was killed, or called ``os._exit``. The launcher reports it, since its peers only lose a connection.
        """
        explained = {record.rank for record in self.records(attempt)}
        explained.update(self._files(attempt, "done"))
        explained.update(self._files(attempt, "vanished"))
        for rank, process in self.processes(attempt).items():
            if rank not in explained and has_ended(process):
                self._write(attempt, f"rank_{rank}.vanished", str(time.time()))

    def vanished_ranks(self, attempt: int) -> list[FailureRecord]:
        """Return the records of the ranks that :meth:`mark_vanished` found."""
        records = []
        for rank, path in self._files(attempt, "vanished").items():
            records.append(death_record(rank, 0, float(path.read_text())))
        return records

    def cause_of_end(self, attempt: int) -> FailureRecord | None:
        """Return the failure that ended the ranks of *attempt*; None if it is unknown."""
        cause = root_cause(self.records(attempt))
        self.mark_vanished(attempt)
        deaths = self.vanished_ranks(attempt)
        # If a rank dies, the agent ends the others by SIGTERM. One that has not begun to train takes it for a stop.
        if cause is not None and cause.code == EXIT_STOPPED and deaths:
            return deaths[0]
        return cause

    def mark_joining_nodes(self) -> None:
        """Record that the ranks of the current attempt will be stopped and restarted because nodes join."""
        self._write(self.attempt, "joining_nodes", "")

    def has_joining_nodes(self, attempt: int) -> bool:
        """Whether the ranks of an attempt were stopped because nodes joined."""
        return (self._directory_of(attempt) / "joining_nodes").exists()

    def record_store(self, attempt: int, host: str, port: str) -> None:
        """Write the address of the store that the ranks of all nodes share."""
        self._write(attempt, "store", f"{host} {port}")

    def store(self, attempt: int) -> tuple[str, int] | None:
        """Return the host and port of the ranks' store; None if no rank of this node has started."""
        try:
            host, port = (self._directory_of(attempt) / "store").read_text().split()
        except FileNotFoundError:
            return None
        return host, int(port)

    def last_attempt(self) -> int:
        """Return the number of the last attempt in which a rank has started; -1 if there is none."""
        # Ranks that end before they register leave no file, but the launcher may have written one.
        paths = self.directory.glob("attempt_*/rank_*")
        numbers = (int(path.parent.name.removeprefix("attempt_")) for path in paths)
        return max(numbers, default=-1)

    def record_signal(self, number: int) -> None:
        """Record that the launcher received a signal. Called in its signal handler."""
        # Appended: another signal may interrupt this handler, and neither byte may be lost.
        with open(self.directory / "stop", "ab") as file:
            file.write(bytes([number]))

    def stop_signals(self) -> bytes:
        """Return the numbers of the signals that the launcher received, oldest first."""
        try:
            return (self.directory / "stop").read_bytes()
        except FileNotFoundError:
            return b""

    def _files(self, attempt: int, suffix: str) -> dict[int, Path]:
        """Map each rank to its file with a suffix, if it has one."""
        paths = self._directory_of(attempt).glob(f"rank_*.{suffix}")
        return {int(path.stem.removeprefix("rank_")): path for path in paths}

    def _directory_of(self, attempt: int) -> Path:
        return self.directory / f"attempt_{attempt}"

    def _write(self, attempt: int, name: str, text: str) -> None:
        """Write a file atomically: other processes poll the directory, and must not read half of it."""
        directory = self._directory_of(attempt)
        directory.mkdir(exist_ok=True)
        # Two threads of a rank can write one record at the same time. The globs of this class do not match the leading
        # dot.
        staged = directory / f".{name}.{os.getpid()}.{threading.get_native_id()}"
        staged.write_text(text)
        staged.rename(directory / name)
