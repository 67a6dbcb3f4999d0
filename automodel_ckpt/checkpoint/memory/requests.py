"""Requests to the processes of other nodes, which serve the memory checkpoints there (``node_process.py``).

The protocol is HTTP: ``GET /DIRECTORY/FILE`` with a byte range, ``PUT /STAGING/FILE`` and ``PUT /hangs/FILE``, and
``POST /`` with a JSON document for changes of names. Every request has the token of the run's start, which only its
ranks know. Imports no torch.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.store.transfer import Throttle
from automodel_ckpt.errors import EXIT_INTERNAL, SaveFailed

SILENCE_SECONDS = 60.0
"""A node that neither takes nor sends a byte for so long has failed."""
_READY_SECONDS = 60.0
"""How long a node may take to create the directory of a save that another one has already written."""
_LISTEN_SECONDS = 15.0
"""How long the process of another node may take to start again."""
_CONNECT_SECONDS = 5.0
_REPORT_SECONDS = 5.0
"""How long another node may take to accept a report on a hang. It is sent again."""
_PAUSE_SECONDS = 0.02
_BLOCK_BYTES = 1 << 20
_MAX_TEXT_BYTES = 4096


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
    if start == end:
        return b""
    headers = {"Range": f"bytes={start}-{end - 1}"}
    status, data = _request(address, token, "GET", f"/{quote(name)}", headers=headers)
    if status == HTTPStatus.NOT_FOUND:
        raise FileNotFoundError(f"{address}/{name}")
    _check(address, f"reading {name}", status, data)
    return data


def send_file(address: Address, token: str, root: Path, name: str, throttle: Throttle) -> None:
    """Send the file *name* (STAGING/FILE) below *root* to the same place in the memory of another node.

    Waits for a while if the node has no such staging directory yet. Raises :class:`NodeFailed` and OSError.
    """

    def send() -> tuple[int, bytes]:
        with (root / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            headers = {"Content-Length": str(size)}
            body = _blocks(file.fileno(), size, throttle)
            return _request(address, token, "PUT", f"/{quote(name)}", body, headers)

    end = time.monotonic() + _READY_SECONDS
    status, data = _when_listening(send)
    while status == HTTPStatus.NOT_FOUND and time.monotonic() <= end:
        time.sleep(_PAUSE_SECONDS)
        status, data = _when_listening(send)
    _check(address, f"sending {name}", status, data)


def send_report(address: Address, token: str, file: str, data: bytes) -> None:
    """Send a report on a hang to the directory of another node, once. Raises :class:`NodeFailed`."""
    path = f"/{layout.HANGS}/{quote(file)}"
    answer = _request(address, token, "PUT", path, data, timeout_seconds=_REPORT_SECONDS)
    _check(address, f"sending {file}", *answer)


def command(address: Address, token: str, document: dict[str, Any]) -> None:
    """Have another node change names in its memory, as *document* describes. Raises :class:`NodeFailed`."""
    body = json.dumps(document).encode()
    answer = _when_listening(lambda: _request(address, token, "POST", "/", body))
    _check(address, str(document), *answer)


def _when_listening(send: Callable[[], tuple[int, bytes]]) -> tuple[int, bytes]:
    """Call *send* until the node listens: its process is started again if it was killed."""
    end = time.monotonic() + _LISTEN_SECONDS
    while True:
        try:
            return send()
        except NodeFailed as failure:
            is_refused = isinstance(failure.__cause__, ConnectionRefusedError)
            if not is_refused or time.monotonic() > end:
                raise
        time.sleep(_PAUSE_SECONDS)


def _request(
    address: Address,
    token: str,
    method: str,
    path: str,
    body: bytes | Iterator[bytes] | None = None,
    headers: dict[str, str] | None = None,
    timeout_seconds: float = SILENCE_SECONDS,
) -> tuple[int, bytes]:
    """Send a request; return the status and the content of the answer."""
    connection = http.client.HTTPConnection(*address, timeout=timeout_seconds)
    with closing(connection):
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            authorized = {"Authorization": f"Bearer {token}", **(headers or {})}
            # Raised if the node has refused the request before it was sent completely. The answer says why.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, path, body, authorized)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NodeFailed(
                "another node of the run does not answer",
                where=str(address),
                value=str(error) or type(error).__name__,
                hint="check the network between the nodes, and whether a firewall blocks the port",
            ) from error


def _blocks(descriptor: int, size: int, throttle: Throttle) -> Iterator[bytes]:
    for start in range(0, size, _BLOCK_BYTES):
        block = os.pread(descriptor, min(_BLOCK_BYTES, size - start), start)
        throttle.take(len(block))
        yield block


def _check(address: Address, doing: str, status: int, data: bytes) -> None:
    """Raise :class:`NodeFailed` if the *status* of an answer is not a success."""
    if status < HTTPStatus.MULTIPLE_CHOICES:
        return
    text = data[:_MAX_TEXT_BYTES].decode(errors="replace").strip()
    raise NodeFailed(
        "another node of the run could not store its part of a checkpoint",
        where=str(address),
        value=f"{doing}: {text or HTTPStatus(status).phrase}",
        hint="check the free space there (checkpoint.memory.directory, or checkpoint.scratch_dir of a run at a URL)",
    )
