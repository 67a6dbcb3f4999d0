"""The rendezvous of a run's launchers, for torch's elastic agent: on one node, at a master node, or with c10d.

torch's own handlers are not sufficient. "c10d" waits up to 0.3 s on a single node, and its heartbeat thread continues
while ranks are forked. "c10d" and "static" use one store for all restarts, so restarted ranks read the addresses of
previous ranks (pytorch #135712). Both wait inside C++, where no signal handler runs. "static" treats two nodes with one
node rank, or with different numbers of nodes, like a node that has not joined yet.

Here, the ranks of one node get a new store at every start, on a given port or one that the system chooses. Several
nodes with a master wait in Python. "c10d" is torch's, created after its host can be reached.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.ranks.joining import serve_store
from automodel_ckpt.parallel.ranks.network import bound_silence, can_be_reached, is_own_address

NAME = "automodel_ckpt"
"""The value of LaunchConfig.rdzv_backend.

Its rdzv_configs contain "host", the :class:`Host`, and, for a rendezvous at a master, "master", this node's rank. The
endpoint is HOST:PORT; port 0 selects a free port on a single node.
"""
JOIN_SECONDS = 600.0
"""How long nodes wait for each other; torch's default for its rendezvous is the same."""
POLL_SECONDS = 0.1
EXIT_POLL_SECONDS = 0.25
CLOSED_KEY = "closed"
FORKED_KEY = "nodes_that_forked"
"""Counts, in the store of one start, the launchers that have forked their ranks."""
SILENT_SECONDS = 15.0
"""How long a launcher waits for a response of the node that hosts the rendezvous."""


class Host(Protocol):
    """The launcher, which is notified of the progress of its rendezvous."""

    def during_rendezvous(self) -> AbstractContextManager[None]:
        """A context that is entered while nodes join, which may take long."""

    def waiting(self) -> AbstractContextManager[None]:
        """A context that is entered while the host of the rendezvous cannot be reached."""

    def poll(self) -> None:
        """Called several times per second while ranks run."""

    def ranks_forked(self) -> None:
        """Called when the launchers of all nodes have forked their ranks."""

    def joining_nodes(self) -> None:
        """Called when nodes wait to join a running job, before its ranks are stopped for them."""

    def lost_connection(self) -> None:
        """Called when the host of the rendezvous does not answer any more, before the agent stops the ranks."""

    def can_rejoin(self) -> bool:
        """Whether another agent of this launcher may join the other nodes after this one has lost them."""

    def starts_again(self) -> bool:
        """Whether the ranks of this node, which have ended, start again when those of other nodes have failed."""

    def leave(self, handler: RendezvousHandler) -> bool:
        """Called when the agent ends. Shuts the handler down, or keeps it for :meth:`kept`."""

    def kept(self) -> RendezvousHandler | None:
        """Return the handler of an earlier agent of this launcher, which still has its connection."""


class MasterRendezvous(RendezvousHandler):
    """The rendezvous of node *node_rank* of *num_nodes* at node 0, which serves the store of the ranks.

    :meth:`next_rendezvous` raises DistNetworkError or OSError for a port in use, :class:`RecipeError` if nodes have
    inconsistent flags, and TimeoutError if a node does not join within JOIN_SECONDS.
    """

    def __init__(
        self, address: tuple[str, int], run_id: str, node_rank: int, num_nodes: int
    ) -> None:
        self._address, self._run_id = address, run_id
        self._node_rank, self._num_nodes = node_rank, num_nodes
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        host, port = self._address
        is_master = self._node_rank == 0
        # Closes the store of the previous attempt, so that a given port is free again.
        self._store = None
        if not is_master:
            wait_for(lambda: can_be_reached(host, port), f"node 0 does not answer at {host}:{port}")
        # wait_for_workers would wait in C++, where no signal handler runs; _join waits in Python.
        if is_master:
            self._store = serve_store(host, port)
        else:
            self._store = TCPStore(host, port, is_master=False, wait_for_workers=False)
        if self._num_nodes > 1:
            self._join(PrefixStore(f"meeting/{self._run_id}", self._store))
        agents = PrefixStore("agent", self._store)
        address = RendezvousStoreInfo(host, self._store.port)
        return RendezvousInfo(agents, self._node_rank, self._num_nodes, address)

    def _join(self, store: PrefixStore) -> None:
        first_num_nodes = store.compare_set("machines", "", str(self._num_nodes)).decode()
        if first_num_nodes != str(self._num_nodes):
            reason = f"another node of this run was started with --nnodes {first_num_nodes}"
            self._raise_inconsistent("--nnodes", self._num_nodes, reason)
        # add is atomic: of two nodes with the same rank, the later one gets 2.
        if store.add(f"machine_{self._node_rank}", 1) > 1:
            reason = "another node of this run has the same node rank"
            self._raise_inconsistent("--node-rank", self._node_rank, reason)
        store.add("here", 1)
        # Adding 0 reads the counter without waiting. get can wait in C++ for the key.
        wait_for(lambda: store.add("here", 0) >= self._num_nodes, "not all nodes joined")

    def _raise_inconsistent(self, flag: str, value: object, reason: str) -> None:
        raise RecipeError(
            f"the nodes are inconsistent: {reason}",
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
        return self._store is not None and bool(self._store.check([CLOSED_KEY]))

    def set_closed(self) -> None:
        if self._store is not None:
            self._store.set(CLOSED_KEY, "1")

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        # The base class of torch's store and network errors: node 0, which serves the store, may have ended.
        with contextlib.suppress(RuntimeError):
            self.set_closed()
        self._store = None
        return True


class OtherNodesStartAgain(BaseException):
    """The ranks of this node have ended, and those of another node have failed and start again.

    It is not an Exception: the agent logs those in its exit barrier, and ends with the results of the ranks.
    """


class AgentStore:
    """The agents' *store*, with an exit barrier that ends when another node needs this one, or has left the run.

    In that barrier, torch's agent waits for the other nodes after its ranks have ended, up to 300 seconds. It serves
    the store, or could join a new rendezvous, but looks at neither. *check_others* is called repeatedly; it returns
    whether no other node is left to wait for, and may raise. All other methods are those of *store*.
    """

    def __init__(self, store: Store, check_others: Callable[[], bool]) -> None:
        self._store = store
        self._check_others = check_others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, keys: list[str]) -> None:
        """Wait for *keys*. Only the exit barrier calls it. Raises TimeoutError after the timeout of the store."""
        timeout: timedelta = self._store.timeout  # type: ignore[attr-defined]
        end = time.monotonic() + timeout.total_seconds()
        while not (self._store.check(keys) or self._check_others()):
            if time.monotonic() > end:
                raise TimeoutError("other nodes have not ended")
            time.sleep(EXIT_POLL_SECONDS)


