"""A proxy between a client and an object store on this machine, which breaks requests and replies on purpose.

It forwards one request of HTTP/1.1 per connection, so that a fault of one request breaks no other.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_BLOCK_BYTES = 64 << 10
_CODES = {429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}


@dataclass(frozen=True)
class Fault:
    """What happens to a request.

    *status*: the proxy answers with it, and the store does not see the request. *reset_request_after*,
    *reset_reply_after*: the connection is reset after so many bytes of the body; 0 of a reply: the store has carried
    out the request, and the client does not know. *delay*: seconds before the request is forwarded.
    """

    status: int | None = None
    reset_request_after: int | None = None
    reset_reply_after: int | None = None
    delay: float = 0.0


@dataclass(frozen=True)
class ProxyRequest:
    """A request as the rule of a proxy sees it. *number* counts all requests from 0."""

    number: int
    method: str
    target: str
    body_bytes: int


Rule = Callable[[ProxyRequest], Fault | None]


@dataclass
class FaultProxy:
    """Forwards requests to the server at *upstream*, ``http://HOST:PORT``. Attributes can be changed at any time.

    *rule* returns the fault of a request, or None. *is_down*: connections are reset when they are opened.
    *bytes_per_second* limits each direction of a connection. :meth:`freeze_lists` makes listings stale. *requests* are
    all requests, and *answered* those whose whole reply of the store was forwarded.
    """

    upstream: str
    rule: Rule | None = None
    is_down: bool = False
    bytes_per_second: float | None = None
    requests: list[ProxyRequest] = field(default_factory=list)
    answered: list[ProxyRequest] = field(default_factory=list)
    endpoint: str = ""

    def __post_init__(self) -> None:
        self._lists: dict[str, bytes] = {}
        self._is_frozen = False
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._loop = asyncio.new_event_loop()
        started: threading.Event = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(30)

    def freeze_lists(self, is_frozen: bool = True) -> None:
        """Answer listings as they were when they were last requested before; empty where there was no request."""
        self._is_frozen = is_frozen

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The loop has only weak references.
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            if self.is_down:
                _reset(writer)
                return
            await self._exchange(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # The client ended the connection, or was killed.
            pass
        finally:
            self._tasks.discard(task)
            await _close(writer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        headers = [
            line for line in lines if not line.lower().startswith(("connection:", "expect:"))
        ]
        length = 0
        for line in headers:
            if line.lower().startswith("content-length:"):
                length = int(line.partition(":")[2])
        if len(headers) < len(lines) and "\r\nexpect:" in head.lower():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request = ProxyRequest(len(self.requests), method, target, length)
        self.requests.append(request)
        fault = (self.rule(request) if self.rule is not None else None) or Fault()
        await asyncio.sleep(fault.delay)
        if fault.status is not None:
            await reader.readexactly(length)
            await _reply(writer, fault.status)
            return
        is_list = method == "GET" and "list-type=2" in target
        if is_list and self._is_frozen:
            writer.write(self._lists.get(_list_key(target), _EMPTY_LIST))
            await writer.drain()
            return
        host = urlsplit(self.upstream)
        there, store = await asyncio.open_connection(host.hostname, host.port)
        try:
            text = "\r\n".join([first, *headers, "Connection: close"])
            store.write(f"{text}\r\n\r\n".encode("latin-1"))
            if not await self._relay(reader, store, length, fault.reset_request_after):
                _reset(writer)
                return
            if is_list:
                self._lists[_list_key(target)] = reply = await there.read(-1)
                writer.write(reply)
                await writer.drain()
            elif fault.reset_reply_after is None:
                await self._relay(there, writer, None, None)
                self.answered.append(request)
            else:
                await self._cut_reply(there, writer, fault.reset_reply_after)
        finally:
            await _close(store)

    async def _cut_reply(
        self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, after: int
    ) -> None:
        head = await there.readuntil(b"\r\n\r\n")
        body = await there.read(-1)
        if after:
            writer.write(head + body[:after])
            await writer.drain()
            # The client must see what was sent before.
            await asyncio.sleep(0.05)
        _reset(writer)

    async def _relay(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        nbytes: int | None,
        reset_after: int | None,
    ) -> bool:
        """Forward *nbytes* (None: all) from *source*. Return False once *reset_after* bytes are forwarded."""
        count = 0
        while nbytes is None or count < nbytes:
            if reset_after is not None and count >= reset_after:
                return False
            wanted = _BLOCK_BYTES if nbytes is None else min(_BLOCK_BYTES, nbytes - count)
            block = await source.read(wanted)
            if not block:
                break
            count += len(block)
            target.write(block)
            await target.drain()
            if self.bytes_per_second is not None:
                await asyncio.sleep(len(block) / self.bytes_per_second)
        return reset_after is None


_EMPTY_BODY = (
    b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"></ListBucketResult>'
)
_EMPTY_LIST = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
    % (len(_EMPTY_BODY), _EMPTY_BODY)
)


def _list_key(target: str) -> str:
    """The path and query of a listing, without the order of the parameters."""
    path, _, query = target.partition("?")
    return f"{path}?{'&'.join(sorted(query.split('&')))}"


async def _reply(writer: asyncio.StreamWriter, status: int) -> None:
    code = _CODES.get(status, "Error")
    body = f"<Error><Code>{code}</Code><Message>a fault on purpose</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nConnection: close\r\nContent-Type: application/xml\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST, as a crashed host does, and not with FIN."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    proxy = FaultProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()
