"""An S3 server that discards what it receives, so that a measurement of uploads measures the client.

It answers the requests that :mod:`automodel_ckpt.checkpoint.remote` and s3fs send in an upload. Only small objects can
be read again. No signature is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from urllib.parse import parse_qs, unquote, urlsplit

_KEPT_BYTES = 1 << 20
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class _Sink(asyncio.Protocol):
    """One connection. Bodies are counted; those of small objects are kept in *objects* (key -> size, content).

    *parts* are the bytes of unfinished uploads, *numbers* make ETags.
    """

    def __init__(
        self, objects: dict[str, tuple[int, bytes]], parts: dict[str, int], numbers: Iterator[int]
    ) -> None:
        self._objects, self._numbers = objects, numbers
        self._parts = parts
        self._head = b""
        self._left: int | None = None
        self._body = bytearray()
        self._size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._left is None:
                self._head += bytes(view)
                head, end, rest = self._head.partition(b"\r\n\r\n")
                if not end:
                    return
                self._begin(head.decode("latin-1"))
                view = memoryview(rest)
                # A request without a body was answered.
                continue
            assert self._left is not None
            taken = view[: self._left]
            if self._size <= _KEPT_BYTES:
                self._body += taken
            self._left -= len(taken)
            view = view[len(taken) :]
            if self._left == 0:
                self._answer()

    def _begin(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        self._method, self._target, _ = first.split(" ")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        self._head = b""
        self._body.clear()
        self._size = self._left = int(headers.get("content-length", 0))
        self._is_exclusive = headers.get("if-none-match") == "*"
        self._match = headers.get("if-match")
        if "expect" in headers:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._left == 0:
            self._answer()

    def _answer(self) -> None:
        self._left = None
        url = urlsplit(self._target)
        key = unquote(url.path)
        query = parse_qs(url.query, keep_blank_values=True)
        status, body, headers = self._reply(key, query)
        length = headers.pop("Content-Length", str(len(body)))
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        text = "\r\n".join(lines)
        self._transport.write(f"{text}\r\n\r\n".encode() + body)

    def _reply(self, key: str, query: dict[str, list[str]]) -> tuple[int, bytes, dict[str, str]]:
        found = self._objects.get(key)
        etag = {"ETag": f'"{next(self._numbers)}"'}
        if self._method == "POST" and "uploads" in query:
            xml = f"<InitiateMultipartUploadResult {_NAMESPACE}><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            return 200, xml.encode(), {}
        if "partNumber" in query:
            self._parts[key] = self._parts.get(key, 0) + self._size
            return 200, b"", etag
        if self._method in ("PUT", "POST"):
            if (self._is_exclusive and found is not None) or self._match == "1":
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
            if self._method == "POST":
                self._size = self._parts.pop(key, 0)
            self._objects[key] = self._size, bytes(self._body)
            xml = f"<CompleteMultipartUploadResult {_NAMESPACE}></CompleteMultipartUploadResult>"
            return 200, xml.encode() if self._method == "POST" else b"", etag
        if self._method == "DELETE":
            self._objects.pop(key, None)
            return 204, b"", {}
        if "list-type" in query:
            return 200, f"<ListBucketResult {_NAMESPACE}></ListBucketResult>".encode(), {}
        if "uploads" in query:
            xml = f"<ListMultipartUploadsResult {_NAMESPACE}></ListMultipartUploadsResult>"
            return 200, xml.encode(), {}
        if found is None:
            return (
                404,
                b"" if self._method == "HEAD" else b"<Error><Code>NoSuchKey</Code></Error>",
                {},
            )
        size, content = found
        return (
            200,
            b"" if self._method == "HEAD" else content,
            {"Content-Length": str(size), "ETag": '"0"'},
        )


async def _serve(connection: Connection) -> None:
    objects: dict[str, tuple[int, bytes]] = {}
    parts: dict[str, int] = {}
    numbers = itertools.count(2)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Sink(objects, parts, numbers), "127.0.0.1", 0)
    connection.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _main(connection: Connection, niceness: int) -> None:
    os.nice(niceness)
    asyncio.run(_serve(connection))


@contextlib.contextmanager
def s3_sink(niceness: int = 0) -> Iterator[dict[str, str]]:
    """Run a sink in a process; yield the environment of its clients."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, niceness), daemon=True)
    process.start()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ours.recv()}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        process.terminate()
        process.join()
