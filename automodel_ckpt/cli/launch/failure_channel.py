"""Report to the other nodes why a rank failed, through a key in the ranks' store, over dedicated connections.

The ranks of one node share a :class:`~automodel_ckpt.cli.launch.failures.FailureDirectory`. Without this channel, ranks
of other nodes would only see broken connections, or nothing at all (NCCL, a rank that computes or sleeps). They would
then restart after failures that a restart cannot fix, and end with another exit code.
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

from automodel_ckpt.cli.launch.failures import FailureRecord

KEY = "automodel_ckpt/failure"
KEEPALIVE = "automodel_ckpt/keepalive"
ANSWER_SECONDS = 5.0
"""So long the store may take; one that is gone answers never."""


class FailureChannel:
    """To the store at *address* (host, port); connects when it is first used. Raises nothing."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._store: Any = None

    @classmethod
    def of_this_rank(cls, environment: Mapping[str, str]) -> FailureChannel | None:
        """None where all ranks are on this machine."""
        if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
            return None
        return cls((environment["MASTER_ADDR"], int(environment["MASTER_PORT"])))

    def tell(self, record: FailureRecord) -> None:
        """The first record of all stays."""
        self._ask(lambda store: store.compare_set(KEY, "", json.dumps(asdict(record))))

    def heard(self) -> FailureRecord | None:
        """What was told; None while there is nothing, and where nobody answers."""
        told = self._read(KEY)
        return FailureRecord(**json.loads(told)) if told else None

    def offer_keepalive(self, port: int) -> bool:
        """Publish the port on which node 0 accepts the connections of :mod:`automodel_ckpt.distributed.keepalive`.

        Returns False if the store does not answer: rank 0 may serve it later.
        """
        done: list[None] = []
        self._ask(lambda store: done.append(store.set(KEEPALIVE, str(port))))
        return bool(done)

    def keepalive(self) -> tuple[str, int] | None:
        """Where that is; None while there is nothing, and where nobody answers."""
        port = self._read(KEEPALIVE)
        return (self._address[0], int(port)) if port else None

    def _read(self, key: str) -> str:
        answers: list[str] = []
        self._ask(
            lambda store: answers.append(store.get(key).decode() if store.check([key]) else "")
        )
        return answers[0] if answers else ""

    def _ask(self, question: Callable[[Any], Any]) -> None:
        """In a thread that is left behind when the answer does not come: the network may be down."""
        asking = threading.Thread(target=self._try, args=(question,), daemon=True)
        asking.start()
        asking.join(ANSWER_SECONDS)

    def _try(self, question: Callable[[Any], Any]) -> None:
        with contextlib.suppress(
            RuntimeError, OSError
        ):  # the base of torch's store and network errors
            if self._store is None:
                self._store = self._connected()
            question(self._store)

    def _connected(self) -> Any:
        distributed = importlib.import_module("torch.distributed")
        socket.create_connection(
            self._address, ANSWER_SECONDS
        ).close()  # fails without a word of torch's
        timeout = timedelta(seconds=ANSWER_SECONDS)
        return distributed.TCPStore(
            *self._address, is_master=False, timeout=timeout, wait_for_workers=False
        )
