"""Notices that another machine is gone without a word: its power, its network, the cable between.

A process that ends closes its connections, and the other ends see it. A machine that is cut off closes nothing, and
ranks wait for it in a collective as long as one may take. So a rank of each machine holds a connection to one of
machine 0 on which nothing is sent but the kernels' keep-alive probes. A kernel answers for a process that computes, is
stopped or swapped out: only the machine itself, or the way to it, can be silent.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

IDLE_SECONDS, PROBE_SECONDS, NUM_PROBES = 5, 3, 5
CONNECT_SECONDS = 5.0
NUMBER_BYTES = 16

Lost = Callable[[int, float], None]
"""Called with the rank at the other end and the seconds that its machine did not answer."""


def silent_seconds() -> int:
    """After so long a silence a machine is lost."""
    return IDLE_SECONDS + PROBE_SECONDS * NUM_PROBES


def listen() -> socket.socket:
    """A socket for :func:`hold_all`, on a free port of all of this machine's addresses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def hold_all(listener: socket.socket, lost: Lost) -> None:
    """Machine 0's end: hold the connections of all others, for ever."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    ranks: dict[socket.socket, int] = {}
    while True:
        for key, _ in selector.select():
            line = key.fileobj
            assert isinstance(line, socket.socket)
            if line is listener:
                selector.register(_accepted(listener), selectors.EVENT_READ)
            elif not _is_held(line, ranks, lost):
                selector.unregister(line)
                line.close()


def hold(address: tuple[str, int], rank: int, lost: Lost) -> None:
    """The other machines' end, that of *rank*: hold a connection to *address* until either process ends. Does nothing
    where there is no way there."""
    try:
        line = socket.create_connection(address, CONNECT_SECONDS)
    except OSError:
        return
    with line:
        _have_probed(line)
        line.sendall(str(rank).encode())
        _is_held(line, {line: 0}, lost)


def _accepted(listener: socket.socket) -> socket.socket:
    line, _ = listener.accept()
    _have_probed(line)
    return line


def _have_probed(line: socket.socket) -> None:
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)


def _is_held(line: socket.socket, ranks: dict[socket.socket, int], lost: Lost) -> bool:
    """Read what has come: the other end's number, its end (a process that ended: others tell of that), or an error."""
    try:
        told = line.recv(NUMBER_BYTES)
    except OSError:
        if line in ranks:
            lost(ranks[line], silent_seconds())
        return False
    if told.isdigit():
        ranks[line] = int(told)
    return bool(told)
