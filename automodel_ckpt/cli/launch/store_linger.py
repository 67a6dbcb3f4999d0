"""Serve the ranks' store after a failure until the other nodes have read from it why a rank failed.

A rank of the first node serves the store. If the ranks of that node ended immediately, the other nodes would only see
broken connections.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from automodel_ckpt.cli.launch.failure_channel import FailureChannel
from automodel_ckpt.parallel.ranks import hang_action

STORE_LINGER_SECONDS = 4.0
"""How long the first node serves the store at most after a failure, so that the other nodes can read the cause."""
RECEIVED_POLL_SECONDS = 0.1


def _has_reason_to_share(channel: FailureChannel | None) -> bool:
    """Whether other nodes have to read from the store why a rank failed, or a launcher may still report it there.

    If a restart follows, no process reports a rank that died silently, and all nodes restart without a reason.
    """
    is_reported = channel is not None and channel.receive() is not None
    return is_reported or not hang_action.has_restarts_left(os.environ)


def default_store() -> Any:
    """Return torch's store, which its server serves while a reference to it exists; None before it is created.

    torch has no public function for it (all versions up to 2.11).
    """
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def serve_failure(channel: FailureChannel | None) -> None:
    """Wait until all other nodes have received why a rank failed, at most STORE_LINGER_SECONDS.

    Returns immediately if they have no reason to read it. Called by rank 0 before it ends.
    """
    if _has_reason_to_share(channel):
        serve_until_received(channel, STORE_LINGER_SECONDS)


def serve_until_received(channel: FailureChannel | None, seconds: float) -> None:
    """Wait until all other nodes have received why a rank failed, at most so long: this node may serve the store."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if channel is not None and channel.is_confirmed():
            return
        time.sleep(RECEIVED_POLL_SECONDS)


def hang_grace_seconds() -> float:
    """How many seconds the ranks of this node continue after a hang, so that other nodes can read about it."""
    return STORE_LINGER_SECONDS if _num_served_nodes() > 0 else 0.0


def unreachable_grace_seconds() -> float:
    """How many seconds the ranks of this node continue after another node has stopped to respond.

    Only one that serves the store to a third node waits. All its ranks do, not only rank 0: the agent ends the others
    with the first one.
    """
    return STORE_LINGER_SECONDS if _num_served_nodes() > 1 else 0.0


def _num_served_nodes() -> int:
    """The number of other nodes that read from the store of this one: 0 unless this is the first node."""
    if os.environ.get("GROUP_RANK") != "0":
        return 0
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) - 1
