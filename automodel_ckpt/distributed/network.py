"""Which of this machine's addresses the other machines see: the standard library only, asked before torch connects.

On many machines the own name leads to 127.0.0.1 or 127.0.1.1 (Debian writes such a line into /etc/hosts). torch then
does not know that it is the rendezvous' host, tells the others to meet at their own loopback, and gloo listens there.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import MutableMapping

_SIOCGIFADDR = 0x8915  # an interface's IPv4 address (source: netdevice(7))


def is_own_address(host: str) -> bool:
    """Whether *host*, a name or an address, is this machine: whether one can listen there."""
    for family, kind, _, _, place in _resolved(host):
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            probe.bind((place[0], 0, *place[2:]))
            return True
    return False


def is_known(host: str) -> bool:
    """Whether a name leads to an address."""
    return bool(_resolved(host))


def hosts_unknowingly(endpoint: str) -> bool:
    """Whether this machine has to serve the rendezvous at HOST:PORT and torch would not see it: the address is its own,
    but its name leads to loopback only; and nobody serves there yet (of several launchers on it, one does)."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    if is_loopback(host) or not is_loopback(socket.gethostname()) or not is_own_address(host):
        return False
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return True
    return False


def address_towards(host: str) -> str | None:
    """This machine's address on the way to *host*; None where there is no way. Nothing is sent."""
    for family, _, _, _, place in _resolved(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((place[0], 9, *place[2:]))
            address: str = probe.getsockname()[0]
            return address
    return None


def interface_of(address: str) -> str | None:
    """The network interface with this address."""
    if ":" in address:
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    """From the kernel's table, a line for each address: 32 hexadecimal digits first, the interface's name last."""
    digits = f"{int(ipaddress.IPv6Address(address.partition('%')[0])):032x}"
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        return next((line.split()[-1] for line in table if line.startswith(digits)), None)
    return None


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads only back to this machine's loopback; so does a name that leads nowhere."""
    return all(
        ipaddress.ip_address(place[0].partition("%")[0]).is_loopback
        for *_, place in _resolved(host)
    )


def let_gloo_be_found(environment: MutableMapping[str, str]) -> None:
    """Have gloo listen where the other machines find it: on the interface towards MASTER_ADDR.

    Nothing is done on a single machine, where the own name leads to an address of its own, or where the user chose.
    """
    master = environment.get("MASTER_ADDR", "localhost")
    if (
        "GLOO_SOCKET_IFNAME" in environment
        or is_loopback(master)
        or not is_loopback(socket.gethostname())
    ):
        return
    address = address_towards(master)
    interface = interface_of(address) if address else None
    if interface:
        environment["GLOO_SOCKET_IFNAME"] = interface


def bound_silence(port: int, seconds: float) -> None:
    """Have this process's connections to *port* of other machines fail when nothing comes back for so long, instead of
    the quarter of an hour of the kernel. For connections of libraries, which do not set it."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if (
                    connection.family in (socket.AF_INET, socket.AF_INET6)
                    and connection.getpeername()[1] == port
                ):
                    connection.setsockopt(
                        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000)
                    )


def _resolved(host: str) -> list[tuple[int, int, int, str, tuple[str, ...]]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [
        (family, kind, protocol, name, tuple(place))  # type: ignore[arg-type]
        for family, kind, protocol, name, place in found
    ]
