"""Torch's rendezvous for the launchers of a run, and one for a single node, which no other node can reach."""

from __future__ import annotations

import socket
import time
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    registry,
)

from automodel_ckpt.cli.launch.rendezvous_flags import C10D, LOCAL, Rendezvous
from automodel_ckpt.parallel.ranks.network import (
    address_towards,
    can_be_reached,
    hosts_unknowingly,
    is_known,
    is_loopback,
    is_own_address,
)

JOIN_SECONDS = 600
"""How long nodes wait for each other; torch's default for its rendezvous is the same."""
_POLL_SECONDS = 0.5


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of a single node. The ranks connect on *port* of the loopback interface; 0: on a free port."""

    def __init__(self, port: int, run_id: str) -> None:
        self._port, self._run_id = port, run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the address of the ranks. Raises OSError if the port is in use."""
        with socket.create_server(("127.0.0.1", self._port)) as server:
            address = RendezvousStoreInfo("127.0.0.1", server.getsockname()[1])
        return RendezvousInfo(HashStore(), 0, 1, address)

    def get_backend(self) -> str:
        return LOCAL

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def local_address(rendezvous: Rendezvous) -> str | None:
    """Return the address at which the other nodes reach this one. Returns None when torch finds it."""
    host = _host(rendezvous)
    return None if is_loopback(host) else address_towards(host)


def rendezvous_handler(rendezvous: Rendezvous) -> RendezvousHandler:
    """Return the handler of a rendezvous. Waits until its host can be reached.

    Raises:
        TimeoutError: The host cannot be reached within JOIN_SECONDS.
        Exception: torch could not connect to the host.
    """
    host, port = _host(rendezvous), int(rendezvous.rdzv_endpoint.rpartition(":")[2])
    if rendezvous.rdzv_backend == LOCAL:
        return LocalRendezvous(port, rendezvous.run_id)
    configs: dict[str, Any] = {"rank": rendezvous.node_rank, "timeout": JOIN_SECONDS}
    if rendezvous.rdzv_backend == C10D:
        configs = {}
        is_own = is_own_address(host)
        if not is_own:
            # torch gives up after a minute.
            _await_host(host, port)
        if hosts_unknowingly(rendezvous.rdzv_endpoint):
            configs = {"is_host": True}
        elif not is_own and not is_known(socket.gethostname()):
            # torch would look up the name of this node to find out whether it is the host.
            configs = {"is_host": False}
    parameters = RendezvousParameters(
        rendezvous.rdzv_backend,
        rendezvous.rdzv_endpoint,
        rendezvous.run_id,
        rendezvous.min_nodes,
        rendezvous.max_nodes,
        local_address(rendezvous),
        **configs,
    )
    return registry.get_rendezvous_handler(parameters)


def _await_host(host: str, port: int) -> None:
    end = time.monotonic() + JOIN_SECONDS
    while not can_be_reached(host, port):
        if time.monotonic() > end:
            raise TimeoutError(f"no node answers at {host}:{port} within {JOIN_SECONDS} seconds")
        time.sleep(_POLL_SECONDS)


def _host(rendezvous: Rendezvous) -> str:
    return rendezvous.rdzv_endpoint.rpartition(":")[0].strip("[]")
