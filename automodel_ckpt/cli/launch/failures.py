"""Failure records: why each rank ended, and which failure is reported to the user.

The launcher's ranks share a directory, in which each writes its process id when it starts, and a record when it fails.
A record is *primary* if the failure began in that rank, and *secondary* if it followed from another rank's failure (a
broken connection, or an error that the ranks agreed on). The earliest primary record is the root cause of the run.

    stop                         one byte for each signal that the launcher received
    attempt_0/rank_1.pid         each start of the ranks has a directory: attempt_0, attempt_1, ...
    attempt_0/rank_1.json        the failure record
    attempt_0/rank_1.done        the rank ended with its own exit code
    attempt_0/rank_1.vanished    a peer found that its process ended without either; contains the time
    attempt_0/joining_nodes      the ranks are stopped because nodes join
    attempt_0/store              host and port of the ranks' store
"""

from __future__ import annotations

import dis
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from automodel_ckpt.errors import (
    EXIT_INTERNAL,
    EXIT_SAVE_FAILED,
    EXIT_STOPPED,
    EXIT_UNUSABLE,
    EXIT_USAGE,
    Problem,
    describe,
    without_hidden,
)

FINAL_CODES = frozenset({EXIT_USAGE, EXIT_UNUSABLE, EXIT_SAVE_FAILED, EXIT_STOPPED})
"""Exit codes of failures that a restart cannot fix: the ranks return them, so that the agent does not restart."""
MAX_ERROR_CHARS = 200
SECOND_SIGNAL_CODE = 128
"""The exit code of a process that a second signal ends is this plus the signal's number, as in a shell."""

CONNECTION_ERROR = re.compile(
    r"gloo/|NCCL|Connection (closed|reset) by peer|Broken pipe|Socket Timeout|recvValue failed"
    r"|remote worker crashing|Socket (unexpectedly )?closed|Pair is not connected|caused pair closure"
)
BROKEN_CONNECTION = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|recvValue failed|remote worker crashing"
    r"|Socket (unexpectedly )?closed|Pair is not connected|caused pair closure|Failed to recv, got 0 bytes"
)
"""The process at the other end has ended. Other matches of CONNECTION_ERROR may also be faults of this rank."""
TIMED_OUT = re.compile(r"Timed out waiting \d+ms|Watchdog caught collective operation timeout")
NOT_CONNECTED = re.compile(r"connectFullMesh failed")
"""gloo could not connect the ranks, which happens occasionally on a busy machine."""
CONNECTION_ERROR_CLASSES = frozenset(
    {"DistError", "DistNetworkError", "DistStoreError", "DistBackendError"}
)
BACKEND_TEXT = re.compile(r"\[[^\]]*gloo/[\w/]+\.(cc|h):\d+\]|NCCL error|ncclRemoteError")
"""The location in the sources of gloo and NCCL that their messages contain."""
RAISE_STATEMENTS = frozenset({"RAISE_VARARGS", "RERAISE"})


@dataclass(frozen=True)
class FailureRecord:
    """Why a rank ended. *time* is in seconds since 1970, *code* the exit code, *message* the text for the user."""

    time: float
    rank: int
    code: int
    message: str
    primary: bool = True
    details: str = ""
    """The traceback of an internal error; empty for other errors."""
    names_rank: bool = False
    """Whether the message already contains the rank."""
    connected: bool = True
    """False if the ranks could not connect to each other, so that a new start loses nothing."""
    timed_out: bool = False
    """Whether the rank waited for other ranks as long as the timeout of collectives allows."""
    outside_collective: bool = False
    """Whether the rank was ended, or interrupted in a wait for data, because of others: it was in no collective."""
    node_unreachable: bool = False
    """Whether the rank's node does not respond, so that no rank can wait for its own record."""
    is_hang: bool = False
    """Whether a step hangs: no rank ends without being ended, and none has anything left to do."""
    was_training: bool = True
    """False if the rank was stopped before training, so that other ranks may wait for it to start."""
    follows_log: bool = False
    """Whether the run printed log lines before, which begin with the time."""

    @property
    def stopped_in_training(self) -> bool:
        """Whether the rank ended for a stop request during training. All ranks do so together, after a save."""
        return self.code == EXIT_STOPPED and self.was_training


