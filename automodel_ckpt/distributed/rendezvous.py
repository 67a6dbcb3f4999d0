"""How the launchers of a run meet, for torch's elastic agent: on one machine, at a master, or at a rendezvous.

torch's own ways do not fit. "c10d" waits up to 0.3 s on a single machine, and its heartbeat thread lives on while ranks
are forked; both it and "static" keep one store for all restarts, where restarted ranks read the addresses of dead ones
(pytorch #135712). Both wait inside C++, where no signal handler runs, and "static" takes two machines with one number,
or with another opinion of how many there are, for a machine that has not come yet.

Here the ranks of one machine get a fresh store at every start, on a port that the system chooses unless one is given;
several machines at a master wait in Python; "c10d" is torch's, asked for when its host can be reached.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)

from automodel_ckpt.distributed.network import bound_silence, is_own_address
from automodel_ckpt.errors import RecipeError

NAME = "automodel_ckpt"
"""The name for LaunchConfig.rdzv_backend; its configs hold "host", the :class:`Host`, and "master", the machine's
number where they meet at a master. The endpoint is HOST:PORT, port 0 for a free one on a single machine."""
JOIN_SECONDS = 600.0
"""So long machines wait for each other, as torch's do."""
POLL_SECONDS = 0.1
SILENT_SECONDS = 15.0
"""So long a launcher waits for an answer of the machine that has the rendezvous."""


class Host(Protocol):
    """What a launcher wants to know of its rendezvous."""

    def meeting(self) -> AbstractContextManager[None]:
        """Entered while the machines meet, which may take long."""

    def waiting(self) -> AbstractContextManager[None]:
        """Entered while the place to meet cannot be reached yet."""

    def joining_nodes(self) -> None:
        """Called when machines wait to join a run that goes on, before its ranks are stopped for them."""


class MasterRendezvous(RendezvousHandler):
    """Machine *number* of *machines* meets the others at machine 0, which serves the ranks' store.

    A taken port raises DistNetworkError, machines that contradict each other :class:`RecipeError`, and one that does
    not come within JOIN_SECONDS TimeoutError.
    """

    def __init__(self, address: tuple[str, int], run_id: str, number: int, machines: int) -> None:
        self._address, self._run_id = address, run_id
        self._number, self._machines = number, machines
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        (host, port), serves = self._address, self._number == 0
        self._store = None  # frees a port that was given
        if not serves:
            wait_for(lambda: can_be_reached(host, port), f"node 0 does not answer at {host}:{port}")
        self._store = TCPStore(host, port, is_master=serves, wait_for_workers=False)
        if self._machines > 1:
            self._meet(PrefixStore(f"meeting/{self._run_id}", self._store))
        agents = PrefixStore("agent", self._store)
        return RendezvousInfo(
            agents, self._number, self._machines, RendezvousStoreInfo(host, self._store.port)
        )

    def _meet(self, store: PrefixStore) -> None:
        told = store.compare_set("machines", "", str(self._machines)).decode()
        if told != str(self._machines):
            self._contradict(
                "--nnodes",
                self._machines,
                f"another node of this run was started with --nnodes {told}",
            )
        if store.add(f"machine_{self._number}", 1) > 1:
            self._contradict(
                "--node-rank", self._number, "another node of this run has the same node rank"
            )
        store.add("here", 1)
        wait_for(lambda: store.add("here", 0) >= self._machines, "not all nodes joined")

    def _contradict(self, flag: str, value: object, why: str) -> None:
        raise RecipeError(
            f"the nodes are inconsistent: {why}",
            where=flag,
            value=value,
            hint="start each node with the same --nnodes and --master-addr, and a unique --node-rank",
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._store = None
        return True


class HostedRendezvous(RendezvousHandler):
    """Another one, of whose meetings and joining nodes the launcher is told."""

    def __init__(self, inner: RendezvousHandler, host: Host) -> None:
        self._inner, self._host = inner, host

    def next_rendezvous(self) -> RendezvousInfo:
        with self._host.meeting():
            return self._inner.next_rendezvous()

    def num_nodes_waiting(self) -> int:
        waiting: int = self._inner.num_nodes_waiting()
        if waiting > 0:
            self._host.joining_nodes()
        return waiting

    @property
    def use_agent_store(self) -> bool:
        return bool(self._inner.use_agent_store)

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return str(self._inner.get_run_id())

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def shutdown(self) -> bool:
        return bool(self._inner.shutdown())


def register_rendezvous() -> None:
    """Register :data:`NAME` with torch's elastic agent. Calling it again has no effect."""
    rendezvous_handler_registry.register(NAME, _create)
    # Patch for torch 2.10 to 2.13: for each c10d event, torch looks up the calling method with inspect.stack(), which
    # searches all loaded modules (0.05 s of processor time with transformers loaded, ten times per rendezvous and then
    # at each heartbeat). The name only appears in torch's event log, which has no handler by default.
    vars(dynamic_rendezvous)["get_method_name"] = lambda depth=2: ""


def can_be_reached(host: str, port: int) -> bool:
    """Whether something listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0):
        return True
    return False


def wait_for(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait where signal handlers run. TimeoutError after JOIN_SECONDS."""
    end = time.monotonic() + JOIN_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{otherwise} within {JOIN_SECONDS:.0f} seconds")
        time.sleep(POLL_SECONDS)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    host: Host = parameters.config["host"]
    place, _, port = parameters.endpoint.rpartition(":")
    place = place.strip("[]")
    number = parameters.config.get("master")
    if number is not None:
        address = (place, int(port))
        return HostedRendezvous(
            MasterRendezvous(address, parameters.run_id, number, parameters.max_nodes), host
        )
    if not is_own_address(place):
        with host.waiting():
            wait_for(lambda: can_be_reached(place, int(port)), f"no node answers at {place}:{port}")
    configs = {
        name: value for name, value in parameters.config.items() if name not in ("host", "master")
    }
    inner = RendezvousParameters(
        "c10d",
        parameters.endpoint,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        **configs,
    )
    handler = rendezvous_handler_registry.create_handler(inner)
    bound_silence(int(port), SILENT_SECONDS)
    return HostedRendezvous(handler, host)
