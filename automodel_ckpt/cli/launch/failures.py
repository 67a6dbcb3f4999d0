"""One failure record per rank, and which of them the user gets to read.

The launcher's ranks share a directory: each leaves its process id there when it starts, and a record when it fails.
A record is *primary* when the failure began in that rank, and an echo when another rank's failure reached it (a broken
connection, an error that the ranks agreed on). The earliest primary record is the run's verdict.

    stop                      one byte per signal that the launcher was sent
    attempt_0/rank_1.pid      of every restart of its own: attempt_0, attempt_1, ...
    attempt_0/rank_1.json
    attempt_0/rank_1.done   it ended with an exit code of its own
    attempt_0/rank_1.gone   a peer saw that its process had ended without either; the time
"""

from __future__ import annotations

import dis
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Collection, Iterable, Iterator
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
"""Codes that a restart cannot better: the ranks return them instead of dying."""
SHOWN_CHARS = 200
STOPPED_AT_ONCE = 128
"""A second signal ends a process with this and the signal's number."""

LOST_PEER = re.compile(
    r"gloo/|NCCL|Connection (closed|reset) by peer|Broken pipe|Socket Timeout|recvValue failed"
    r"|remote worker crashing|Socket (unexpectedly )?closed|Pair is not connected|caused pair closure"
)
BROKEN = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|recvValue failed|remote worker crashing"
    r"|Socket (unexpectedly )?closed|Pair is not connected|caused pair closure|Failed to recv, got 0 bytes"
)
"""The other end is gone; other words of LOST_PEER may also mean that this rank itself has a fault."""
TIMED_OUT = re.compile(r"Timed out waiting \d+ms|Watchdog caught collective operation timeout")
NOT_CONNECTED = re.compile(r"connectFullMesh failed")
"""gloo's word for ranks that could not form a group, which happens now and then on a busy machine."""
LOST_PEER_CLASSES = frozenset(
    {"DistError", "DistNetworkError", "DistStoreError", "DistBackendError"}
)
BACKEND_TEXT = re.compile(r"\[[^\]]*gloo/[\w/]+\.(cc|h):\d+\]|NCCL error|ncclRemoteError")
"""Where gloo and NCCL say in their own source an error was raised."""
RAISE_STATEMENTS = frozenset({"RAISE_VARARGS", "RERAISE"})


@dataclass(frozen=True)
class FailureRecord:
    """Why a rank ended: ``time`` in seconds since the epoch, the exit code, and the message for the user."""

    time: float
    rank: int
    code: int
    message: str
    primary: bool = True
    details: str = ""
    """The traceback of an internal error, else empty."""
    names_rank: bool = False
    """The message says already which rank it happened on."""
    connected: bool = True
    """False: the ranks could not connect to each other, so nothing has been done yet."""
    timed_out: bool = False
    """It waited for other ranks as long as a collective may."""
    absent: bool = False
    """It was in no collective when it was ended, or interrupted in a wait for data, because of others."""
    lost: bool = False
    """Its machine does not answer: nobody can wait for a word of it."""
    begun: bool = True
    """False: it was stopped before training, and other ranks may wait for it to come."""


def record_of(error: BaseException, rank: int) -> FailureRecord:
    """The record of an exception that ended this rank, now."""
    code, message = describe(error)
    origin = getattr(error, "rank", None)
    primary = not lost_peer(error) if origin is None else origin == rank
    told = message.startswith("error: ") or code != EXIT_INTERNAL
    details = "" if told else without_hidden("".join(traceback.format_exception(error)))
    lost = lost_peer(error)
    connected = not (lost and NOT_CONNECTED.search(str(error)))
    timed_out = lost and bool(TIMED_OUT.search(str(error)))
    if (
        code == EXIT_INTERNAL
        and not primary
        and connected
        and not timed_out
        and BROKEN.search(str(error))
    ):
        return lost_connection(error, rank, "to another rank", where=f"rank {rank}")
    return FailureRecord(
        time.time(), rank, code, message, primary, details, origin is not None, connected, timed_out
    )


def lost_connection(error: BaseException, rank: int, whither: str, *, where: str) -> FailureRecord:
    """The record of a rank or launcher that only knows that somebody else is gone. A traceback would tell no more."""
    problem = Problem(
        f"the connection {whither} broke",
        where,
        without_hidden(f"{type(error).__name__}: {str(error)[:SHOWN_CHARS]}"),
        "another rank, its machine or the network failed: its own log tells more; the same command, on all machines, "
        "resumes from the newest checkpoint",
    )
    return FailureRecord(
        time.time(), rank, EXIT_INTERNAL, f"error: {problem}", primary=False, names_rank=True
    )


