"""Two ranks that execute commands, may be watched at their system calls, and may be killed at any of them."""

import contextlib
import gc
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from automodel_ckpt.checkpoint.formats import reading
from tools.crash.syscalls import Call, Stopped, listen

NUM_RANKS = 2
Decide = Callable[[int, Call], int]
THROUGH, KILLED = 0, -1
"""What a :data:`Decide` returns: let the call through, an errno to fail it with, or that its rank was just killed."""


@dataclass
class Outcome:
    """How a rank ended a job: its value, or the *kind* and the text of its error. Neither where the rank died."""

    value: Any = None
    kind: str = ""
    error: str = ""
    traceback: str = ""
    died: bool = False

    @property
    def ok(self) -> bool:
        return not self.kind and not self.died


@dataclass
class Rank:
    """The parent's view of one rank."""

    pid: int
    link: Connection
    listener: int | None = None
    alive: bool = True
    messages: list[Any] = field(default_factory=list)


class Pair:
    """Two forked processes with a gloo group. *watch*: calls in this directory are shown to :meth:`finish`."""

    def __init__(self, watch: str | None = None) -> None:
        self._watch = watch
        self._directory = tempfile.mkdtemp(prefix="pair-", dir="/dev/shm")
        self._end = float("inf")
        self.ranks: list[Rank] = []
        for number in range(NUM_RANKS):
            mine, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                mine.close()
                _serve(number, self._directory, theirs, watch is not None)
            theirs.close()
            self.ranks.append(Rank(pid, mine))
        for rank in self.ranks:
            # A job that kills a rank must not begin before the other one has joined. One that cannot join
            # has ended, which the first job shows.
            with contextlib.suppress(EOFError, ConnectionResetError):
                rank.link.recv()
                if watch is not None:
                    rank.listener = reduction.recv_handle(rank.link)

    @property
    def alive(self) -> bool:
        return all(rank.alive for rank in self.ranks)

    def tell(self, job: Callable[..., Any], *arguments: Any) -> None:
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
        sources: dict[Any, int] = {}
        for number, rank in enumerate(self.ranks):
            for source in (rank.link, rank.listener) if number not in outcomes else ():
                if source is not None:
                    sources[source] = number
        for ready in wait(list(sources), seconds):
            number = sources[ready]
            if isinstance(ready, int):
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
        rank = self.ranks[number]
        try:
            message = rank.link.recv()
        except (EOFError, ConnectionResetError):
            self._reap(rank)
            message = Outcome(died=True)
        if isinstance(message, Outcome):
            outcomes[number] = message
        else:
            rank.messages.append(message)

    def kill(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self.ranks[number].alive:
                os.kill(self.ranks[number].pid, signal.SIGKILL)

    def give_them(self, seconds: float) -> None:
        """Kill whoever has not ended its job *seconds* from now."""
        self._end = time.monotonic() + seconds

    def _reap(self, rank: Rank) -> None:
        if rank.alive:
            os.waitpid(rank.pid, 0)
            rank.alive = False

    def close(self) -> None:
        """End the ranks, whatever they do."""
        self.kill(range(NUM_RANKS))
        for rank in self.ranks:
            self._reap(rank)
            rank.link.close()
            if rank.listener is not None:
                os.close(rank.listener)
        shutil.rmtree(self._directory, ignore_errors=True)


_links: list[Connection] = []


def progress(message: Any) -> None:
    """Within a job: report to the parent."""
    _links[0].send(message)


def _serve(rank: int, directory: str, link: Connection, is_watched: bool) -> NoReturn:
    _links.append(link)
    # What other tests left in cycles is not this process's to destroy: destructors of process groups wait for threads
    # that do not exist here, or abort it.
    gc.freeze()
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        store = FileStore(os.path.join(directory, "store"), NUM_RANKS)
        limit = timedelta(seconds=30)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=limit)
        _read_small_files_with_threads()
        # Before the parent is shown the calls of this rank, which it does not answer yet.
        link.send("joined")
        if is_watched:
            reduction.send_handle(link, listen(), os.getppid())
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
        reading: {
            "BLOCK_BYTES": 256,
            "_SERIAL_ELEMENTS": 5,
            "_LARGE_RUN_BYTES": 1,
            "_num_threads": lambda nbytes: 3,
        },
    }
    for module, values in limits.items():
        for name, value in values.items():
            assert hasattr(module, name)
            setattr(module, name, value)


def _outcome(job: Callable[..., Any], arguments: tuple[Any, ...]) -> Outcome:
    try:
        return Outcome(job(*arguments))
    except BaseException as error:  # DCP's CheckpointException is no Exception
        kind = type(error).__name__
        return Outcome(kind=kind, error=str(error), traceback=traceback.format_exc())
