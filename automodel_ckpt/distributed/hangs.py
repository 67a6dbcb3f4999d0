"""Steps that do not end: the state of each rank, which rank the others wait for, and stacks of all threads.

Ranks that wait in a collective cannot communicate through it, and the rank that serves their store may be the one that
hangs. They exchange their states through files in a directory that all of them share: ``rank_R.txt`` has the state of
rank R as a line of JSON, and the stacks of its threads.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import TextIO

import torch.distributed as dist

DUMP_SIGNAL = signal.SIGRTMAX - 2
"""A process that receives it writes the stacks of its threads, also while its main thread holds the interpreter."""
SUSPENDED = "suspended"
_SEQUENCE_NUMBER = "_get_sequence_number_for_group"
_MAX_BYTES = 2**20
_DUMP_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class RankState:
    """Where a rank is: the number of *completed* steps, its *phase*, and *seconds* since the last step ended.

    *collectives* is how many collectives it has begun, by process group. *place* is the function that runs.
    *is_overdue*: the rank itself found that the step takes too long.
    """

    rank: int
    time: float
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
            state = cls(**fields)
            collectives = {str(name): int(count) for name, count in state.collectives.items()}
            return cls(
                int(state.rank),
                float(state.time),
                int(state.completed),
                str(state.phase),
                float(state.seconds),
                collectives,
                str(state.place),
                state.is_overdue is True,
            )
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None

    @property
    def text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which ranks the others wait for, empty if all are in the same collective, and a sentence about it."""

    ranks: Sequence[int]
    text: str


def verdict(
    states: Mapping[int, RankState],
    num_ranks: int,
    notes: Mapping[int, str],
    working: Sequence[str],
) -> Verdict | None:
    """Return the ranks that did not arrive at the collective in which the others wait.

    *states* are those of the ranks that responded, and *notes* what is known of others. None: a rank is in a phase that
    is not in *working*, such as a save, for which the others wait as they should.
    """
    silent = [rank for rank in range(num_ranks) if rank not in states]
    if silent:
        described = []
        for rank in silent:
            note = notes.get(rank, "does not respond: its node or process may be lost or blocked")
            described.append(f"rank {rank} {note}")
        return Verdict(silent, "; ".join(described))
    if any(state.phase not in working for state in states.values()):
        return None
    late = _behind(states)
    if not late:
        return Verdict(
            [], "all ranks are at the same collective: check the network and the devices"
        )
    texts = [f"rank {rank} did not arrive: {states[rank].place}" for rank in late]
    return Verdict(late, "; ".join(texts))


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


def stragglers(waits: Sequence[float], step_seconds: float, share: float) -> list[int]:
    """Return the ranks that others wait for at the collective of each step.

    *waits* are the mean seconds that each rank waits there: the rank that arrives last does not wait. A rank is a
    straggler if it waits less than the median by more than a *share* of the time of a step.
    """
    usual = median(waits)
    return [rank for rank, wait in enumerate(waits) if usual - wait > share * step_seconds]


def collective_counts() -> dict[str, int]:
    """Return how many collectives this rank has begun, by the name of the process group."""
    counts = {}
    with contextlib.suppress(Exception):
        # torch has no public function for the groups of a process.
        for group, name in dict(dist.distributed_c10d._world.pg_names).items():
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
    while frame is not None and _is_of_library(frame):
        frame = frame.f_back
    here = _text_of(innermost)
    return here if frame is None or frame is innermost else f"{here}, called by {_text_of(frame)}"


def _is_of_library(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return module in ("torch", "threading", "automodel_ckpt", "contextlib", "transformers")


def _text_of(frame: FrameType) -> str:
    name = Path(frame.f_code.co_filename).name
    return f"{frame.f_code.co_name} ({name}:{frame.f_lineno})"


class StackDump:
    """Writes the stacks of this process when it receives :data:`DUMP_SIGNAL`, into an unnamed temporary file."""

    def __init__(self) -> None:
        # It is open as long as the handler is registered.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        faulthandler.register(DUMP_SIGNAL, self._file, all_threads=True)

    @property
    def address(self) -> tuple[str, int, int]:
        """The host, the number of this process and of the file in it, by which processes of the host can read it."""
        return socket.gethostname(), os.getpid(), self._file.fileno()

    def __enter__(self) -> StackDump:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Handle the signal no more."""
        faulthandler.unregister(DUMP_SIGNAL)
        self._file.close()


def stacks_of(address: tuple[str, int, int]) -> tuple[str, str]:
    """Return the stacks of another process, and a note about it. Both are empty for a process of another host."""
    host, process, descriptor = address
    if host != socket.gethostname():
        return "", ""
    try:
        status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "", "has ended"
    if status in ("T", "t"):
        return "", f"is {SUSPENDED} (process {process})"
    with contextlib.suppress(OSError):
        os.kill(process, DUMP_SIGNAL)
        time.sleep(_DUMP_SECONDS)
        text = Path(f"/proc/{process}/fd/{descriptor}").read_text("utf-8", "replace")
        return text[-_MAX_BYTES:], f"does not respond (process {process}), its stacks were dumped"
    return "", ""


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


def read_states(directory: Path, since: float) -> dict[int, RankState]:
    """Return the states in *directory* that are newer than *since*, in seconds since 1970, by rank."""
    states = {}
    for path in directory.glob("rank_*.txt"):
        with contextlib.suppress(OSError):
            # A pipe would block, and a link may lead elsewhere.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                state = RankState.parsed(file.readline(_MAX_BYTES).decode("utf-8", "replace"))
            if state is not None and state.time >= since:
                states[state.rank] = state
    return states
