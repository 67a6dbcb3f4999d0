"""Detect that another node stopped responding: it lost power, or its network failed.

A process that ends closes its connections, which the other ends notice. A node that is cut off closes nothing, and
ranks wait for it in a collective until the timeout of collectives. Therefore one rank of each node keeps a connection
to node 0 open, on which only the kernels' keep-alive probes are sent. The kernel answers also for a process that
computes, is stopped or swapped out, so that silence means that the node itself or the network failed.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

# A lost node is reported after 5 + 3 x 5 = 20 s: docs/guarantees.md promises that the run ends on
# every node within 30 s.
IDLE_SECONDS, PROBE_SECONDS, NUM_PROBES = 5, 3, 5
CONNECT_SECONDS = 5.0
NUMBER_BYTES = 16

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


def serve_connections(listener: socket.socket, lost: Lost) -> None:
    """Keep the connections of all other nodes open, on node 0. Runs until the process ends."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    ranks: dict[socket.socket, int] = {}
    while True:
        for key, _ in selector.select():
            line = key.fileobj
            assert isinstance(line, socket.socket)
            if line is listener:
                selector.register(_accepted(listener), selectors.EVENT_READ)
            elif not _read_event(line, ranks, lost):
                selector.unregister(line)
                line.close()


def keep_connection(address: tuple[str, int], rank: int, lost: Lost) -> None:
    """Keep a connection of *rank* to node 0 at *address* open until either process ends.

    Returns immediately if the address cannot be reached.
    """
    try:
        line = socket.create_connection(address, CONNECT_SECONDS)
    except OSError:
        return
    with line:
        _enable_probes(line)
        line.sendall(str(rank).encode())
        _read_event(line, {line: 0}, lost)


def _accepted(listener: socket.socket) -> socket.socket:
    line, _ = listener.accept()
    _enable_probes(line)
    return line


def _enable_probes(line: socket.socket) -> None:
    # With the timeout of create_connection, recv would raise an OSError after CONNECT_SECONDS, and
    # a silent but healthy node would be reported as lost.
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)


def _read_event(line: socket.socket, ranks: dict[socket.socket, int], lost: Lost) -> bool:
    """Read what the other end sent: its rank, or nothing if its process ended. Returns whether the connection is open.

    Other parts of the launcher report a process that ended. An error means that the node did not answer the probes.
    """
    try:
        received = line.recv(NUMBER_BYTES)
    except OSError:
        if line in ranks:
            lost(ranks[line], silent_seconds())
        return False
    # Any process can connect to this port: what is not a number is ignored.
    if received.isdigit():
        ranks[line] = int(received)
    return bool(received)
