"""The process of a node that serves its memory checkpoints to other nodes, and sends them copies.

The first rank of each node starts it. It gets one command at a time as a line of JSON, and answers with a line. It ends
when that rank has ended. Another process than the trainer's, so that copies do not contend with training for the GIL.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from automodel_ckpt.base.python_child import start_python
from automodel_ckpt.checkpoint.memory.hang_reports import ReportSender
from automodel_ckpt.checkpoint.memory.node_server import NodeServer
from automodel_ckpt.checkpoint.memory.requests import (
    Address,
    NodeFailed,
    command,
    send_file,
    send_report,
)
from automodel_ckpt.checkpoint.memory.save_files import files_below
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.store.transfer import Throttle
from automodel_ckpt.errors import AutomodelError, os_problem

log = logging.getLogger("automodel_ckpt")

_NICENESS = 10
_POLL_SECONDS = 0.1
_BEAT_SECONDS = 1.0
STALLED_SECONDS = 30.0
"""A process that runs a command and writes nothing for so long was stopped, or its node is out of memory."""
START_SECONDS = 120.0
"""How long a process may take until it listens: a shared file system may take a minute to read Python's files."""
_NUM_THREADS = 8
_WATCH_SECONDS, _LONGEST_WATCH_SECONDS = 1.0, 60.0
"""How often a thread looks whether the process has ended, and how often it tries to start it."""
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_HINT = "check what killed it (the system log reports out-of-memory kills)"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a process needs to know: the directory, where to listen, and the most bytes that it sends per second.

    *reports_to* are the hosts and ports of the nodes that get the reports on hangs of this one.
    """

    root: str
    host: str
    port: int
    token: str
    bytes_per_second: float | None
    parent: int
    reports_to: Sequence[Sequence[Any]] = ()


class NodeProcess:
    """The process, from the side of the rank that has started it. One thread at a time runs commands.

    Another thread starts it again when it was killed: other nodes read from it between saves, too.
    """

    def __init__(
        self, root: Path, host: str, token: str, bytes_per_second: float | None = None
    ) -> None:
        """Start the process; it listens at a free port of *host*. Raises OSError, and :class:`NodeFailed`."""
        self._settings = Settings(str(root), host, 0, token, bytes_per_second, os.getpid())
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self.address = Address(host, 0)
        self._start()
        threading.Thread(target=self._watch, name="node-process-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process ID."""
        with self._lock:
            assert self._process is not None
            return self._process.pid

    def _start(self) -> subprocess.Popen[bytes]:
        # At the same port after a failure: the other nodes know it.
        fields = {**asdict(self._settings), "port": self.address.port}
        self._buffer = b""
        # The process inherits the mask, so that a signal to the process group does not end it before the trainer.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            process = start_python(
                __name__, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        self._process = process
        if self._closed.is_set():
            # Meanwhile: kill() may have found no process.
            self.kill()
        answer = self._ask(process, fields, lambda: None, START_SECONDS)
        self.address = Address(self.address.host, answer["port"])
        return process

    def start_again(self) -> None:
        """Start the process again if it has ended. Raises OSError, and :class:`NodeFailed`."""
        with self._lock:
            self._running_process()

    def _running_process(self) -> subprocess.Popen[bytes]:
        """Return the process, which is started again if it has ended."""
        # A local name: close() removes the attribute without the lock.
        process = self._process
        if process is None or process.poll() is not None:
            self.kill()
            process = self._start()
        return process

    def _watch(self) -> None:
        """Start the process again when it has ended, until :meth:`close`."""
        pause = _WATCH_SECONDS
        while not self._closed.wait(pause):
            try:
                self.start_again()
                pause = _WATCH_SECONDS
            # ValueError: another thread has closed the pipe.
            except (OSError, ValueError, NodeFailed):
                log.debug("the node process could not be started again", exc_info=True)
                pause = min(2 * pause, _LONGEST_WATCH_SECONDS)

    def send_reports(self, targets: Sequence[Address]) -> None:
        """Send the reports on hangs in the directory to *targets* from now on.

        Raises OSError, and :class:`NodeFailed`.
        """
        # A process that replaces this one gets them with its settings.
        self._settings = replace(self._settings, reports_to=[list(target) for target in targets])
        self.do({"do": "report", "to": self._settings.reports_to}, lambda: None)

    def do(self, document: dict[str, Any], check: Callable[[], None]) -> None:
        """Run a command. Until it ends, *check* is called repeatedly; it may raise to cancel the command.

        Raises :class:`NodeFailed`. A process that has ended is started again.
        """
        with self._lock:
            process = self._running_process()
            try:
                self._ask(process, document, check, STALLED_SECONDS)
            except NodeFailed:
                raise
            except BaseException:
                # It must not answer the next command with the result of this one.
                self.kill()
                raise

    def _ask(
        self,
        process: subprocess.Popen[bytes],
        document: dict[str, Any],
        check: Callable[[], None],
        stalled_seconds: float,
    ) -> dict[str, Any]:
        """Send *document* and return the answer; :class:`NodeFailed` after *stalled_seconds* without a sign of life."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the answer shows
            process.stdin.write(json.dumps(document).encode() + b"\n")
        last_sign = time.monotonic()
        while b"\n" not in self._buffer:
            check()
            if not select.select([process.stdout], [], [], _POLL_SECONDS)[0]:
                if time.monotonic() - last_sign > stalled_seconds:
                    raise self._stalled(process, stalled_seconds)
                continue
            last_sign = time.monotonic()
            block = os.read(process.stdout.fileno(), 1 << 16)
            if not block:
                raise self._died(process)
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NodeFailed(**answer["error"])
        return answer

    def _died(self, process: subprocess.Popen[bytes]) -> NodeFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        return NodeFailed(
            "the process that copies checkpoints in memory between nodes ended unexpectedly",
            where=self._settings.root,
            value=f"process {process.pid}: code {process.poll()}",
            hint=_HINT,
        )

    def _stalled(self, process: subprocess.Popen[bytes], seconds: float) -> NodeFailed:
        # It must not answer the next command with the result of this one.
        self.kill()
        return NodeFailed(
            "the process that copies checkpoints in memory between nodes does not respond",
            where=self._settings.root,
            value=f"process {process.pid}: nothing for {seconds:.0f} s",
            hint="check whether it was stopped, and the memory of the node",
        )

    def kill(self) -> None:
        """Kill the process. It is started again, at the latest by the next command."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def close(self) -> None:
        """End the process. It keeps nothing: what others have sent is in files."""
        self._closed.set()
        # Without the lock: a thread may wait for a command.
        self.kill()