def lost_node(rank: int, seconds: float) -> FailureRecord:
    """The record of a rank whose machine went silent, left by another one."""
    problem = Problem(
        f"the machine of rank {rank} does not answer",
        "network",
        f"nothing came from it for {seconds:.0f} seconds",
        "look whether it runs, and at the network between; the same command, on all machines, resumes from the newest "
        "checkpoint",
    )
    return FailureRecord(
        time.time(), rank, EXIT_INTERNAL, f"error: {problem}", names_rank=True, lost=True
    )


def lost_peer(error: BaseException | None) -> bool:
    """Whether an exception, or what caused it, was raised because the connection to another rank broke.

    The text alone decides nothing: a database client or a web service reports "Connection reset by peer" too.
    """
    while error is not None:
        classes = [base for base in type(error).__mro__ if base.__name__ in LOST_PEER_CLASSES]
        if any(base.__module__.partition(".")[0] == "torch" for base in classes):
            return True
        if (
            isinstance(error, RuntimeError)
            and LOST_PEER.search(str(error))
            and _is_raised_by_backend(error)
        ):
            return True
        error = error.__cause__
    return False


def _is_raised_by_backend(error: BaseException) -> bool:
    """Whether gloo, NCCL or torch.distributed raised a RuntimeError, by where its traceback ends.

    Backends raise in C++, so the innermost Python frame ends in a call and not in a ``raise`` statement. That frame
    is torch's or this package's; in another package's code the text must have the form of a backend's message too.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__"))
    if dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] in RAISE_STATEMENTS:
        return f"{module}.".startswith("torch.distributed.")
    if module.partition(".")[0] in ("torch", "automodel_ckpt"):
        return True
    return bool(BACKEND_TEXT.search(str(error)))


def death_of(rank: int, exitcode: int, when: float) -> FailureRecord:
    """The record that a rank could not write itself: killed by a signal (a negative exit code), or gone silently."""
    if exitcode < 0:
        name = (
            signal.Signals(-exitcode).name
            if -exitcode in set(signal.Signals)
            else f"signal {-exitcode}"
        )
        hint = " (out of memory?)" if exitcode == -signal.SIGKILL else ""
        message = f"error: rank {rank} was killed by {name}{hint}"
    else:
        message = (
            f"error: rank {rank} ended with exit code {exitcode} "
            f"before the run was done, without an error message"
        )
    return FailureRecord(when, rank, EXIT_INTERNAL, message, names_rank=True)


def stopped_at_once(rank: int, number: int) -> FailureRecord:
    """The record of a rank that a second signal ends."""
    name = signal.Signals(number).name
    message = f"stopped at once by a second {name}; the last complete checkpoint is as it was"
    return FailureRecord(time.time(), rank, STOPPED_AT_ONCE + number, message, names_rank=True)


def stopped_early(rank: int, number: int) -> FailureRecord:
    """The record of a rank that is stopped before training; *number* is 0 where another rank got the signal."""
    message = (
        f"stopped by {signal.Signals(number).name if number else 'a signal to another rank'} "
        f"before training began"
    )
    return FailureRecord(
        time.time(), rank, EXIT_STOPPED, message, primary=bool(number), begun=False
    )


def verdict(records: Iterable[FailureRecord]) -> FailureRecord | None:
    """The earliest primary record; without one the earliest echo; None when nothing failed."""
    return min(records, key=lambda record: (not record.primary, record.time), default=None)


def naming_the_silent(
    why: FailureRecord, records: Iterable[FailureRecord], started: Collection[int], *, is_all: bool
) -> FailureRecord:
    """A verdict of a rank that waited in vain, told as what it waited for: those *started* on this machine that left no
    word of their own; else another machine, unless *is_all*. Others stay as they are."""
    silent = sorted(set(started) - {record.rank for record in records if not record.absent})
    if not why.timed_out or (is_all and not silent):
        return why
    ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
    problem = Problem(
        f"{ranks if silent else 'another machine'} did not answer in time",
        "distributed.timeout_minutes",
        f"rank {why.rank} waited for as long as that",
        "look what held it up (a stopped process, a disk or a network that does not answer, code that waits); the same "
        "command resumes from the newest checkpoint",
    )
    return replace(why, message=f"error: {problem}", details="", names_rank=True)


def text_of(record: FailureRecord, *, several_ranks: bool) -> str:
    """What the user reads: an internal error's traceback, then the message, and the rank where it matters."""
    names = record.names_rank or record.code == EXIT_STOPPED
    rank = f"\n  rank:   {record.rank}" if several_ranks and not names else ""
    return f"{record.details}{record.message}{rank}"


