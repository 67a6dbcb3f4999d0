"""The process of a node that serves its memory checkpoints to other nodes, and sends them copies.

The first rank of each node starts it, and gives it commands. It ends when that rank has ended. Another process than the
trainer's, so that copies do not contend with training for the GIL. Other nodes read files, send copies, and publish
checkpoints in it; ``requests.py`` has the protocol. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

from automodel_ckpt.base.durable_io import fsync_directories
from automodel_ckpt.base.python_child import CommandProcess, run_commands
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import open_safely, parse_json
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.memory.requests import (
    BLOCK_BYTES,
    MAX_LINE_BYTES,
    MAX_REPORT_BYTES,
    SILENCE_SECONDS,
    Address,
    HangReports,
    NodeFailed,
    command,
    is_report,
    send_file,
    send_report,
)
from automodel_ckpt.checkpoint.memory.save_files import (
    RECEIVING,
    files_below,
    is_of_save,
    mark_save,
)
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run import links
from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.checkpoint.store.transfer import Throttle
from automodel_ckpt.errors import AutomodelError

log = logging.getLogger("automodel_ckpt")

_DIGEST = re.compile(r"[0-9a-z:_-]{1,128}", re.ASCII)


class NodeServer(ThreadingTCPServer):
    """Serves the memory checkpoints in *root* to all that know *token*."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 512

    def __init__(self, root: Path, address: Address, token: str) -> None:
        """Listen at *address*; with port 0, at a free one. Raises OSError."""
        if ":" in address.host:
            self.address_family = socket.AF_INET6
        self.root, self.token = root, token
        self.hang_reports = HangReports(root, partial(send_report, token=token))
        self._received: dict[str, set[str]] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: anyone can connect and disconnect, such as a scan of the ports."""

    def note_received(self, staging: str, file: str) -> None:
        """Record that *file* in the directory *staging* is a copy that another node has sent."""
        with self._lock:
            self._received.setdefault(staging, set()).add(file)

    def received(self, staging: str) -> frozenset[str]:
        """The files in *staging* that other nodes have sent."""
        with self._lock:
            return frozenset(self._received.get(staging, ()))

    def publish(self, staging: str, name: str, digest: str) -> None:
        """Rename the directory *staging* to *name*.

        A directory of that name is removed if a failed save has written it, otherwise renamed. Raises ValueError for
        other names.
        """
        if not layout.is_staging(staging) or layout.parse_checkpoint_name(name) is None:
            raise ValueError(name)
        if not _DIGEST.fullmatch(digest):
            raise ValueError(digest)
        mark_save(self.root / staging, digest)
        # Their files were synchronized when they were written.
        fsync_directories(self.root / staging)
        if is_of_save(self.root / name):
            commit.discard(commit.withdraw(self.root / name))
        elif os.path.lexists(self.root / name):
            links.make_room(self.root / name)
        commit.publish(self.root / staging, name)
        with self._lock:
            # Failed saves are not published: their directories are gone.
            for other in list(self._received):
                if not (self.root / other).is_dir():
                    del self._received[other]

    def keep(self, names: Sequence[str]) -> None:
        """Remove all checkpoints except *names*, which are complete on all nodes. What no save has written stays.

        Raises ValueError for other names.
        """
        kept = {layout.parse_checkpoint_name(name) for name in names}
        if None in kept or not kept:
            raise ValueError(names)
        for other in checkpoint_names(self.root):
            if other not in kept and is_of_save(self.root / str(other)):
                commit.discard(commit.withdraw(self.root / str(other)))


class _Handler(StreamRequestHandler):
    timeout = SILENCE_SECONDS
    disable_nagle_algorithm = True
    server: NodeServer

    def handle(self) -> None:
        """Answer one request."""
        try:
            request = parse_json(self.rfile.readline(MAX_LINE_BYTES))
            given, expected = str(request.pop("token")), self.server.token
            if not hmac.compare_digest(given.encode(), expected.encode()):
                raise PermissionError("the token of another start")
            do = request.pop("do")
            if do == "read":
                self._read(**request)
                return
            if do == "write":
                self._write(**request)
            elif do == "publish":
                self.server.publish(**request)
            elif do == "keep":
                self.server.keep(**request)
            else:
                raise ValueError(do)
            self._answer()
        except FileNotFoundError as error:
            self._answer(missing=str(error))
        except (ValueError, TypeError, KeyError, AttributeError):
            self._answer(error="the request is not valid")
        except OSError as error:
            self._answer(error=error.strerror or str(error))

    def _answer(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(json.dumps(fields).encode() + b"\n")

    def _read(self, name: str, start: int, end: int) -> None:
        directory, file = _location(name)
        with os.fdopen(open_safely(self.server.root / directory, file), "rb") as opened:
            if not 0 <= start <= end <= os.fstat(opened.fileno()).st_size:
                raise OSError(f"the file does not have the bytes {start} to {end}")
            self._answer()
            # After a failure, fewer bytes arrive. An answer would be taken for bytes of the file.
            with contextlib.suppress(OSError):
                if end > start:
                    self.connection.sendfile(opened, start, end - start)

    def _write(self, name: str, nbytes: int) -> None:
        report = name.removeprefix(f"{layout.HANGS}/")
        if report != name:
            if not is_report(report) or not 0 <= nbytes <= MAX_REPORT_BYTES:
                raise ValueError(name)
            self._answer()
            self.server.hang_reports.receive(report, self._body(nbytes))
            return
        directory, file = _location(name)
        if not layout.is_staging(directory) or nbytes < 0:
            raise ValueError(name)
        staging = self.server.root / directory
        # Only this node's ranks create it: a copy that is late would otherwise bring back a failed save.
        if not staging.is_dir():
            raise FileNotFoundError(directory)
        target = staging / file
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{RECEIVING}{uuid.uuid4().hex}")
        try:
            with temporary.open("xb", buffering=0) as opened:
                self._answer()
                for start in range(0, nbytes, BLOCK_BYTES):
                    opened.write(self._body(min(BLOCK_BYTES, nbytes - start)))
            self.server.note_received(directory, file)
            os.rename(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _body(self, nbytes: int) -> bytes:
        data = self.rfile.read(nbytes)
        if len(data) < nbytes:
            raise ConnectionError("the connection ended")
        return data


def _location(name: str) -> tuple[str, str]:
    """The directory of a checkpoint, and the file in it, that *name* consists of. Raises ValueError for others."""
    directory, _, file = name.partition("/")
    if layout.unsafe_path(file) is not None:
        raise ValueError(name)
    if layout.parse_checkpoint_name(directory) is None and not layout.is_staging(directory):
        raise ValueError(name)
    return directory, file


# ---------------------------------------------------------------- process


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