class NodesThatForked:
    """Counts the nodes whose ranks have been forked, until that is true of all *num_nodes* nodes of a start."""

    def __init__(self, store: Store, num_nodes: int) -> None:
        self._store, self._num_nodes = store, num_nodes
        self._counts_this_node = False

    def are_all(self) -> bool:
        """Count this node at the first call, and return whether all nodes have been counted."""
        newly_forked = 0 if self._counts_this_node else 1
        self._counts_this_node = True
        return bool(self._store.add(FORKED_KEY, newly_forked) >= self._num_nodes)


class HostedRendezvous(RendezvousHandler):
    """Wraps another rendezvous to notify the launcher of its waits, of forked ranks, of joining nodes, and of a lost
    connection.
    """

    def __init__(self, inner: RendezvousHandler, host: Host) -> None:
        self._inner, self._host = inner, host
        self._is_connected = True
        self._forking: NodesThatForked | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        with self._host.during_rendezvous(), self._noticing_loss():
            info = self._inner.next_rendezvous()
        self._forking = NodesThatForked(info.store, info.world_size)
        store: Any = AgentStore(info.store, self._check_others)
        address: Any = info.bootstrap_store_info
        return RendezvousInfo(store, info.rank, info.world_size, address)

    def _check_others(self) -> bool:
        """Return whether another node has closed the rendezvous, which this one, whose ranks have ended, waits in.

        Raises :class:`OtherNodesStartAgain` if one waits for a new rendezvous, unless this one takes no part in it.
        """
        if self._inner.is_closed():
            return True
        if self._inner.num_nodes_waiting() == 0:
            return False
        if not self._host.starts_again():
            return True
        self._host.joining_nodes()
        raise OtherNodesStartAgain

    def num_nodes_waiting(self) -> int:
        # The agent calls this method again and again after it has forked the ranks of this node.
        self._host.poll()
        with self._noticing_loss():
            waiting: int = self._inner.num_nodes_waiting()
        self._poll_forking()
        if waiting > 0:
            self._host.joining_nodes()
        return waiting

    def _poll_forking(self) -> None:
        # The store raises RuntimeError if its connection breaks, which the next num_nodes_waiting reports.
        with contextlib.suppress(RuntimeError):
            if self._forking is not None and self._forking.are_all():
                self._forking = None
                self._host.ranks_forked()

    @contextlib.contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except RendezvousConnectionError:
            self._is_connected = False
            self._host.lost_connection()
            raise

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
        if self._is_connected or not self._host.can_rejoin():
            return self._host.leave(self._inner)
        # Not closed: if the connection works again, that would end the run of the others. A thread that is left would
        # run while ranks are forked.
        self._inner._stop_heartbeats()  # type: ignore[attr-defined]
        return False


def register_rendezvous() -> None:
    """Register :data:`NAME` with torch's elastic agent. Calling it again has no effect."""
    rendezvous_handler_registry.register(NAME, _create)
    # Patch for torch 2.10 to 2.13: for each c10d event, torch looks up the calling method with inspect.stack(), which
    # searches all loaded modules (0.05 s of processor time with transformers loaded, ten times per rendezvous and then
    # at each heartbeat). The name only appears in torch's event log, which has no handler by default.
    vars(dynamic_rendezvous)["get_method_name"] = lambda depth=2: ""


def wait_for(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait for *condition* in Python, where signal handlers run.

    Raises TimeoutError with the text *otherwise* after JOIN_SECONDS.
    """
    end = time.monotonic() + JOIN_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{otherwise} within {JOIN_SECONDS:.0f} seconds")
        time.sleep(POLL_SECONDS)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the handler for :data:`NAME`; torch's elastic agent calls this."""
    host: Host = parameters.config["host"]
    name, _, port_text = parameters.endpoint.rpartition(":")
    name, port = name.strip("[]"), int(port_text)
    node_rank = parameters.config.get("master")
    if node_rank is not None:
        master = MasterRendezvous((name, port), parameters.run_id, node_rank, parameters.max_nodes)
        return HostedRendezvous(master, host)
    kept = host.kept()
    if kept is not None:
        return HostedRendezvous(kept, host)
    if not is_own_address(name):
        with host.waiting():
            # torch's c10d gives up after a minute if its host has not started.
            wait_for(lambda: can_be_reached(name, port), f"no node answers at {name}:{port}")
    configs = dict(parameters.config)
    del configs["host"]
    configs.pop("master", None)
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
    # After the handler has connected: the limit applies to existing connections only.
    bound_silence(port, SILENT_SECONDS)
    return HostedRendezvous(handler, host)
