"""Report to the other nodes why a rank failed, through a key in the ranks' store, over dedicated connections.

Only the ranks of one node share a :class:`~automodel_ckpt.cli.launch.failure_directory.FailureDirectory`. Without this
channel, ranks of other nodes would only see broken connections, or nothing at all (NCCL, a rank that computes or
sleeps). They would then restart after failures that a restart cannot fix, and end with another exit code.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.failures import FailureRecord

FAILURE_KEY = "automodel_ckpt/failure"
RECEIVED_KEY = "automodel_ckpt/failure_received"
KEEPALIVE_KEY = "automodel_ckpt/keepalive"
ANSWER_SECONDS = 5.0
"""How long to wait for the store. If its process has ended, it never answers."""


class FailureChannel:
    """A connection to the ranks' store at *address* (host, port), opened when it is first used.

    *node* is the number of this node of *num_nodes*; None if it is unknown, as in a launcher. The methods raise
    nothing: a store that does not answer is treated as empty.
    """

    def __init__(
        self, address: tuple[str, int], node: int | None = None, num_nodes: int = 1
    ) -> None:
        self._address = address
        self._node, self._num_nodes = node, num_nodes
        self._has_confirmed = False
        self._store: Any = None

    @classmethod
    def of_this_rank(cls, environment: Mapping[str, str]) -> FailureChannel | None:
        """Return the channel to the store in the environment; None if all ranks are on this node."""
        if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
            return None
        address = (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
        node = int(environment["GROUP_RANK"]) if "GROUP_RANK" in environment else None
        return cls(address, node, int(environment.get("GROUP_WORLD_SIZE", "1")))

    def report(self, record: FailureRecord) -> None:
        """Store the record, unless a rank has already stored one: the first one is kept.

        The other ranks of this node read it in the failure directory, so it also counts as received there.
        """
        text = json.dumps(asdict(record))
        # compare_set is atomic in the store: of two nodes that report simultaneously, one is first.
        self._query(lambda store: store.compare_set(FAILURE_KEY, "", text))
        self.confirm()

    def receive(self) -> FailureRecord | None:
        """Return the record that a rank has stored; None if there is none, or the store does not answer."""
        text = self._read(FAILURE_KEY)
        return FailureRecord(**json.loads(text)) if text else None

    def confirm(self) -> None:
        """Store that this node has received the record, so that no node waits for it any longer."""
        if self._node is None or self._has_confirmed:
            return
        self._has_confirmed = True
        self._query(lambda store: store.set(f"{RECEIVED_KEY}/{self._node}", "1"))

    def is_confirmed(self) -> bool:
        """Whether all other nodes have received the record. False if the store does not answer."""
        others = [node for node in range(self._num_nodes) if node != self._node]
        found: list[bool] = []
        keys = [f"{RECEIVED_KEY}/{node}" for node in others]
        self._query(lambda store: found.append(store.check(keys)))
        return found == [True]

    def publish_keepalive(self, port: int, token: str) -> bool:
        """Publish the port on which node 0 accepts the connections of :mod:`automodel_ckpt.parallel.ranks.keepalive`.

        They have to know *token*. Returns False if the store does not answer: rank 0 may serve it later.
        """
        done: list[None] = []
        self._query(lambda store: done.append(store.set(KEEPALIVE_KEY, f"{port} {token}")))
        return bool(done)

    def keepalive(self) -> tuple[tuple[str, int], str] | None:
        """Return the published address and token; None if there are none, or the store does not answer."""
        text = self._read(KEEPALIVE_KEY)
        if not text:
            return None
        port, token = text.split()
        return (self._address[0], int(port)), token

    def _read(self, key: str) -> str:
        """Return the value of a key; empty if it is not set, or the store does not answer."""
        values: list[str] = []

        def read(store: Any) -> None:
            if store.check([key]):  # get() would wait for a key that is not set
                values.append(store.get(key).decode())

        self._query(read)
        return values[0] if values else ""

    def _query(self, query: Callable[[Any], Any]) -> None:
        """Run a query in a thread, and abandon the thread after ANSWER_SECONDS.

        torch's store cannot be interrupted: without a network, its calls take much longer than their timeout.
        """
        thread = threading.Thread(target=self._try, args=(query,), daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)

    def _try(self, query: Callable[[Any], Any]) -> None:
        # RuntimeError is the base class of torch's store and network errors
        with contextlib.suppress(RuntimeError, OSError):
            if self._store is None:
                self._store = self._connect()
            query(self._store)

    def _connect(self) -> Any:
        distributed = importlib.import_module("torch.distributed")
        # TCPStore logs warnings when it cannot connect: test the connection first, silently.
        socket.create_connection(self._address, ANSWER_SECONDS).close()
        timeout = timedelta(seconds=ANSWER_SECONDS)
        return distributed.TCPStore(
            *self._address, is_master=False, timeout=timeout, wait_for_workers=False
        )


def receive_failure(
    channel: FailureChannel | None, failure_dir: FailureDirectory, attempt: int
) -> None:
    """Write the failure that another node reported, if any, to the failure directory of this node.

    *channel* is None if all ranks are on this node.
    """
    record = channel.receive() if channel is not None else None
    if channel is not None and record is not None:
        failure_dir.write(attempt, record)
        channel.confirm()
