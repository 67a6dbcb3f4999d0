"""Nodes on one machine: network namespaces on one switch, where 127.0.0.1 of one is not that of another. Needs root."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence

LINK = "net0"
"""The name of each node's network interface."""


class NoNamespacesError(Exception):
    """This machine or this user cannot make network namespaces."""


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    return done.stdout


@contextlib.contextmanager
def nodes_at(addresses: Sequence[str]) -> Iterator[list[str]]:
    """Names of network namespaces that reach each other at *addresses*. Raises :class:`NoNamespacesError`."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NoNamespacesError("network namespaces need root and iproute2")
    mark = uuid.uuid4().hex[:6]
    switch = f"ckpt-{mark}-switch"
    names = [f"ckpt-{mark}-{number}" for number in range(len(addresses))]
    made: list[str] = []
    try:
        try:
            for name in (switch, *names):
                ip("netns", "add", name)
                made.append(name)
            ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        except subprocess.CalledProcessError as error:
            raise NoNamespacesError(error.stderr.strip()) from error
        ip("-n", switch, "link", "set", "bridge0", "up")
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            port = f"port{number}"
            cable = ["link", "add", port, "netns", switch, "type", "veth"]
            ip(*cable, "peer", "name", LINK, "netns", name)
            ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", LINK, "up")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


def enter_network(name: str) -> None:
    """Move this process to a namespace. Connections that it opens from now on are of that node."""
    with open(f"/var/run/netns/{name}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