def failure_record(error: BaseException, rank: int) -> FailureRecord:
    """Return the record of an exception that ended this rank, with the current time."""
    code, message = describe(error)
    origin = getattr(error, "rank", None)
    is_connection = is_connection_error(error)
    primary = origin == rank if origin is not None else not is_connection
    connected = not (is_connection and NOT_CONNECTED.search(str(error)))
    timed_out = is_connection and bool(TIMED_OUT.search(str(error)))
    is_broken = connected and not timed_out and BROKEN_CONNECTION.search(str(error))
    if code == EXIT_INTERNAL and not primary and is_broken:
        return lost_connection_record(error, rank, "to another rank", where=f"rank {rank}")
    is_explained = message.startswith("error: ") or code != EXIT_INTERNAL
    details = "" if is_explained else without_hidden("".join(traceback.format_exception(error)))
    return FailureRecord(
        time.time(),
        rank,
        code,
        message,
        primary=primary,
        details=details,
        names_rank=origin is not None,
        connected=connected,
        timed_out=timed_out,
    )


def lost_connection_record(
    error: BaseException, rank: int, destination: str, *, where: str
) -> FailureRecord:
    """Return the record of a rank or launcher whose connection broke. It has no traceback, which would not help."""
    problem = Problem(
        f"the connection {destination} broke",
        where,
        without_hidden(f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}"),
        "another rank, its node or the network failed: see the log of that rank; run the same command on all nodes to "
        "resume from the newest checkpoint",
    )
    return FailureRecord(
        time.time(), rank, EXIT_INTERNAL, f"error: {problem}", primary=False, names_rank=True
    )


def unreachable_node_record(rank: int, seconds: float) -> FailureRecord:
    """Return the record of a rank whose node has sent nothing for so many *seconds*. Another node writes it."""
    problem = Problem(
        f"the node of rank {rank} does not respond",
        "network",
        f"no data was received from it for {seconds:.0f} seconds",
        "check that the node is running, and the network; run the same command on all nodes to resume from the newest "
        "checkpoint",
    )
    return FailureRecord(
        time.time(),
        rank,
        EXIT_INTERNAL,
        f"error: {problem}",
        names_rank=True,
        node_unreachable=True,
    )


def is_connection_error(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, was raised because the connection to another rank broke.

    The text alone is not sufficient: a database client or a web service also reports "Connection reset by peer".
    """
    while error is not None:
        for base in type(error).__mro__:
            is_of_torch = base.__module__.partition(".")[0] == "torch"
            if is_of_torch and base.__name__ in CONNECTION_ERROR_CLASSES:
                return True
        is_candidate = isinstance(error, RuntimeError) and CONNECTION_ERROR.search(str(error))
        if is_candidate and _is_raised_by_backend(error):
            return True
        error = error.__cause__
    return False


def _is_raised_by_backend(error: BaseException) -> bool:
    """Whether gloo, NCCL or torch.distributed raised a RuntimeError, judged by the end of its traceback.

    Backends raise in C++, so the innermost Python frame ends in a call and not in a ``raise`` statement. If that frame
    is neither torch's nor this package's, the text must also have the form of a backend's message.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__"))
    # co_code has the original instructions, also where Python 3.11 has specialized them.
    instruction = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]
    if instruction in RAISE_STATEMENTS:
        return f"{module}.".startswith("torch.distributed.")
    if module.partition(".")[0] in ("torch", "automodel_ckpt"):
        return True
    return bool(BACKEND_TEXT.search(str(error)))


def death_record(rank: int, exitcode: int, when: float) -> FailureRecord:
    """Return the record of a rank that could not write one: killed by a signal (a negative exit code), or ended."""
    if exitcode >= 0:
        message = (
            f"error: rank {rank} ended with exit code {exitcode} "
            f"before the run was done, without an error message"
        )
    else:
        number = -exitcode
        name = f"signal {number}"
        if number in set(signal.Signals):
            name = signal.Signals(number).name
        hint = " (out of memory?)" if number == signal.SIGKILL else ""
        message = f"error: rank {rank} was killed by {name}{hint}"
    return FailureRecord(when, rank, EXIT_INTERNAL, message, names_rank=True)


