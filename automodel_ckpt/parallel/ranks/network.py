"""Find the address of this node that other nodes can reach. Used before torch is loaded or connects.

On many nodes the host name resolves to 127.0.0.1 or 127.0.1.1 (Debian writes such a line into /etc/hosts). torch then
does not recognize that the node hosts the rendezvous, sends a loopback address to the others, and gloo listens there.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SIOCGIFADDR = 0x8915  # an interface's IPv4 address (source: netdevice(7))


def is_own_address(host: str) -> bool:
    """Whether *host*, a name or an address, is this node: whether a socket can be bound to it."""
    for family, kind, _, _, place in _resolved(host):
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            probe.bind((place[0], 0, *place[2:]))
            return True
    return False


def is_known(host: str) -> bool:
    """Whether a host name resolves to an address."""
    return bool(_resolved(host))


def hosts_unknowingly(endpoint: str) -> bool:
    """Whether this node has to host the rendezvous at HOST:PORT, and torch would not recognize it.

    That is the case if the address is this node's, its host name resolves to loopback addresses only, and no other
    launcher of this node serves the port yet.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    if is_loopback(host) or not is_loopback(socket.gethostname()) or not is_own_address(host):
        return False
    try:
        # Two launchers of one node that both take themselves for the host would wait for each
        # other.
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return True
    return False


def can_be_reached(host: str, port: int) -> bool:
    """Whether a process accepts connections at *host*:*port*. A store of torch logs warnings if it cannot connect."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0):
        return True
    return False


def address_towards(host: str) -> str | None:
    """Return the local address of the route to *host*. Returns None when there is no route. Nothing is sent."""
    for family, _, _, _, place in _resolved(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            # connect on a datagram socket only looks up the route; the port (9, discard) does not
            # matter.
            probe.connect((place[0], 9, *place[2:]))
            return probe.getsockname()[0]  # type: ignore[no-any-return]
    return None


def own_address(group: ProcessGroup | None) -> str:
    """An address of this node that the nodes of the other ranks of *group* can reach. Collective."""
    from automodel_ckpt.parallel.ranks.agree import gather_objects

    own = address_towards(os.environ.get("MASTER_ADDR", "localhost")) or "127.0.0.1"
    # The host name of rank 0's node may resolve to 127.0.1.1 there.
    others = [address for address in gather_objects(group, own) if not is_loopback(address)]
    if is_loopback(own) and others:
        return address_towards(others[0]) or own
    return own


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address. Returns None when there is none."""
    if ":" in address:
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                # struct ifreq is a name of 16 bytes and a sockaddr_in, which has its address at
                # offset 4 (netdevice(7)).
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    """Look it up in the kernel's table. Its lines begin with 32 hexadecimal digits and end with the interface."""
    digits = f"{int(ipaddress.IPv6Address(address.partition('%')[0])):032x}"
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        return next((line.split()[-1] for line in table if line.startswith(digits)), None)
    return None


def is_loopback(host: str) -> bool:
    """Whether a name or an address resolves to loopback addresses only. True for a name without any address."""
    return all(
        ipaddress.ip_address(place[0].partition("%")[0]).is_loopback
        for *_, place in _resolved(host)
    )


def is_this_node_only(host: str) -> bool:
    """Whether *host* is a loopback address on every node. A host name may resolve to one on this node only."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def let_gloo_be_found(environment: MutableMapping[str, str]) -> None:
    """Let gloo listen on the interface towards MASTER_ADDR, where the other nodes can reach it.

    On a single node, this is the loopback interface. Changes nothing if the host name resolves to a reachable address
    of one of several nodes, or if the user set GLOO_SOCKET_IFNAME.
    """
    master = environment.get("MASTER_ADDR", "localhost")
    num_ranks = environment.get("WORLD_SIZE", "1")
    is_one_node = is_this_node_only(master) or num_ranks in (
        "1",
        environment.get("LOCAL_WORLD_SIZE"),
    )
    if "GLOO_SOCKET_IFNAME" in environment or not (
        is_one_node or (is_loopback(socket.gethostname()) and not is_loopback(master))
    ):
        return
    address = "127.0.0.1" if is_one_node else address_towards(master)
    interface = interface_of(address) if address else None
    if interface:
        environment["GLOO_SOCKET_IFNAME"] = interface


def _resolved(host: str) -> list[tuple[int, int, int, str, tuple[str, ...]]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [
        (family, kind, protocol, name, tuple(place))  # type: ignore[arg-type]
        for family, kind, protocol, name, place in found
    ]
