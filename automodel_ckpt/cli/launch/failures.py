"""Failure records: why each rank ended, and which failure is reported to the user.

A record is *primary* if the failure began in that rank, and *secondary* if it followed from another rank's failure (a
broken connection, or an error that the ranks agreed on). The earliest primary record is the root cause of the run.
"""

from __future__ import annotations

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
    r"Connection (closed|reset) by (remote )?peer|Broken pipe|recvValue failed|remote worker crashing"
    r"|Socket (unexpectedly )?closed|Pair is not connected|caused pair closure|Failed to recv, got 0 bytes"
)
"""The process at the other end has ended. Other matches of CONNECTION_ERROR may also be faults of this rank."""
TIMED_OUT = re.compile(r"Timed out waiting \d+ms|Watchdog caught collective operation timeout")
PEER_ADDRESS = re.compile(
    r"by peer \[(?:::ffff:)?(?P<gloo>[\w.:]+)\]|by remote peer (?P<nccl>[\w.:-]+)<"
)
"""The address of the other end in messages of gloo and NCCL."""
CONNECTION_ERROR_CLASSES = frozenset(
    {"DistError", "DistNetworkError", "DistStoreError", "DistBackendError"}
)
BACKEND_TEXT = re.compile(r"\[[^\]]*gloo/[\w/]+\.(cc|h):\d+\]|NCCL error|ncclRemoteError")
"""The location in the sources of gloo and NCCL that their messages contain."""


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
    timed_out: bool = False
    """Whether the rank waited for other ranks as long as the timeout of collectives allows."""
    outside_collective: bool = False
    """Whether the rank was interrupted in a wait for data because of others: it was in no collective."""
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
    timed_out = is_connection and bool(TIMED_OUT.search(str(error)))
    is_broken = not timed_out and BROKEN_CONNECTION.search(str(error))
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
        timed_out=timed_out,
    )


def lost_connection_record(
    error: BaseException, rank: int, destination: str, *, where: str
) -> FailureRecord:
    """Return the record of a rank or launcher that lost its connection. It has no traceback, which would not help.

    The message names the node at the other end if *error* does.
    """
    found = PEER_ADDRESS.search(str(error))
    node = f" on node {found['gloo'] or found['nccl']}" if found else ""
    problem = Problem(
        f"the connection {destination}{node} broke",
        where,
        without_hidden(f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}"),
        "another rank, its node or the network failed: see the log of that rank; run the same command on all nodes to "
        "resume from the newest checkpoint",
    )
    return FailureRecord(
        time.time(), rank, EXIT_INTERNAL, f"error: {problem}", primary=False, names_rank=True
    )


def ended_run_record(code: int, host: str) -> FailureRecord:
    """Return the record of a launcher that ends with *code*, because ranks of the node *host* failed."""
    problem = Problem(
        f"ranks of node {host} failed: see the output there", "another node", f"exit code {code}"
    )
    return FailureRecord(time.time(), -1, code, f"error: {problem}", names_rank=True)


def death_record(rank: int, exitcode: int, when: float) -> FailureRecord:
    """Return the record of a rank that could not write one: killed by a signal (a negative exit code), or ended."""
    if exitcode >= 0:
        message = (
            f"error: rank {rank} ended with exit code {exitcode} "
            f"before the run was done, without an error message"
        )
    else:
        number = -exitcode
        is_known = number in set(signal.Signals)
        name = signal.Signals(number).name if is_known else f"signal {number}"
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
    )


def root_cause(records: Iterable[FailureRecord]) -> FailureRecord | None:
    """Return the earliest primary record; without one, the earliest secondary record. Returns None without records."""
    return min(records, key=lambda record: (not record.primary, record.time), default=None)


def name_silent_ranks(
    cause: FailureRecord,
    records: Iterable[FailureRecord],
    started: Collection[int],
    *,
    is_all: bool,
) -> FailureRecord:
    """Replace the message of a rank that timed out while it waited for others by the ranks that it waited for.

    These are the ranks in *started* (the ranks of this node) that wrote no record in a collective. If there are none,
    it waited for another node, unless *is_all* (this is the only one). Other causes are returned unchanged.
    """
    waited = {record.rank for record in records if not record.outside_collective}
    silent = sorted(set(started) - waited)
    if not cause.timed_out or (is_all and not silent):
        return cause
    who = "another node"
    if silent:
        who = f"{'ranks' if len(silent) > 1 else 'rank'} {', '.join(map(str, silent))}"
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


# ---------------------------------------------------------------- broken connections


def is_connection_error(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, was raised because the connection to another rank broke.

    The text alone is not sufficient: a database client or a web service also reports "Connection reset by peer".
    """
    while error is not None:
        is_of_torch = any(
            base.__module__.partition(".")[0] == "torch"
            and base.__name__ in CONNECTION_ERROR_CLASSES
            for base in type(error).__mro__
        )
        is_candidate = isinstance(error, RuntimeError) and CONNECTION_ERROR.search(str(error))
        if is_of_torch or (is_candidate and _is_raised_by_backend(error)):
            return True
        error = error.__cause__
    return False


def _is_raised_by_backend(error: BaseException) -> bool:
    """Whether torch.distributed raised a RuntimeError, or its text has the form of a message of gloo or NCCL."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__"))
    return module.startswith("torch.distributed.") or bool(BACKEND_TEXT.search(str(error)))


class FailureDirectory:
    """The directory in which the ranks of a node report to their launcher how they end.

    attempt_0/rank_1.json: the failure record of a rank; each start of the ranks has a directory.
    attempt_0/rank_1.done: the rank is about to end because its work is done, or stopped after a save.

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
