"""Steps that do not end: the state of each rank, which rank the others wait for, and stacks of all threads.

Ranks that wait in a collective cannot communicate through it, and the rank that serves their store may be the one that
hangs. They exchange their states through files in a directory that all of them share:

    rank_R.txt              the state of rank R as a line of JSON, and the stacks of its threads
    stacks_of_rank_R.txt    of a rank that does not respond: what processes of its node found out about it
    report.txt              the outcome

A rank that holds the interpreter dumps its stacks when it receives a signal. A suspended one (SIGSTOP, a debugger), or
one that waits in the kernel, cannot: then only its state (source: proc_pid_stat(5)) is known.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from automodel_ckpt.errors import EXIT_INTERNAL

REPORT = "report.txt"
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.2, 15.0
_SEQUENCE_NUMBER = "_get_sequence_number_for_group"
_MAX_BYTES = 2**20


@dataclass(frozen=True)
class RankState:
    """Where a rank is: the number of *completed* steps, its *phase*, and *seconds* since the last step ended.

    *start* identifies the start of the run, since files of earlier ones may remain. *collectives* is how many
    collectives it has begun, by process group. *place* is the function that runs. *is_overdue*: the rank itself found
    that the step takes too long.
    """

    rank: int
    start: str
    completed: int
    phase: str
    seconds: float
    collectives: Mapping[str, int]
    place: str
    is_overdue: bool = True

    @classmethod
    def parsed(cls, line: str) -> RankState | None:
        """Read a line of :meth:`text`; None for any other text."""
        try:
            fields = json.loads(line)
            kinds = (int, str, int, str, float, dict, str, bool)
            if [type(value) for value in fields.values()] != list(kinds):
                return None
            if any(type(count) is not int for count in fields["collectives"].values()):
                return None
            return cls(**fields)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None

    @property
    def text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Verdict:
    """Which ranks the others wait for, empty if all are in the same collective, and a sentence about it."""

    ranks: Sequence[int]
    text: str


def verdict(
    states: Mapping[int, RankState],
    ranks: Iterable[int],
    notes: Mapping[int, str],
    working: Sequence[str],
    hosts: Sequence[str] = (),
) -> Verdict | None:
    """Return the ranks that did not arrive at the collective in which the others wait.

    *states* are the states of the *ranks* that responded, and *notes* what is known of others. *hosts* are the names of
    the nodes of all ranks. None: a rank is in a phase that is not in *working*, such as a save, for which the others
    wait as they should.
    """
    silent = [rank for rank in ranks if rank not in states]
    if silent:
        described = []
        for rank in silent:
            note = notes.get(rank, "does not respond: its node or process may be lost or blocked")
            described.append(f"{rank_name(rank, hosts)} {note}")
        return Verdict(silent, "; ".join(described))
    if any(state.phase not in working for state in states.values()):
        return None
    late = _behind(states)
    if not late:
        return Verdict(
            [], "all ranks are at the same collective: check the network and the devices"
        )
    texts = [f"{rank_name(rank, hosts)} did not arrive: {states[rank].place}" for rank in late]
    return Verdict(late, "; ".join(texts))


def rank_name(rank: int, hosts: Sequence[str]) -> str:
    """Return the name of a rank for the user, with its node if *hosts*, the nodes of all ranks, has several."""
    return f"rank {rank} (node {hosts[rank]})" if len(set(hosts)) > 1 else f"rank {rank}"


def _behind(states: Mapping[int, RankState]) -> list[int]:
    """Return the ranks that completed fewer steps, or began fewer collectives of a process group, than others."""
    newest = max(state.completed for state in states.values())
    behind = [rank for rank, state in states.items() if state.completed < newest]
    if behind:
        return sorted(behind)
    found: set[int] = set()
    for name in {name for state in states.values() for name in state.collectives}:
        counts = {
            rank: state.collectives[name]
            for rank, state in states.items()
            if name in state.collectives
        }
        most = max(counts.values())
        found.update(rank for rank, count in counts.items() if count < most)
    return sorted(found)


def collective_counts() -> dict[str, int]:
    """Return how many collectives this rank has begun, by the name of the process group."""
    counts = {}
    with contextlib.suppress(Exception):
        # Not at the import: a launcher imports this module before it sets the variables that torch reads.
        distributed = importlib.import_module("torch.distributed.distributed_c10d")
        # torch has no public function for the groups of a process.
        for group, name in dict(distributed._world.pg_names).items():
            with contextlib.suppress(RuntimeError):
                # Its stubs lack the method.
                counts[str(name)] = int(getattr(group, _SEQUENCE_NUMBER)())
    return counts


def place_of_main_thread() -> str:
    """Return the innermost function of the main thread outside of torch and this package, and the innermost one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "unknown"
    innermost = frame
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in ("torch", "threading", "automodel_ckpt", "contextlib", "transformers"):
            break
        frame = frame.f_back
    here = _text_of(innermost)
    return here if frame is None or frame is innermost else f"{here}, called by {_text_of(frame)}"


def _text_of(frame: FrameType) -> str:
    name = Path(frame.f_code.co_filename).name
    return f"{frame.f_code.co_name} ({name}:{frame.f_lineno})"


