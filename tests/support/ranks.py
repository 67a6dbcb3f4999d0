"""Run a function on N real ranks: forked processes with a gloo group, one thread each, and a time limit.

    values = ranks.run(function, 2, "argument")            # raises when a rank fails
    outcomes = ranks.outcomes(function, 2, "argument")     # when failing is what the test is about

The function may be any callable, closures too, and is called as ``function(*arguments)`` once the default process group
stands; it reads its rank from ``dist.get_rank()``. What it returns must be picklable.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT_SECONDS = 120.0
"""Below the limit of a test (pyproject.toml), and long enough where other processes keep the machine busy."""
LONGEST_TIMEOUT_SECONDS = 150.0
"""For several functions. At the limit of a test, pytest-timeout would report the stack of this process only."""
AFTER_FAILURE_SECONDS = 45.0
"""How long the other ranks have after one has failed: they often wait for it until the timeout of their group."""
_ATTEMPTS_TO_FORM = 3
_SECONDS_TO_FORM = 25.0
"""A rank that was forked while a thread of another test held a lock never joins. Two waits fit into a test's limit."""
_JOINED = b"joined"
_PORTS_PER_WORKER = 2_500
_given_ports: deque[int] = deque(maxlen=_PORTS_PER_WORKER // 2)


@dataclass
class Outcome:
    """How one rank ended: its value, or its error and traceback; neither, when it died (``exitcode`` says how)."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exitcode: int | None = None
    """Negative: the signal that killed it. None: killed here, at the time limit."""

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0


def run(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    init: bool = True,
) -> list[Any]:
    """The value of every rank; AssertionError with the tracebacks of those that failed, died or took too long."""
    ended = outcomes(function, num_ranks, *arguments, timeout=timeout, init=init)
    bad = [_report(rank, outcome) for rank, outcome in enumerate(ended) if not outcome.ok]
    assert not bad, "\n".join(bad)
    return [outcome.value for outcome in ended]


def outcomes(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    init: bool = True,
) -> list[Outcome]:
    """How every rank ended. With ``init=False`` the ranks get RANK, WORLD_SIZE, LOCAL_RANK, MASTER_* but no group."""
    assert not dist.is_initialized(), (
        "close this process's own group first: forked ranks would inherit it"
    )
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        for attempt in range(_ATTEMPTS_TO_FORM):
            store = os.path.join(directory, f"store-{attempt}") if init else ""
            started = _start(function, arguments, num_ranks, store, timeout)
            last = not init or attempt == _ATTEMPTS_TO_FORM - 1
            if last or _formed(started, _SECONDS_TO_FORM):
                break
            _end(started)
        return _collect(started, timeout)


def run_each(
    functions: Sequence[Callable[[], Any]],
    num_ranks: int,
    *,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
) -> list[list[Any]]:
    """The value of every rank for each function; all run in the same processes, one after the other.

    This takes a third of the time of new ranks for each: what torch computes once per process is there. Each function
    forms and leaves a group, for which it gets its own MASTER_PORT.
    """
    ports = [str(free_port()) for _ in functions]

    def all_of_them() -> list[Any]:
        values = []
        for port, function in zip(ports, functions, strict=True):
            os.environ["MASTER_PORT"] = port
            values.append(function())
        return values

    timeout = min(timeout * len(functions), LONGEST_TIMEOUT_SECONDS)
    by_rank = run(all_of_them, num_ranks, timeout=timeout, init=False)
    return [list(values) for values in zip(*by_rank, strict=True)]


_Started = tuple[BaseProcess, Connection]


def _start(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    num_ranks: int,
    store: str,
    timeout: float,
) -> list[_Started]:
    context = multiprocessing.get_context("fork")
    environment = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    environment["OMP_NUM_THREADS"] = "1"
    started: list[_Started] = []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(
            target=_rank, args=(function, arguments, variables, store, timeout, sender)
        )
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # pytest-xdist's thread; ranks never touch it
            process.start()
        sender.close()
        started.append((process, receiver))
    return started


def _formed(started: list[_Started], timeout: float) -> bool:
    """Whether all ranks stand in the group; False as soon as one does not: gloo's connecting fails now and then on a
    busy machine ("connectFullMesh failed ... Connection closed by peer"), and the others would wait for it."""
    end, waiting = time.monotonic() + timeout, [receiver for _, receiver in started]
    while waiting and (ready := wait(waiting, max(0.0, end - time.monotonic()))):
        for receiver in ready:
            assert isinstance(receiver, Connection)
            try:
                if receiver.recv_bytes() != _JOINED:
                    return False
            except EOFError:
                return False
            waiting.remove(receiver)
    return not waiting


def _end(started: list[_Started]) -> None:
    for process, receiver in started:
        process.kill()
        process.join()
        receiver.close()


def without_gloo_greetings(text: str) -> str:
    """What ranks have printed, without the line that torch 2.10's gloo prints on standard output when it has connected.

    A rank writes that line in eight pieces, so in the common output of several ranks the pieces are mixed. Lines that
    the ranks print in one write are kept, if they do not begin with a digit.
    """
    if "[Gloo] Rank " not in text:
        return text
    pieces = (
        "[Gloo] Rank ",
        " is connected to ",
        " peer ranks. ",
        "Expected number of connected peer ranks is : ",
    )
    for piece in pieces:
        text = text.replace(piece, "")
    # The greetings' numbers and line ends are left: at the beginning of lines, since each piece between them is gone.
    lines = [line.lstrip("0123456789") for line in text.splitlines(keepends=True)]
    return "".join(line for line in lines if line != "\n")


def free_port() -> int:
    """A TCP port without a listener, outside the range that the system assigns: until it is used, connections
    of neighbours do not take it. Each worker of pytest-xdist has other ports, and a process gets no port twice."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 10_000 + worker % 8 * _PORTS_PER_WORKER
    while True:
        port = first + secrets.randbelow(_PORTS_PER_WORKER)
        if port in _given_ports:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given_ports.append(port)
            return port


def _rank(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    store: str,
    timeout: float,
    sender: Connection,
) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's is the parent's
    # A data loader's worker outlives a rank that is killed, for five seconds: the parent must not wait for it.
    os.register_at_fork(after_in_child=sender.close)
    # Shortly before the parent kills this rank: where it waits is in the captured standard error.
    faulthandler.dump_traceback_later(max(1.0, timeout - 2), file=2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    outcome = Outcome(exitcode=0)
    try:
        if store:
            file_store = dist.FileStore(store, int(environment["WORLD_SIZE"]))  # type: ignore[attr-defined]
            dist.init_process_group(
                "gloo",
                store=file_store,
                rank=int(environment["RANK"]),
                world_size=int(environment["WORLD_SIZE"]),
                timeout=timedelta(seconds=timeout),
            )
            sender.send_bytes(_JOINED)
        outcome.value = function(*arguments)
    except BaseException as error:
        outcome = Outcome(error=error, traceback=traceback.format_exc(), exitcode=0)
    sender.send_bytes(_pickled(outcome))
    if dist.is_initialized() and outcome.error is None:
        dist.destroy_process_group()
    os._exit(0)


def _pickled(outcome: Outcome) -> bytes:
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
        return data
    except Exception as error:
        cause = outcome.error or error
        substitute = RuntimeError(f"{type(cause).__name__}: {cause}")
        return pickle.dumps(
            Outcome(error=substitute, traceback=outcome.traceback or repr(error), exitcode=0)
        )


def _collect(started: list[_Started], timeout: float) -> list[Outcome]:
    """The outcomes of all ranks. Ranks that have not ended at the time limit are killed."""
    end = time.monotonic() + timeout
    ended = [Outcome() for _ in started]
    waiting = {receiver: rank for rank, (_, receiver) in enumerate(started)}
    while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
        for receiver in ready:
            assert isinstance(receiver, Connection)
            outcome = _received(receiver)
            if outcome is None:
                continue
            ended[waiting.pop(receiver)] = outcome
            if not outcome.ok:
                end = min(end, time.monotonic() + AFTER_FAILURE_SECONDS)
    for (process, receiver), outcome in zip(started, ended, strict=True):
        _await_end(process, max(1.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            outcome.exitcode = None
        else:
            outcome.exitcode = process.exitcode
        process.close()
        receiver.close()
    return ended


def _await_end(process: BaseProcess, seconds: float) -> None:
    """Wait until a process has ended, but not for those that it has started, as its join() with a time does."""
    # One that has an exit code has been waited for, and its id may be that of another process.
    if process.exitcode is not None or process.pid is None:
        return
    descriptor = os.pidfd_open(process.pid)
    try:
        wait([descriptor], seconds)
    finally:
        os.close(descriptor)


def _received(receiver: Connection) -> Outcome | None:
    """What a rank has sent: None for the message that it joined, an outcome without an exit code when it died."""
    try:
        message = receiver.recv_bytes()
    except EOFError:
        return Outcome()
    if message == _JOINED:
        return None
    outcome: Outcome = pickle.loads(message)
    return outcome


def _report(rank: int, outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"rank {rank} raised:\n{outcome.traceback}"
    return f"rank {rank} " + (
        "took too long" if outcome.exitcode is None else f"ended with {outcome.exitcode}"
    )
