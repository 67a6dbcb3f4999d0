"""Requests to the processes of other nodes, which serve the memory checkpoints there (``node_process.py``).

A request is a line of JSON: what to ``do``, with its arguments and the token of the run's start, which only its ranks
know. The answer is a line of JSON, too: empty, or why the request failed. The bytes of a file follow the answer to
``read``. To ``write`` a file, they follow an answer, and are answered again.

When a step hangs, the ranks exchange their states through files in the run directory
(:mod:`automodel_ckpt.parallel.ranks.hangs`). Each node sends these reports to all others: the processes copy them,
since ranks may be suspended or hold the GIL. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import parse_json, read_safely
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.store.transfer import Throttle
from automodel_ckpt.errors import EXIT_INTERNAL, SaveFailed

SILENCE_SECONDS = 60.0
"""A node that neither takes nor sends a byte for so long has failed."""
MAX_LINE_BYTES = 64 << 10
NETWORK_HINT = "check the network between the nodes"
BLOCK_BYTES = 1 << 20
_READY_SECONDS = 60.0
"""How long a node may take to create the directory of a save that another one has already written."""
_LISTEN_SECONDS = 15.0
"""How long the process of another node may take to start again."""
_CONNECT_SECONDS = 5.0
_REPORT_SECONDS = 5.0
"""How long another node may take to accept a report on a hang. It is sent again."""
_PAUSE_SECONDS = 0.02


class Address(NamedTuple):
    """Where the process of a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class NodeFailed(SaveFailed):
    """A node did not do what it was asked for.

    If this ends a start, which reads from the memory of other nodes, another restart may succeed without that node.
    """

    exit_code = EXIT_INTERNAL


def listens(address: Address) -> bool:
    """Whether the process of a node accepts connections."""
    with suppress(OSError), socket.create_connection(address, _CONNECT_SECONDS):
        return True
    return False


def read_range(address: Address, token: str, name: str, start: int, end: int) -> bytes:
    """Read bytes *start* to before *end* of the file *name* (DIRECTORY/FILE) in the memory of a node.

    Raises FileNotFoundError if the node does not have it, :class:`NodeFailed` if the node does not answer.
    """
    document = {"do": "read", "name": name, "start": start, "end": end}
    return _request(address, token, document, reads=end - start)


def send_file(address: Address, token: str, root: Path, name: str, throttle: Throttle) -> None:
    """Send the file *name* (STAGING/FILE) below *root* to the same place in the memory of another node.

    Waits for a while if the node has no such staging directory yet. Raises :class:`NodeFailed` and OSError.
    """
    end = time.monotonic() + _READY_SECONDS
    with (root / name).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        document = {"do": "write", "name": name, "nbytes": size}

        def send() -> None:
            _request(address, token, document, _blocks(file.fileno(), size, throttle))

        while True:
            try:
                _when_listening(send)
                return
            except FileNotFoundError as error:
                if time.monotonic() > end:
                    raise _refused(address, document, str(error)) from error
            time.sleep(_PAUSE_SECONDS)


def send_report(address: Address, file: str, data: bytes, *, token: str) -> None:
    """Send a report on a hang to the directory of another node, once. Raises :class:`NodeFailed`."""
    document = {"do": "write", "name": f"{layout.HANGS}/{file}", "nbytes": len(data)}
    _request(address, token, document, iter([data]), timeout_seconds=_REPORT_SECONDS)


def command(address: Address, token: str, document: ValueDict) -> None:
    """Have another node change names in its memory, as *document* describes. Raises :class:`NodeFailed`."""
    _when_listening(lambda: _request(address, token, document))


def _when_listening(send: Callable[[], object]) -> None:
    """Call *send* until the node listens: its process is started again if it was killed."""
    end = time.monotonic() + _LISTEN_SECONDS
    while True:
        try:
            send()
            return
        except NodeFailed as failure:
            is_refused = isinstance(failure.__cause__, ConnectionRefusedError)
            if not is_refused or time.monotonic() > end:
                raise
        time.sleep(_PAUSE_SECONDS)


def _request(
    address: Address,
    token: str,
    document: ValueDict,
    blocks: Iterator[bytes] | None = None,
    *,
    reads: int = 0,
    timeout_seconds: float = SILENCE_SECONDS,
) -> bytes:
    """Send a request, and then *blocks*. Returns the *reads* bytes that follow the answer.

    Raises FileNotFoundError for what the node does not have, and :class:`NodeFailed`.
    """
    try:
        with socket.create_connection(address, timeout_seconds) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answers = connection.makefile("rb")
            line = json.dumps({**document, "token": token}).encode() + b"\n"
            connection.sendall(line)
            _check(address, document, answers)
            if blocks is not None:
                # Raised if the node fails before all has arrived. Its answer says why.
                with suppress(BrokenPipeError, ConnectionResetError):
                    for block in blocks:
                        connection.sendall(block)
                _check(address, document, answers)
            data = answers.read(reads)
            if len(data) < reads:
                raise EOFError("the connection ended")
            return data
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise NodeFailed(
            "another node of the run does not answer; a firewall may block the port",
            where=address,
            value=str(error) or type(error).__name__,
            hint=NETWORK_HINT,
        ) from error


