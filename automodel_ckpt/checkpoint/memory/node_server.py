"""The server of a node's memory checkpoints: other nodes read files, send copies, and publish checkpoints here.

It runs in a separate process (``node_process.py``), so that it neither delays nor blocks training. ``requests.py`` has
the protocol. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import socket
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

from automodel_ckpt.base.durable_io import fsync_directories
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.checkpoint.memory.hang_reports import MAX_BYTES as MAX_REPORT_BYTES
from automodel_ckpt.checkpoint.memory.hang_reports import HangReports, is_report
from automodel_ckpt.checkpoint.memory.requests import (
    BLOCK_BYTES,
    MAX_LINE_BYTES,
    SILENCE_SECONDS,
    Address,
    send_report,
)
from automodel_ckpt.checkpoint.memory.save_files import RECEIVING, is_of_save, mark_save
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.run import links
from automodel_ckpt.checkpoint.run.resume import checkpoint_names

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

        def send(target: Address, file: str, data: bytes) -> None:
            send_report(target, token, file, data)

        self.hang_reports = HangReports(root, send)
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
