"""Two ranks that execute commands, may be watched at their system calls, and may be killed at any of them."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from automodel_ckpt.checkpoint.formats import read_ahead, reading
from tools.crash.syscalls import Call, Stopped, listen

NUM_RANKS = 2
Decide = Callable[[int, Call], int]
THROUGH, KILLED = 0, -1
"""What a :data:`Decide` returns: let the call through, an errno to fail it with, or that its rank was just killed."""


@dataclass
class Outcome:
    """How a rank ended a job: its value, or its error; neither where the rank died."""

    value: Any = None
    error: BaseException | None = None
    died: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None and not self.died


@dataclass
class Rank:
    """The parent's view of one rank."""

    pid: int
    link: Connection
    listener: int | None = None
    alive: bool = True
    messages: list[Any] = field(default_factory=list)


class Pair:
    """Two forked processes with a gloo group. *watch*: the directory whose calls are shown to :meth:`finish`."""

    def __init__(self, watch: str | None = None) -> None:
        self._watch = watch
        self._directory = tempfile.mkdtemp(prefix="pair-", dir="/dev/shm")
        self._end = float("inf")
        self.ranks: list[Rank] = []
        handovers = [self._start(rank) for rank in range(NUM_RANKS)]
        for rank, handover in zip(self.ranks, handovers, strict=True):
            if watch is not None:
                rank.listener = socket.recv_fds(handover, 1, 1)[1][0]
            handover.close()
        for rank in self.ranks:
            # A job that kills a rank must not begin before the other one has joined. One that cannot join
            # has ended, which the first job shows.
            with contextlib.suppress(EOFError, ConnectionResetError):
                rank.link.recv()

    def _start(self, rank: int) -> socket.socket:
        mine, theirs = multiprocessing.Pipe()
        here, there = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            mine.close()
            here.close()
            _serve(rank, self._directory, theirs, there if self._watch is not None else None)
        theirs.close()
        there.close()
        self.ranks.append(Rank(pid, mine))
        return here

    @property
    def alive(self) -> bool:
        return all(rank.alive for rank in self.ranks)

    def tell(self, job: Callable[..., Any], *arguments: Any) -> None:
        """Start a job on all ranks."""
        for rank in self.ranks:
            rank.link.send((job, arguments))

    def run(
        self, job: Callable[..., Any], *arguments: Any, decide: Decide | None = None
    ) -> list[Outcome]:
        """A whole job: what became of it, by rank."""
        self.tell(job, *arguments)
        return self.finish(decide)

    def finish(self, decide: Decide | None = None, *, seconds: float = 60.0) -> list[Outcome]:
        """Serve the ranks until each has ended its job or died; those that take longer than *seconds* are killed."""
        outcomes: dict[int, Outcome] = {}
        self._end = time.monotonic() + seconds
        while len(outcomes) < NUM_RANKS:
            self.serve_once(outcomes, decide)
            if time.monotonic() > self._end:
                self.kill(range(NUM_RANKS))
        return [outcomes[rank] for rank in range(NUM_RANKS)]

    def serve_once(
        self, outcomes: dict[int, Outcome], decide: Decide | None, *, seconds: float = 0.05
    ) -> None:
        """Answer what the ranks ask within *seconds*; what they report goes to *outcomes* or their ``messages``."""
        poll = select.poll()
        sources: dict[int, tuple[int, bool]] = {}
        for number, rank in enumerate(self.ranks):
            for descriptor in (rank.link.fileno(), rank.listener) if number not in outcomes else ():
                if descriptor is not None:
                    poll.register(descriptor, select.POLLIN)
                    sources[descriptor] = (number, descriptor == rank.listener)
        for descriptor, _ in poll.poll(seconds * 1000):
            number, is_call = sources[descriptor]
            if is_call:
                self._answer(number, decide)
            else:
                self._receive(number, outcomes)

    def _answer(self, number: int, decide: Decide | None) -> None:
        rank = self.ranks[number]
        assert rank.listener is not None and self._watch is not None
        try:
            stopped = Stopped(rank.listener)
        except OSError:
            if not rank.alive:
                os.close(rank.listener)
                rank.listener = None
            return
        call = stopped.below(self._watch) if decide else None
        verdict = decide(number, call) if decide and call else THROUGH
        if verdict == THROUGH:
            stopped.let_through()
        elif verdict != KILLED:
            stopped.fail(verdict)

    def _receive(self, number: int, outcomes: dict[int, Outcome]) -> None:
        try:
            kind, content = self.ranks[number].link.recv()
        except (EOFError, ConnectionResetError):
            self._reap(number)
            outcomes[number] = Outcome(died=True)
            return
        if kind == "progress":
            self.ranks[number].messages.append(content)
        else:
            outcomes[number] = Outcome(**{kind: content})

    def kill(self, numbers: Any) -> None:
        """SIGKILL."""
        for number in numbers:
            if self.ranks[number].alive:
                os.kill(self.ranks[number].pid, signal.SIGKILL)

    def give_them(self, seconds: float) -> None:
        """Kill whoever has not ended its job *seconds* from now."""
        self._end = time.monotonic() + seconds

    def _reap(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.alive:
            os.waitpid(rank.pid, 0)
            rank.alive = False

    def close(self) -> None:
        """End the ranks, whatever they do."""
        self.kill(range(NUM_RANKS))
        for number, rank in enumerate(self.ranks):
            self._reap(number)
            rank.link.close()
            if rank.listener is not None:
                os.close(rank.listener)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_link: Connection | None = None


def progress(message: Any) -> None:
    """Within a job: tell the parent."""
    assert _link is not None
    _link.send(("progress", message))


def _serve(rank: int, directory: str, link: Connection, handover: socket.socket | None) -> NoReturn:
    global _link
    _link = link
    # What other tests left in cycles is not this process's to destroy: destructors of process groups wait for threads
    # that do not exist here, or abort it.
    gc.freeze()
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _join(rank, directory)
        _read_small_files_with_threads()
        # Before the parent is shown the calls of this rank, which it does not answer yet.
        link.send("joined")
        if handover is not None:
            socket.send_fds(handover, [b"L"], [listen()])
        while True:
            job, arguments = link.recv()
            link.send(_outcome(job, arguments))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _read_small_files_with_threads() -> None:
    """The files of the campaigns have a few KB: read them as large ones, in several blocks, with threads."""
    limits: dict[Any, dict[str, Any]] = {
        read_ahead: {"BLOCK_BYTES": 256, "_SERIAL_ELEMENTS": 5},
        reading: {"BLOCK_BYTES": 256, "_LARGE_RUN_BYTES": 1, "num_threads": lambda nbytes: 3},
    }
    for module, values in limits.items():
        for name, value in values.items():
            assert hasattr(module, name)
            setattr(module, name, value)


def _join(rank: int, directory: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = FileStore(os.path.join(directory, "store"), NUM_RANKS)
    seconds = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=seconds)


def _outcome(job: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "value", job(*arguments)
    except BaseException as error:  # DCP's CheckpointException is no Exception
        return "error", _portable(error)


def _portable(error: BaseException) -> BaseException:
    """The error, or one that says the same where it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(traceback.format_exc())
    return error