def _check(address: Address, document: ValueDict, answers: BinaryIO) -> None:
    """Read an answer. Raises FileNotFoundError and :class:`NodeFailed` as it says, EOFError without one."""
    line = answers.readline(MAX_LINE_BYTES)
    if not line:
        raise EOFError("the connection ended")
    answer = parse_json(line)
    if "missing" in answer:
        raise FileNotFoundError(f"{address}/{answer['missing']}")
    if "error" in answer:
        raise _refused(address, document, answer["error"])


def _blocks(descriptor: int, size: int, throttle: Throttle) -> Iterator[bytes]:
    for start in range(0, size, BLOCK_BYTES):
        block = os.pread(descriptor, min(BLOCK_BYTES, size - start), start)
        throttle.take(len(block))
        yield block


def _refused(address: Address, document: ValueDict, why: str) -> NodeFailed:
    return NodeFailed(
        "another node of the run could not store its part of a checkpoint",
        where=address,
        value=f"{document}: {why}",
        hint="check the free space there (checkpoint.memory.directory, or checkpoint.scratch_dir of a run at a URL)",
    )


# ---------------------------------------------------------------- reports on hangs


ARRIVAL_SECONDS = 1.0
"""How long a report usually takes, at most, until it is on all nodes that respond."""
MAX_REPORT_BYTES = 4 << 20
"""The largest file that is sent."""
_POLL_SECONDS = 0.25
_NUM_THREADS = 16
_FILE = re.compile(
    r"step_[0-9]{1,18}/(rank_[0-9]{1,9}|stacks_of_rank_[0-9]{1,9}|report)\.txt", re.ASCII
)

Stamp = tuple[int, int]
"""The inode of a file, and the time of its last change in nanoseconds."""
Stamps = Mapping[str, Stamp]
"""By the path of a file relative to the directory of all reports."""


def is_report(file: str) -> bool:
    """Whether *file* is the path of a report, relative to the directory of all reports."""
    return _FILE.fullmatch(file) is not None


class HangReports:
    """The reports in the directory of one node, which are sent to other nodes in a thread.

    *send* sends the content of a report to a node, and raises :class:`~.requests.NodeFailed`. Several threads use it.
    """

    def __init__(self, run: Path, send: Callable[[Address, str, bytes], None]) -> None:
        """*run* is the run directory of the node. What it has now is of earlier starts."""
        self.root = run / layout.HANGS
        self._send = send
        self._lock = threading.Lock()
        self._of_others = self._stamps()
        """Files that are not sent: files of earlier starts, and files that other nodes have sent."""
        self._targets: Sequence[Address] = ()
        self._sent: dict[Address, dict[str, Stamp]] = {}
        self._sending: dict[Address, Future[None]] = {}
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "reports")
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)

    def receive(self, file: str, data: bytes) -> None:
        """Write a report of another node. Raises OSError."""
        directory = (self.root / file).parent
        # Before the directory is created, which would follow a link of its parent.
        if self.root.is_symlink() or directory.is_symlink():
            raise NotADirectoryError(f"{directory} is a symbolic link")
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".{uuid.uuid4().hex}"
        # Otherwise, the thread could take it for a report of this node, and send it back.
        with self._lock:
            try:
                temporary.write_bytes(data)
                os.rename(temporary, self.root / file)
            finally:
                temporary.unlink(missing_ok=True)
            self._of_others[file] = _stamp((self.root / file).stat())

    def start(self, targets: Sequence[Address]) -> None:
        """Send reports to *targets* from now on."""
        self._targets = targets
        if not self._thread.is_alive():
            self._thread.start()

    def _run(self) -> None:
        while True:
            # It may be unable to read them now.
            with contextlib.suppress(OSError):
                self._begin_to_send()
            time.sleep(_POLL_SECONDS)

    def _begin_to_send(self) -> None:
        """Send what was not sent yet. A node that does not respond does not delay others. Raises OSError."""
        with self._lock:
            written = _without(self._stamps(), self._of_others)
        for target in self._targets:
            sending = self._sending.get(target)
            new = _without(written, self._sent.setdefault(target, {}))
            if new and (sending is None or sending.done()):
                self._sending[target] = self._pool.submit(self._send_all, target, new)

    def _send_all(self, target: Address, files: Stamps) -> None:
        """Send *files* to *target*. What fails is sent again."""
        with contextlib.suppress(NodeFailed):
            for file, stamp in files.items():
                with contextlib.suppress(OSError):
                    self._send(target, file, read_safely(self.root, file, limit=MAX_REPORT_BYTES))
                self._sent[target][file] = stamp

    def _stamps(self) -> dict[str, Stamp]:
        found = {}
        for path in self.root.glob("step_*/*.txt"):
            file = f"{path.parent.name}/{path.name}"
            if is_report(file):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    found[file] = _stamp(path.lstat())
        return found


def _without(files: Stamps, known: Stamps) -> Stamps:
    """The *files* that are not among the *known* ones, or have changed since."""
    return {file: stamp for file, stamp in files.items() if known.get(file) != stamp}


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_mtime_ns
