"""The process of a node that serves its memory checkpoints to other nodes, and sends them copies.

The first rank of each node starts it, and gives it commands. It ends when that rank has ended. Another process than the
trainer's, so that copies do not contend with training for the GIL. Imports no torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from automodel_ckpt.base.python_child import CommandProcess, run_commands
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.memory.node_server import NodeServer
from automodel_ckpt.checkpoint.memory.requests import (
    Address,
    NodeFailed,
    command,
    send_file,
)
from automodel_ckpt.checkpoint.memory.save_files import files_below
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.store.transfer import Throttle
from automodel_ckpt.errors import AutomodelError

log = logging.getLogger("automodel_ckpt")

STALLED_SECONDS = 30.0
"""A process that runs a command and reports nothing for so long was stopped, or its node is out of memory."""
START_SECONDS = 120.0
"""How long a process may take until it listens: a shared file system may take a minute to read Python's files."""
_NUM_THREADS = 8


@dataclass(frozen=True)
class Settings:
    """What a process needs to know: the directory, where to listen, and the most bytes that it sends per second.

    *reports_to* are the nodes that get the reports on hangs of this one.
    """

    root: str
    host: str
    port: int
    token: str
    bytes_per_second: float | None
    reports_to: Sequence[Address] = ()


class NodeProcess:
    """The process, from the side of the rank that has started it. One thread at a time runs commands.

    The next command starts it again when it was killed.
    """

    def __init__(
        self, root: Path, host: str, token: str, bytes_per_second: float | None = None
    ) -> None:
        """Start the process; it listens at a free port of *host*. Raises OSError, and :class:`NodeFailed`."""
        self._settings = Settings(str(root), host, 0, token, bytes_per_second)
        self._process: CommandProcess | None = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self.start_again()

    @property
    def address(self) -> Address:
        """Where the process listens."""
        return Address(self._settings.host, self._settings.port)

    @property
    def pid(self) -> int:
        """The process ID."""
        with self._lock:
            assert self._process is not None
            return self._process.pid

    def start_again(self) -> None:
        """Start the process unless it runs. Raises OSError, and :class:`NodeFailed`."""
        with self._lock:
            # A local name: close() removes the attribute without the lock.
            process = self._process
            if process is not None and process.is_alive:
                return
            self.kill()
            process = self._process = CommandProcess(__name__)
            if self._closed.is_set():
                # Meanwhile: kill() may have found no process.
                self.kill()
            # At the same port after a failure: the other nodes know it.
            port = self._ask(process, self._settings, lambda: None, START_SECONDS)
            self._settings = replace(self._settings, port=port)

    def send_reports(self, targets: Sequence[Address]) -> None:
        """Send the reports on hangs in the directory to *targets* from now on.

        Raises OSError, and :class:`NodeFailed`.
        """
        # A process that replaces this one gets them with its settings.
        self._settings = replace(self._settings, reports_to=targets)
        self.do({"do": "report", "to": targets}, lambda: None)

    def do(self, document: ValueDict, check: Callable[[], None]) -> None:
        """Run a command. Until it ends, *check* is called repeatedly; it may raise to cancel the command.

        Raises :class:`NodeFailed`. A process that has ended is started again.
        """
        with self._lock:
            self.start_again()
            process = self._process
            if process is not None:
                self._ask(process, document, check, STALLED_SECONDS)

    def _ask(
        self,
        process: CommandProcess,
        command: ValueDict | Settings,
        check: Callable[[], None],
        stalled_seconds: float,
    ) -> Any:
        try:
            return process.do(command, check=check, stalled_seconds=stalled_seconds)
        except AutomodelError as error:
            raise NodeFailed.all_of(error.problems) from error
        except OSError as error:
            self.kill()
            raise NodeFailed(
                "the process that copies checkpoints in memory between nodes failed",
                where=self._settings.root,
                value=str(error),
                hint="check the memory of the node, and what killed the process (the system log reports that)",
            ) from error

    def kill(self) -> None:
        """Kill the process. It is started again, at the latest by the next command."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process. It keeps nothing: what others have sent is in files."""
        self._closed.set()
        # Without the lock: a thread may wait for a command.
        self.kill()


# ---------------------------------------------------------------- in the process


def main(arguments: list[str]) -> None:
    """Serve, and run the commands of the trainer. The first one is the :class:`Settings`.

    *arguments* are as for :func:`~.python_child.run_commands`, and not secret: everybody can read them.
    """
    descriptor, trainer = arguments
    sender: Sender | None = None

    def run(document: Any) -> int | None:
        nonlocal sender
        if sender is None:
            settings = document
            server = NodeServer(
                Path(settings.root), Address(settings.host, settings.port), settings.token
            )
            threading.Thread(target=server.serve_forever, name="server", daemon=True).start()
            sender = Sender(server, Throttle(settings.bytes_per_second))
            if settings.reports_to:
                sender.run("report", settings.reports_to)
            return int(server.server_address[1])
        sender.run(**document)
        return None

    run_commands(descriptor, trainer, run)


class Sender:
    """Sends what this node has to other nodes, which know the token of *server*."""

    def __init__(self, server: NodeServer, throttle: Throttle) -> None:
        self._server = server
        self._throttle = throttle
        self._staging = ""
        self._sent: set[str] = set()
        """The files of this node in the directory *staging* that were sent."""

    def run(self, do: str, to: Sequence[Address], **fields: Any) -> None:
        """Run a command of the trainer on the nodes *to*. Raises :class:`NodeFailed` and OSError."""
        if do == "report":
            self._server.hang_reports.start(to)
        elif do == "copy":
            self._copy(to, **fields)
        elif do == "deliver":
            self._deliver(to, **fields)
        else:
            if do == "publish":
                # Here and not in the trainer: the manifest of a large run is megabytes of JSON.
                fields["digest"] = Summary.read(self._server.root / fields["staging"]).digest
            document = {"do": do, **fields}
            _on_each(to, partial(command, token=self._server.token, document=document))

    def _copy(self, targets: Sequence[Address], staging: str) -> None:
        """Send the files of this node in *staging* that were not sent yet."""
        if staging != self._staging:
            self._staging, self._sent = staging, set()
        known = self._sent | self._server.received(staging)
        files = [file for file in files_below(self._server.root / staging) if file not in known]
        self._deliver(targets, staging, files)
        self._sent.update(files)

    def _deliver(self, targets: Sequence[Address], staging: str, files: Sequence[str]) -> None:
        """Send *files* of the directory *staging*, in this order, to each target."""

        def send_all(target: Address) -> None:
            for file in files:
                name = f"{staging}/{file}"
                send_file(target, self._server.token, self._server.root, name, self._throttle)

        _on_each(targets, send_all)


def _on_each(targets: Iterable[Address], work: Callable[[Address], None]) -> None:
    with ThreadPoolExecutor(_NUM_THREADS, "send") as pool:
        # list() raises the first failure.
        list(pool.map(work, targets))