class FailureDirectory:
    """The directory that the launcher and its ranks share (see the module's text)."""

    def __init__(self, directory: str | Path, *, is_elastic: bool = False) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(exist_ok=True)
        self.attempt = -1
        """The launcher counts the starts of its ranks, which inherit the number. torch's count of restarts is no
        such number: it stays when machines come."""
        self.is_elastic = is_elastic
        """Whether machines may come."""

    def sign_in(self, attempt: int, rank: int) -> None:
        """Leave this process's id, so that signals and the other ranks find it."""
        self._write(attempt, f"rank_{rank}.pid", str(os.getpid()))

    def write(self, attempt: int, record: FailureRecord) -> None:
        """Leave the record of its rank; the rank's first one stays."""
        if not (self._attempt(attempt) / f"rank_{record.rank}.json").exists():
            self._write(attempt, f"rank_{record.rank}.json", json.dumps(asdict(record)))

    def records(self, attempt: int) -> list[FailureRecord]:
        """All records of one attempt, in no order."""
        return [
            FailureRecord(**json.loads(file.read_text()))
            for file in self._attempt(attempt).glob("rank_*.json")
        ]

    def processes(self, attempt: int) -> dict[int, int]:
        """{rank: process id} of those that started on this machine."""
        files = self._attempt(attempt).glob("rank_*.pid")
        return {int(file.stem.removeprefix("rank_")): int(file.read_text()) for file in files}

    def note_done(self, attempt: int, rank: int) -> None:
        """Note that a rank is about to end with an exit code of its own."""
        self._write(attempt, f"rank_{rank}.done", "")

    def note_gone(self, attempt: int) -> None:
        """Note which ranks of this node ended without a failure record, and when that was first seen.

        Such a rank was killed, or called ``os._exit``: the launcher reports it, since its peers only lose a connection.
        """
        known = {record.rank for record in self.records(attempt)} | self._ranks_with(
            attempt, "done"
        )
        known |= self._ranks_with(attempt, "gone")
        for rank, process in self.processes(attempt).items():
            if rank not in known and is_gone(process):
                self._write(attempt, f"rank_{rank}.gone", str(time.time()))

    def gone(self, attempt: int) -> list[FailureRecord]:
        """The records of the ranks that :meth:`note_gone` found."""
        directory = self._attempt(attempt)
        when = {
            rank: float((directory / f"rank_{rank}.gone").read_text())
            for rank in self._ranks_with(attempt, "gone")
        }
        return [death_of(rank, 0, seconds) for rank, seconds in when.items()]

    def is_done(self, attempt: int, rank: int) -> bool:
        """Whether a rank has ended with an exit code of its own."""
        return rank in self._ranks_with(attempt, "done")

    def _ranks_with(self, attempt: int, suffix: str) -> set[int]:
        files = self._attempt(attempt).glob(f"rank_*.{suffix}")
        return {int(file.stem.removeprefix("rank_")) for file in files}

    def note_joining_nodes(self) -> None:
        """The ranks of the present attempt are going to be stopped because machines come, not for good."""
        self._write(self.attempt, "joining_nodes", "")

    def has_joining_nodes(self, attempt: int) -> bool:
        """Whether that was so of an attempt."""
        return (self._attempt(attempt) / "joining_nodes").exists()

    def note_store(self, attempt: int, host: str, port: str) -> None:
        """Leave the address of the store that the ranks of all machines share."""
        self._write(attempt, "store", f"{host} {port}")

    def store(self, attempt: int) -> tuple[str, int] | None:
        """That address; None where no rank of this machine has started."""
        try:
            host, port = (self._attempt(attempt) / "store").read_text().split()
        except FileNotFoundError:
            return None
        return host, int(port)

    def attempts(self) -> list[int]:
        """The attempts so far, oldest first."""
        return sorted(self._attempt_numbers())

    def sign_stop(self, number: int) -> None:
        """Note that the launcher was sent this signal."""
        with open(self.directory / "stop", "ab") as file:
            file.write(bytes([number]))

    def stop_signals(self) -> bytes:
        """The numbers of the signals that the launcher was sent."""
        try:
            return (self.directory / "stop").read_bytes()
        except FileNotFoundError:
            return b""

    def _attempt(self, attempt: int) -> Path:
        return self.directory / f"attempt_{attempt}"

    def _attempt_numbers(self) -> Iterator[int]:
        for path in self.directory.glob("attempt_*"):
            yield int(path.name.removeprefix("attempt_"))

    def _write(self, attempt: int, name: str, text: str) -> None:
        """Readers see the whole file or none."""
        directory = self._attempt(attempt)
        directory.mkdir(exist_ok=True)
        staged = directory / f".{name}"
        staged.write_text(text)
        staged.rename(directory / name)


def is_gone(process: int) -> bool:
    """Whether a process has ended (its parent may not have asked for its exit status yet)."""
    return _state_of(process) in ("", "Z")


def is_stopped(process: int) -> bool:
    """Whether a process is there and was told to stand still (SIGSTOP, a debugger)."""
    return _state_of(process) in ("T", "t")


def _state_of(process: int) -> str:
    """The kernel's letter, see proc(5); empty where there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