def second_signal_record(rank: int, number: int) -> FailureRecord:
    """Return the record of a rank that is ended by a second signal."""
    name = signal.Signals(number).name
    message = f"stopped immediately by a second {name}; the last complete checkpoint is unchanged"
    return FailureRecord(time.time(), rank, SECOND_SIGNAL_CODE + number, message, names_rank=True)


def early_stop_record(rank: int, number: int) -> FailureRecord:
    """Return the record of a rank that is stopped before training; *number* is 0 if another rank got the signal."""
    cause = signal.Signals(number).name if number else "a signal to another rank"
    message = f"stopped by {cause} before training began"
    return FailureRecord(
        time.time(), rank, EXIT_STOPPED, message, primary=bool(number), was_training=False
    )


def hang_record(report: str, rank: int) -> FailureRecord:
    """Return the record of a rank that ends because a step hangs; *report* names the rank that is late."""
    return FailureRecord(
        time.time(),
        rank,
        EXIT_INTERNAL,
        f"error: {report}",
        names_rank=True,
        follows_log=True,
        is_hang=True,
    )


def terminated_record(rank: int, message: str) -> FailureRecord:
    """Return the record of a rank that is ended because of others."""
    return FailureRecord(
        time.time(),
        rank,
        EXIT_INTERNAL,
        message,
        primary=False,
        names_rank=True,
        outside_collective=True,
    )


def root_cause(records: Iterable[FailureRecord]) -> FailureRecord | None:
    """Return the earliest primary record; without one, the earliest secondary record; None if there are no records."""
    return min(records, key=lambda record: (not record.primary, record.time), default=None)


def name_silent_ranks(
    cause: FailureRecord,
    records: Iterable[FailureRecord],
    started: Collection[int],
    *,
    is_all: bool,
) -> FailureRecord:
    """Replace the message of a rank whose wait for others timed out by the ranks that it waited for.

    These are the ranks in *started*, those of this node, that wrote no record in a collective. If there are none, it
    waited for another node, unless *is_all* (this is the only one). Other causes are returned unchanged.
    """
    waited = {record.rank for record in records if not record.outside_collective}
    silent = sorted(set(started) - waited)
    if not cause.timed_out or (is_all and not silent):
        return cause
    if silent:
        plural = "s" if len(silent) > 1 else ""
        who = f"rank{plural} {', '.join(map(str, silent))}"
    else:
        who = "another node"
    problem = Problem(
        f"{who} did not respond in time",
        "distributed.timeout_minutes",
        f"rank {cause.rank} waited as long as this timeout",
        "check for a stopped process, a disk or network that does not respond, or code that waits; run the same "
        "command to resume from the newest checkpoint",
    )
    return replace(cause, message=f"error: {problem}", details="", names_rank=True)


def failure_text(record: FailureRecord, *, several_ranks: bool) -> str:
    """Format a record for the user: the traceback of an internal error, the message, and the rank if it matters."""
    text = record.details + record.message
    if several_ranks and not record.names_rank and record.code != EXIT_STOPPED:
        text += f"\n  rank:   {record.rank}"
    return text


def printed_failure(record: FailureRecord, *, several_ranks: bool) -> str:
    """Format a record for standard error: as :func:`failure_text`, after log lines with the time of the failure."""
    if not record.follows_log:
        return failure_text(record, several_ranks=several_ranks)
    # As in log lines: a terminal shows no dates.
    form = "%H:%M:%S " if sys.stderr.isatty() else "%Y-%m-%d %H:%M:%S "
    # The time of a rank that was killed may be unknown.
    stamp = time.strftime(form, time.localtime(record.time or time.time()))
    timed = replace(record, message=stamp + record.message)
    return failure_text(timed, several_ranks=several_ranks)


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
        paths = self.directory.glob("attempt_*")
        return max((int(path.name.removeprefix("attempt_")) for path in paths), default=-1)

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


def has_ended(process: int) -> bool:
    """Whether a process has ended, also if its parent has not read its exit status yet."""
    return _state_of(process) in ("", "Z")


def is_suspended(process: int) -> bool:
    """Whether a process exists and is stopped, by SIGSTOP or a debugger."""
    return _state_of(process) in ("T", "t")


def _state_of(process: int) -> str:
    """Return the letter of the process state (source: proc(5)); empty if the process does not exist."""
    try:
        # The name of the command comes first, and may contain spaces and parentheses.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