def write_state(directory: Path, state: RankState) -> None:
    """Write ``rank_R.txt``: the state of this rank, and the stacks of its threads. Raises OSError."""
    with _written(directory, f"rank_{state.rank}.txt") as file:
        file.write(state.text + "\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def write_text(directory: Path, name: str, text: str) -> None:
    """Write a file in *directory*. Raises OSError."""
    with _written(directory, name) as file:
        file.write(text)


@contextlib.contextmanager
def _written(directory: Path, name: str) -> Iterator[TextIO]:
    """Write a file in one rename. Creates *directory* and its parent, which must be no links. Raises OSError."""
    for path in (directory.parent, directory):
        path.mkdir(exist_ok=True)
        if path.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    staged = directory / f".{name}.{uuid.uuid4().hex}"
    try:
        with staged.open("x", encoding="utf-8", errors="replace") as file:
            yield file
        staged.rename(directory / name)
    finally:
        staged.unlink(missing_ok=True)


def write_stacks(directory: Path, rank: int, start: str, report: ProcessReport) -> None:
    """Write ``stacks_of_rank_R.txt``: what this node found out about a rank that does not respond. Raises OSError."""
    head = json.dumps({"rank": rank, "start": start, "note": report.note})
    write_text(directory, f"stacks_of_rank_{rank}.txt", f"{head}\n\n{report.text}")


def read_states(directory: Path, start: str) -> dict[int, RankState]:
    """Return the states in *directory* by rank; only states of this *start* of the run."""
    states = {}
    for path in directory.glob("rank_*.txt"):
        state = RankState.parsed(read_text(path).partition("\n")[0])
        if state is not None and state.start == start:
            states[state.rank] = state
    return states


def poll_seconds(min_seconds: float) -> float:
    """How often processes look whether a step hangs, for at least *min_seconds*, or another one has found that."""
    return min(max(min_seconds / 20, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS)


def read_text(path: Path) -> str:
    """Return the beginning of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        # A pipe would block, and a link may lead elsewhere.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    return ""


DUMP_SIGNAL = signal.SIGRTMAX - 2
"""A process that receives it writes the stacks of its threads, also while its main thread holds the interpreter."""
_DUMP_SECONDS = 0.5


@dataclass(frozen=True)
class ProcessAddress:
    """A process of a job: its id, the number of the file in it to which it dumps its stacks, and that file's name.

    The name is random: ids are used again, and ids of another container or node belong to other processes, which the
    signal would end.
    """

    process: int
    descriptor: int
    name: str

    @property
    def path(self) -> Path:
        """The file of the process, as other processes can open it."""
        return Path(f"/proc/{self.process}/fd/{self.descriptor}")

    @property
    def is_on_this_node(self) -> bool:
        """Whether the process runs in the namespace of this one."""
        try:
            return self.name in os.readlink(self.path)
        except OSError:
            return False


@dataclass(frozen=True)
class ProcessReport:
    """What was found out about a process: a *note* that follows its name, and the *text* of its stacks."""

    note: str
    text: str


class StackDump:
    """Writes the stacks of this process into a file in memory when it receives :data:`DUMP_SIGNAL`.

    Only for the main thread.
    """

    def __init__(self) -> None:
        # The default would end the process: others send the signal while they see the file, which is there a moment
        # before the handler, and after it.
        signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
        name = f"automodel_ckpt-stacks-{uuid.uuid4().hex}"
        # It is open as long as the handler is registered.
        self._file = os.fdopen(os.memfd_create(name), "r+b")
        faulthandler.register(DUMP_SIGNAL, self._file, all_threads=True)
        self.address = ProcessAddress(os.getpid(), self._file.fileno(), name)
        """The address of this process and its file."""

    def __enter__(self) -> StackDump:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Handle the signal no more."""
        faulthandler.unregister(DUMP_SIGNAL)
        self._file.close()


def report_on(address: ProcessAddress) -> ProcessReport | None:
    """Return what this node knows of another process, with its stacks if it can dump them.

    Returns None for a process that has ended or is on another node.
    """
    if not address.is_on_this_node:
        return None
    process = address.process
    with contextlib.suppress(OSError):
        # The name of the command comes first, and may contain spaces and parentheses.
        stat = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2]
        if stat.split()[0] in "Tt":
            return ProcessReport(f"is suspended (process {process})", "")
    stacks = ""
    with contextlib.suppress(OSError):
        before = address.path.stat().st_size
        os.kill(process, DUMP_SIGNAL)
        time.sleep(_DUMP_SECONDS)
        with address.path.open("rb") as file:
            # An earlier dump is in the file, too.
            file.seek(before)
            stacks = file.read(_MAX_BYTES).decode("utf-8", "replace")
    dumped = ", its stacks were dumped" if stacks else ""
    return ProcessReport(f"does not respond (process {process}){dumped}", stacks)


restart: Callable[[str], None] | None = None
"""Ends this process with a message. It is None when nothing would start it again. A thread of the rank calls it."""


@contextmanager
def ending_processes() -> Iterator[None]:
    """Within the context, a hang ends this process, so that torchrun, which has started it, restarts the ranks."""
    global restart
    before = restart
    restart = _print_and_end
    try:
        yield
    finally:
        restart = before


def _print_and_end(message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"error: {message}\n")
    for stream in (sys.stdout, sys.stderr):
        # A closed terminal.
        with suppress(OSError, ValueError):
            stream.flush()
    # No cleanup: the main thread waits in a collective.
    os._exit(EXIT_INTERNAL)


def may_restart(environment: Mapping[str, str]) -> bool:
    """Whether the launcher, this program's or torchrun, starts failed ranks again at least once more."""
    return restart is not None and has_restarts_left(environment)


def has_restarts_left(environment: Mapping[str, str]) -> bool:
    """Whether torch's elastic agent, from torchrun or this program's launcher, restarts ranks that fail now."""
    counts: list[Any] = [
        environment.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT")
    ]
    return all(map(str.isdecimal, counts)) and int(counts[0]) > int(counts[1])
