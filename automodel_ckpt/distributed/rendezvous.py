"""The ranks of one machine need nobody to meet: a rendezvous for torch's elastic agent without waiting or threads.

torch's own ways do not fit. "c10d" waits up to 0.3 s, and its heartbeat thread lives on while ranks are forked; both it
and "static" keep one store for all restarts, where restarted ranks read the addresses of dead ones (pytorch #135712).
Here every start of the ranks gets a fresh store, on a port that the system chooses unless one is given.
"""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

LOCAL = "automodel_ckpt_local"
"""The name for LaunchConfig.rdzv_backend; its endpoint is HOST:PORT, port 0 for a free one."""


class LocalRendezvous(RendezvousHandler):
    """One agent, which is always node 0 of 1 and serves the ranks' store. A taken port raises DistNetworkError."""

    def __init__(self, host: str, port: int, run_id: str) -> None:
        self._host, self._port, self._run_id = host, port, run_id
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = None  # frees a port that was given
        self._store = TCPStore(self._host, self._port, is_master=True, wait_for_workers=False)
        agents = PrefixStore("agent", self._store)
        return RendezvousInfo(agents, 0, 1, RendezvousStoreInfo(self._host, self._store.port))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return LOCAL

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


def register_local_rendezvous() -> None:
    """Let the elastic agent find :data:`LOCAL`; harmless when repeated."""
    rendezvous_handler_registry.register(LOCAL, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    host, _, port = parameters.endpoint.rpartition(":")
    return LocalRendezvous(host, int(port), parameters.run_id)
