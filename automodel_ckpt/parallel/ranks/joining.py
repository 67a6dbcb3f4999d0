"""The store of the ranks, and the wait until all ranks have joined it.

torch waits in C++, where no signal handler runs, for up to half an hour and without a message.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from automodel_ckpt.errors import AutomodelError
from automodel_ckpt.parallel.ranks.network import can_be_reached, is_this_node_only

log = logging.getLogger("automodel_ckpt")

REPORT_SECONDS = 10.0
"""How long a rank waits for others before it reports which ranks are missing."""
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.5
_MAX_NAMED = 16
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def serve_store(host: str, port: int) -> TCPStore:
    """Serve the store of the ranks.

    Args:
        host: The address at which the ranks connect. With a loopback address, other nodes cannot connect.
        port: The port. With 0, the system chooses one.

    Returns:
        The store, which serves others while it exists.

    Raises:
        OSError: The port is in use.
        RuntimeError: torch could not create the store.
    """
    if not is_this_node_only(host):
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    # Without a socket, torch listens on all interfaces. It closes this one with the store.
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def store_of_ranks(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta
) -> TCPStore:
    """Connect to the store at *host* and *port*. Rank 0 serves it, unless a launcher does.

    Raises :class:`AutomodelError` if no process serves it within *timeout*.
    """
    if rank == 0 and os.environ.get(_AGENT_STORE) != "True":
        return serve_store(host, port)

    by_rank_0 = rank != 0 and "TORCHELASTIC_RUN_ID" not in os.environ
    server = _names([0], world_size) if by_rank_0 else f"the launcher's store at {host}:{port}"
    _wait_for(lambda: can_be_reached(host, port), lambda: server, timeout)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def await_ranks(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Wait until all ranks have called this function with *store*.

    The ranks that are missing are reported after REPORT_SECONDS, by one rank. Raises :class:`AutomodelError` if they
    are still missing after *timeout*.
    """
    store.set(f"joined_{rank}", "")
    if store.add("num_joined", 1) == world_size:
        store.set("all_joined", "")

    def missing() -> str:
        ranks = [other for other in range(world_size) if not store.check([f"joined_{other}"])]
        return _names(ranks, world_size) if ranks else ""

    _wait_for(
        lambda: store.check(["all_joined"]),
        missing,
        timeout,
        reports=lambda: store.add("reports", 1) == 1,
    )


def _wait_for(
    condition: Callable[[], bool],
    missing: Callable[[], str],
    timeout: timedelta,
    reports: Callable[[], bool] = lambda: True,
) -> None:
    """Wait for *condition* in Python. After REPORT_SECONDS, report what is *missing* if *reports* returns True."""
    start = time.monotonic()
    poll, has_reported = _FIRST_POLL_SECONDS, False
    while not condition():
        waited = time.monotonic() - start
        if waited > timeout.total_seconds():
            raise AutomodelError(
                "not all ranks of the run have started within distributed.timeout_minutes "
                f"({timeout.total_seconds() / 60:g})",
                where=f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}",
                value=f"missing: {missing()}",
                hint=_hint(os.environ),
            )
        if waited > REPORT_SECONDS and not has_reported:
            has_reported = True
            if reports() and (names := missing()):
                log.warning("waiting for %s, not started yet: %s", names, _hint(os.environ))
        time.sleep(poll)
        poll = min(1.5 * poll, _LONGEST_POLL_SECONDS)


def _names(ranks: Sequence[int], world_size: int) -> str:
    """``ranks 1, 2, 3 of 4``, with the first ranks of many."""
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = f" and {len(ranks) - _MAX_NAMED} others" if len(ranks) > _MAX_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more} of {world_size}"


def _hint(environment: Mapping[str, str]) -> str:
    """What to do about missing ranks, which depends on the program that started this one."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return "see the output of these ranks and of their launcher"
    # Under srun, this program sets RANK itself.
    if "SLURM_PROCID" in environment and environment.get(_AGENT_STORE) == "True":
        start, variable = "start one task per rank with srun", "SLURM_PROCID"
    else:
        start, variable = "start them with the same MASTER_ADDR and MASTER_PORT", "RANK"
    return f"{start}, or run `unset {variable}` first to train with one process"
