"""Nodes on one machine, each with its own network and its own /dev/shm, which is lost with the node. Needs root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers.networks import LINK, ip, nodes_at, processes_of

SHARED_MEMORY = "/dev/shm"
_HOLD = "mount -t tmpfs -o size={size} tmpfs {path} && echo mounted && read end"
_GONE_SECONDS = 20.0


@dataclass
class Node:
    """A network namespace *name* at *address*, and a mount namespace with a private tmpfs on /dev/shm.

    A process that does nothing, the holder, keeps the mount namespace while the node is on. :meth:`cut` ends the node
    with all its processes and its memory; :meth:`begin` starts it again, empty.
    """

    name: str
    address: str
    megabytes: int = 512
    _holder: subprocess.Popen[str] | None = None

    def begin(self) -> None:
        """Start the node. It has only the holder."""
        assert self._holder is None
        command = _HOLD.format(size=f"{self.megabytes}m", path=SHARED_MEMORY)
        words = ["ip", "netns", "exec", self.name, "unshare", "--mount", "sh", "-c", command]
        pipe = subprocess.PIPE
        # A separate session: a signal to the campaign's session must not end the node.
        self._holder = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "mounted\n", f"no memory for node {self.name}"
        ip("-n", self.name, "link", "set", LINK, "up")

    def cut(self, *, silently: bool = False) -> None:
        """Lose the node: its processes and its memory. With *silently*, its network is lost first: no packet leaves."""
        if silently:
            ip("-n", self.name, "link", "set", LINK, "down")
        if self._holder is not None:
            end = time.monotonic() + _GONE_SECONDS
            while left := processes_of(self.name):
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                assert time.monotonic() < end, f"processes {left} do not end"
                time.sleep(0.005)
            self._holder.communicate()
            self._holder = None

    def processes(self) -> list[int]:
        """The ids of the node's processes, except the holder."""
        return [number for number in processes_of(self.name) if number != self._holder_id]

    @property
    def _holder_id(self) -> int:
        assert self._holder is not None, "the node is off"
        return self._holder.pid

    @property
    def memory(self) -> Path:
        """The node's /dev/shm, as this process sees it."""
        return Path(f"/proc/{self._holder_id}/root{SHARED_MEMORY}")

    def enter(self) -> None:
        """Move this process, which must have one thread, to the node. Its working directory stays."""
        directory = os.getcwd()
        library = ctypes.CDLL(None, use_errno=True)
        for kind in ("mnt", "net"):
            with open(f"/proc/{self._holder_id}/ns/{kind}") as namespace:
                if library.setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns {kind}")
        os.chdir(directory)


@contextlib.contextmanager
def begun_nodes(addresses: Sequence[str]) -> Iterator[list[Node]]:
    """Nodes that are on and reach each other. Raises :class:`~tests.support.servers.networks.NoNamespacesError`."""
    with nodes_at(addresses) as names, contextlib.ExitStack() as stack:
        nodes = [Node(name, address) for name, address in zip(names, addresses, strict=True)]
        for node in nodes:
            stack.callback(node.cut)
            node.begin()
        yield nodes
