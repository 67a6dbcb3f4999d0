"""Detect that another node stopped responding: it lost power, or its network failed.

A process that ends closes its connections, which the other ends notice. A node that is cut off closes nothing, and
ranks wait for it in a collective until the timeout of collectives. Therefore one rank of each node keeps a connection
to node 0 open, on which only the kernels' keep-alive probes are sent. The kernel answers also for a process that
computes, is stopped or swapped out, so that silence means that the node itself or the network failed.

Any process may connect to the port. Only a connection whose other end knows the token of this start counts.
"""

from __future__ import annotations

import hmac
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass

# A lost node is reported after 5 + 3 x 5 = 20 s: docs/guarantees.md promises that the run ends on
# every node within 30 s.
IDLE_SECONDS, PROBE_SECONDS, NUM_PROBES = 5, 3, 5
CONNECT_SECONDS = 5.0
_MAX_BYTES = 256
_MAX_UNKNOWN = 1024
"""How many connections without the token may be open: they must not use up the file descriptors of a rank."""

Lost = Callable[[int, float], None]
"""Called with the rank at the other end and the number of seconds that its node did not answer."""


def silent_seconds() -> int:
    """Return after how many seconds without an answer a node is reported."""
    return IDLE_SECONDS + PROBE_SECONDS * NUM_PROBES


def listen() -> socket.socket:
    """Open a socket for :func:`serve_connections`, on a free port of all addresses of this node."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def serve_connections(listener: socket.socket, token: str, lost: Lost) -> None:
    """Keep the connections of all other nodes, which know *token*, open on node 0. Runs until the process ends."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    unknown: dict[_Line, None] = {}

    def close(line: _Line) -> None:
        selector.unregister(line.socket)
        line.socket.close()
        unknown.pop(line, None)

    while True:
        for key, _ in selector.select():
            line = key.data
            if line is None:
                line = _accepted(listener)
                if line is not None:
                    selector.register(line.socket, selectors.EVENT_READ, line)
                    unknown[line] = None
            elif not line.read(token, lost):
                close(line)
            elif line.rank is not None:
                unknown.pop(line, None)
        # After the events, which may belong to these lines.
        while len(unknown) > _MAX_UNKNOWN:
            close(next(iter(unknown)))


def keep_connection(address: tuple[str, int], token: str, rank: int, lost: Lost) -> None:
    """Keep a connection of *rank* to node 0 at *address* open until either process ends.

    Returns immediately if the address cannot be reached.
    """
    try:
        line = socket.create_connection(address, CONNECT_SECONDS)
    except OSError:
        return
    with line:
        _enable_probes(line)
        try:
            line.sendall(f"{token} {rank}\n".encode())
            while line.recv(_MAX_BYTES):
                continue
        except OSError:
            lost(0, silent_seconds())


@dataclass(eq=False, slots=True)
class _Line:
    """A connection to node 0. *rank* is that of the other end, None until it has sent the token."""

    socket: socket.socket
    rank: int | None = None
    received: bytes = b""

    def read(self, token: str, lost: Lost) -> bool:
        """Read what the other end sent. Returns False if the connection is to be closed.

        It ends without an error if the process ended, which other parts of the launcher report. An error means that the
        node did not answer the probes.
        """
        try:
            data = self.socket.recv(_MAX_BYTES)
        except OSError:
            if self.rank is not None:
                lost(self.rank, silent_seconds())
            return False
        if self.rank is None:
            self.received += data
            if self.received.endswith(b"\n"):
                self.rank = _rank_in(self.received, token)
                return self.rank is not None
        return bool(data) and len(self.received) < _MAX_BYTES


def _rank_in(message: bytes, token: str) -> int | None:
    """Return the rank that a message with the right token has; None for other messages."""
    sent, _, rank = message.rstrip(b"\n").partition(b" ")
    is_right = hmac.compare_digest(sent, token.encode()) and rank.isdigit()
    return int(rank) if is_right else None


def _accepted(listener: socket.socket) -> _Line | None:
    """Accept a connection; None if its other end is gone already."""
    try:
        line, _ = listener.accept()
        _enable_probes(line)
    except OSError:
        return None
    return _Line(line)


def _enable_probes(line: socket.socket) -> None:
    # With the timeout of create_connection, recv would raise an OSError after CONNECT_SECONDS, and
    # a silent but healthy node would be reported as lost.
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)