# ---------------------------------------------------------------- in the process


def main(_: list[str]) -> None:
    """Serve, and run the commands from the standard input until it closes."""
    os.nice(_NICENESS)
    commands: IO[bytes] = os.fdopen(0, "rb")
    settings = Settings(**json.loads(commands.readline()))
    is_busy = threading.Event()
    threading.Thread(target=_beat, args=(settings.parent, is_busy), daemon=True).start()
    try:
        server = NodeServer(
            Path(settings.root), Address(settings.host, settings.port), settings.token
        )
    except OSError as error:
        _reply(_failure(error, f"listening at {settings.host}"))
        return
    threading.Thread(target=server.serve_forever, name="server", daemon=True).start()
    sender = Sender(server, Throttle(settings.bytes_per_second))
    if settings.reports_to:
        sender.run({"do": "report", "to": settings.reports_to})
    _reply({"port": server.server_address[1]})
    for line in commands:
        is_busy.set()
        answer: dict[str, Any] = {}
        try:
            sender.run(json.loads(line))
        except (AutomodelError, OSError) as error:
            answer = _failure(error, "copying a checkpoint in memory")
        is_busy.clear()
        _reply(answer)
    # Not sys.exit: threads that serve requests would keep the process alive.
    os._exit(0)


def _reply(answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(answer).encode() + b"\n")


def _failure(error: Exception, doing: str) -> dict[str, Any]:
    if isinstance(error, AutomodelError):
        problem = error.problems[0]
    else:
        assert isinstance(error, OSError)
        problem = os_problem(error, f"{doing} failed", hint=_HINT)
    fields = {
        "what": problem.what,
        "where": str(problem.where),
        "value": str(problem.value),
        "hint": problem.hint,
        "restart": problem.restart,
    }
    return {"error": fields}


def _beat(parent: int, is_busy: threading.Event) -> None:
    """Write a sign of life during commands: a space, which JSON ignores.

    End the process when the trainer has ended, also while a data-loader worker of it keeps the pipe open.
    """
    while os.getppid() == parent:
        if is_busy.is_set():
            with contextlib.suppress(OSError):
                os.write(1, b" ")
        time.sleep(_BEAT_SECONDS)
    os._exit(1)


class Sender:
    """Sends what this node has to other nodes, which know the token of *server*."""

    def __init__(self, server: NodeServer, throttle: Throttle) -> None:
        self._server = server
        self._throttle = throttle
        self._staging = ""
        self._sent: set[str] = set()
        """The files of this node in the directory *staging* that were sent."""

        def send(target: Address, file: str, data: bytes) -> None:
            send_report(target, server.token, file, data)

        self._reports = ReportSender(server.hang_reports, send)

    def run(self, document: dict[str, Any]) -> None:
        """Run a command of the trainer. Raises :class:`NodeFailed` and OSError."""
        targets = [Address(*target) for target in document.get("to", ())]
        if document["do"] == "copy":
            self._copy(document["staging"], targets)
        elif document["do"] == "deliver":
            self._deliver(document["staging"], document["files"], targets)
        elif document["do"] == "publish":
            self._publish(document["staging"], document["name"], targets)
        elif document["do"] == "report":
            self._reports.start(targets)
        else:
            self._change(targets, {"do": "keep", "names": document["names"]})

    def _copy(self, staging: str, targets: Sequence[Address]) -> None:
        """Send the files of this node in *staging* that were not sent yet."""
        if staging != self._staging:
            self._staging, self._sent = staging, set()
        known = self._sent | self._server.received(staging)
        files = [file for file in files_below(self._server.root / staging) if file not in known]
        self._deliver(staging, files, targets)
        self._sent.update(files)

    def _deliver(self, staging: str, files: Sequence[str], targets: Sequence[Address]) -> None:
        """Send *files* of the directory *staging*, in this order, to each target."""

        def send_all(target: Address) -> None:
            for file in files:
                name = f"{staging}/{file}"
                send_file(target, self._server.token, self._server.root, name, self._throttle)

        self._on_each(targets, send_all)

    def _publish(self, staging: str, name: str, targets: Sequence[Address]) -> None:
        # Here and not in the trainer: the manifest of a large run is megabytes of JSON.
        digest = Summary.read(self._server.root / staging).digest
        self._change(targets, {"do": "publish", "staging": staging, "name": name, "digest": digest})

    def _change(self, targets: Sequence[Address], document: dict[str, Any]) -> None:
        self._on_each(targets, lambda target: command(target, self._server.token, document))

    def _on_each(self, targets: Iterable[Address], work: Callable[[Address], None]) -> None:
        with ThreadPoolExecutor(_NUM_THREADS, "send") as pool:
            # list() raises the first failure.
            list(pool.map(work, targets))
