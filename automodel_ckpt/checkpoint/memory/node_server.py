"""The server of a node's memory checkpoints: other nodes read files, send copies, and publish checkpoints here.

It runs in a separate process (``node_process.py``), so that it neither delays nor blocks training. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import socket
import threading
import uuid
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from automodel_ckpt.base.durable_io import fsync_directories
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.checkpoint.memory.hang_reports import MAX_BYTES as MAX_REPORT_BYTES
from automodel_ckpt.checkpoint.memory.hang_reports import HangReports, is_report
from automodel_ckpt.checkpoint.memory.requests import SILENCE_SECONDS, Address, send_report
from automodel_ckpt.checkpoint.memory.save_files import (
    RECEIVING,
    is_of_save,
    mark_save,
)
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.run import links
from automodel_ckpt.checkpoint.run.resume import checkpoint_names

_MAX_COMMAND_BYTES = 64 << 10
_BLOCK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})", re.ASCII)
_LENGTH = re.compile(r"[0-9]{1,18}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-z:_-]{1,128}", re.ASCII)


class Refused(Exception):
    """A request that is not served, with the *status* of its answer."""

    def __init__(self, status: HTTPStatus, text: str = "") -> None:
        super().__init__(text or status.phrase)
        self.status = status


class NodeServer(ThreadingHTTPServer):
    """Serves the memory checkpoints in *root* to all that know *token*."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, root: Path, address: Address, token: str) -> None:
        """Listen at *address*; with port 0, at a free one. Raises OSError."""
        if ":" in address.host:
            self.address_family = socket.AF_INET6
        self.root, self.token = root, token

        def send(target: Address, file: str, data: bytes) -> None:
            send_report(target, token, file, data)

        self.hang_reports = HangReports(root, send)
        self._received: dict[str, set[str]] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's method, which looks up the name of this host: a name server may take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing, as ``log_message``: anyone can connect and disconnect, such as a scan of the ports."""

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

        A directory of that name is removed if a failed save has written it, otherwise renamed.
        """
        if not layout.is_staging(staging) or layout.parse_checkpoint_name(name) is None:
            raise Refused(HTTPStatus.BAD_REQUEST)
        if not _DIGEST.fullmatch(digest):
            raise Refused(HTTPStatus.BAD_REQUEST)
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

    def keep(self, names: list[str]) -> None:
        """Remove all checkpoints except *names*, which are complete on all nodes. What no save has written stays."""
        kept = {layout.parse_checkpoint_name(name) for name in names}
        if None in kept or not kept:
            raise Refused(HTTPStatus.BAD_REQUEST)
        for other in checkpoint_names(self.root):
            if other not in kept and is_of_save(self.root / str(other)):
                commit.discard(commit.withdraw(self.root / str(other)))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SILENCE_SECONDS
    server: NodeServer

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal belongs to the run."""

    def _answer(self) -> None:
        # The body of a request that is refused was not read, so the connection cannot be used again.
        try:
            expected = f"Bearer {self.server.token}".encode()
            given = self.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, expected):
                raise Refused(HTTPStatus.FORBIDDEN)
            if self.command == "GET":
                self._send_range()
            elif self.command == "PUT":
                self._receive()
            else:
                self._run_command()
        except Refused as refused:
            self._refuse(refused.status, str(refused))
        except FileNotFoundError as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error))
        except TimeoutError:
            self.close_connection = True
        except OSError as error:
            self._refuse(HTTPStatus.INSUFFICIENT_STORAGE, error.strerror or str(error))

    do_GET = do_PUT = do_POST = _answer  # noqa: N815 (the names that the base class calls)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self.close_connection = True
        body = text.encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

    def _location(self) -> tuple[str, str]:
        """The directory and the file in it that the request names."""
        directory, _, file = unquote(self.path.removeprefix("/")).partition("/")
        if layout.unsafe_path(file) is not None:
            raise Refused(HTTPStatus.BAD_REQUEST)
        if layout.parse_checkpoint_name(directory) is None and not layout.is_staging(directory):
            raise Refused(HTTPStatus.BAD_REQUEST)
        return directory, file

    def _length(self, most: int | None = None) -> int:
        text = self.headers.get("Content-Length", "")
        if not _LENGTH.fullmatch(text) or (most is not None and int(text) > most):
            raise Refused(HTTPStatus.BAD_REQUEST)
        return int(text)

    def _send_range(self) -> None:
        directory, file = self._location()
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted is None:
            raise Refused(HTTPStatus.BAD_REQUEST)
        start, end = int(wanted[1]), int(wanted[2]) + 1
        with os.fdopen(open_safely(self.server.root / directory, file), "rb") as opened:
            if not start < end <= os.fstat(opened.fileno()).st_size:
                raise Refused(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            self.wfile.flush()
            self.connection.sendfile(opened, start, end - start)

    def _receive(self) -> None:
        reports = f"/{layout.HANGS}/"
        if self.path.startswith(reports):
            self._receive_report(self.path.removeprefix(reports))
            return
        directory, file = self._location()
        if not layout.is_staging(directory):
            raise Refused(HTTPStatus.BAD_REQUEST)
        staging = self.server.root / directory
        # Only this node's ranks create it: a copy that is late would otherwise bring back a failed save.
        if not staging.is_dir():
            raise FileNotFoundError(directory)
        target = staging / file
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{RECEIVING}{uuid.uuid4().hex}")
        try:
            self._write_body(temporary, self._length())
            self.server.note_received(directory, file)
            os.rename(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._confirm()

    def _receive_report(self, file: str) -> None:
        if not is_report(file):
            raise Refused(HTTPStatus.BAD_REQUEST)
        length = self._length(MAX_REPORT_BYTES)
        data = self.rfile.read(length)
        if len(data) < length:
            raise Refused(HTTPStatus.BAD_REQUEST, "the connection ended")
        self.server.hang_reports.receive(file, data)
        self._confirm()

    def _confirm(self) -> None:
        self.send_response(HTTPStatus.CREATED)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _write_body(self, path: Path, nbytes: int) -> None:
        with path.open("xb", buffering=0) as file:
            while nbytes > 0:
                block = self.rfile.read(min(nbytes, _BLOCK_BYTES))
                if not block:
                    raise Refused(HTTPStatus.BAD_REQUEST, "the connection ended")
                file.write(block)
                nbytes -= len(block)

    def _run_command(self) -> None:
        try:
            document = parse_json(self.rfile.read(self._length(_MAX_COMMAND_BYTES)))
            do = document.pop("do")
            if do == "publish":
                self.server.publish(**document)
            elif do == "keep":
                self.server.keep(**document)
            else:
                raise Refused(HTTPStatus.BAD_REQUEST)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise Refused(HTTPStatus.BAD_REQUEST) from None
        self.send_response(HTTPStatus.NO_CONTENT)
        self.end_headers()
