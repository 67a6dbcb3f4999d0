"""The part of torch's elastic agent that is local to a node: fork the ranks, watch them, end them.

``SimpleElasticAgent`` of torch does the rest: it lets the nodes rendezvous, assigns ranks, and restarts them. The agent
for a node that torch has would wait half a minute for ranks that do not react to SIGTERM, after another one has failed.
Ranks of this package only note SIGTERM, and save. This agent kills them: saves are atomic.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts
from automodel_ckpt.cli.launch.failures import (
    FINAL_CODES,
    SECOND_SIGNAL_CODE,
    FailureDirectory,
    FailureRecord,
    death_record,
    ended_run_record,
    printed_failure,
    root_cause,
)
from automodel_ckpt.cli.launch.process import flush, print_message
from automodel_ckpt.cli.launch.ranks import C10D, LOCAL, Rendezvous
from automodel_ckpt.cli.launch.signal_forwarder import SignalForwarder
from automodel_ckpt.errors import EXIT_DONE, EXIT_STOPPED
from automodel_ckpt.parallel.ranks.network import (
    address_towards,
    can_be_reached,
    hosts_unknowingly,
    is_known,
    is_loopback,
    is_own_address,
)

GRACE_SECONDS = 20.0
"""How long ranks may take to end after one of them has written a failure record."""
DEATH_GRACE_SECONDS = 3.0
"""How long the others may take to end after a rank that failed has ended."""
OTHER_NODES_SECONDS = 3.0
"""Seconds that a launcher waits for the cause from another node, after its ranks lost a connection."""
POLL_SECONDS = 0.05
EXIT_BARRIER_SECONDS = 10.0
WAIT_REPORT_SECONDS = 15.0
"""How long the launcher waits for other nodes before it reports that it waits."""
# In the store of the agents: how many nodes are done, and which one failed and is not restarted.
_DONE_KEY, _FAILED_KEY = "automodel_ckpt/done", "automodel_ckpt/failed"


class RankAgent(SimpleElasticAgent):
    """Runs the ranks of this node. *waits_for* describes the other nodes; empty on a single node.

    *failures* are the records of the last attempt after :meth:`run`: what the ranks wrote, and deaths. Ranks that a
    signal stopped have written one, too.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        failure_dir: FailureDirectory,
        signals: SignalForwarder,
        waits_for: str,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=EXIT_BARRIER_SECONDS)
        self.failures: list[FailureRecord] = []
        self._failure_dir = failure_dir
        self._signals = signals
        self._waits_for = waits_for
        # By global rank.
        self._processes: dict[int, BaseProcess] = {}
        self._is_counted = False

    @property
    def ranks(self) -> list[int]:
        """The ranks of this node."""
        return sorted(self._processes)

    def _rendezvous(self, worker_group: Any) -> None:
        timer = threading.Timer(WAIT_REPORT_SECONDS, print_message, [self._waits_for])
        timer.daemon = True
        if self._waits_for:
            timer.start()
        try:
            self._signals.wait_for(lambda: super(RankAgent, self)._rendezvous(worker_group))
        finally:
            timer.cancel()

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        spec = worker_group.spec
        if spec.rdzv_handler.use_agent_store:
            # A rank serves the store of the ranks. A launcher that did would fork while its thread accepts connections,
            # and a rank could inherit a lock of the C library in its locked state.
            address = RendezvousStoreInfo.build(
                worker_group.group_rank or 0, worker_group.store, spec.local_addr
            )
            worker_group.master_addr = address.master_addr
            worker_group.master_port = address.master_port
        self._failure_dir.begin_attempt()
        self.failures, self._processes, self._is_counted = [], {}, False
        # Otherwise every rank would print the content of the buffers.
        flush()
        context = multiprocessing.get_context("fork")
        with self._signals.blocked():
            for worker in worker_group.workers:
                variables = self._variables(worker_group, worker)
                process = context.Process(target=_run, args=(variables, spec.entrypoint, spec.args))
                process.start()
                self._processes[worker.global_rank] = process
            self._signals.processes = list(self._processes.values())
        return {
            worker.local_rank: self._processes[worker.global_rank].pid
            for worker in worker_group.workers
        }

    def _variables(self, group: Any, worker: Any) -> TextDict:
        """Return the variables of a rank, as torchrun sets them."""
        spec = group.spec
        variables = {
            "RANK": worker.global_rank,
            "WORLD_SIZE": worker.world_size,
            "LOCAL_RANK": worker.local_rank,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "ROLE_RANK": worker.role_rank,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "ROLE_NAME": spec.role,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": spec.max_restarts - self._remaining_restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }
        return {name: str(value) for name, value in variables.items()}

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        failed_node = self._failed_node(worker_group)
        if self._has_failed() or failed_node is not None:
            return self._fail(worker_group, failed_node)
        codes = {rank: process.exitcode for rank, process in self._processes.items()}
        if None in codes.values() or not self._are_all_nodes_done(worker_group):
            return RunResult(state=WorkerState.HEALTHY)
        self.failures = self._failure_dir.records()
        self._signals.code = max(code or EXIT_DONE for code in codes.values())
        return RunResult(state=WorkerState.SUCCEEDED, return_values=codes)

    def _has_failed(self) -> bool:
        """Whether a rank of this node has failed: one that a signal stopped during training has not."""
        if any(not record.stopped_in_training for record in self._failure_dir.records()):
            return True
        return bool(self._failed_ranks())

    def _failed_ranks(self) -> dict[int, int]:
        """Return the exit codes of the ranks that ended before they were done."""
        failed = {}
        for rank, process in self._processes.items():
            code = process.exitcode
            is_done = code in (EXIT_DONE, EXIT_STOPPED) and self._failure_dir.is_done(rank)
            if code is not None and not is_done:
                failed[rank] = code
        return failed

    def _fail(self, worker_group: Any, failed_node: FailureRecord | None) -> RunResult:
        """End the ranks of this node, and find out why they failed and whether they may be restarted."""
        deaths = self._await_end(DEATH_GRACE_SECONDS if failed_node else GRACE_SECONDS)
        self._kill()
        records = self._failure_dir.records()
        recorded = {record.rank for record in records}
        self.failures = [*records, *(death for death in deaths if death.rank not in recorded)]
        cause = root_cause(self.failures)
        if cause is None or not cause.primary:
            # The ranks of this node only lost their connections.
            failed_node = failed_node or self._failed_node(worker_group, OTHER_NODES_SECONDS)
            if failed_node is not None:
                self.failures = [*self.failures, failed_node]
                cause = failed_node
        is_final = cause is not None and (
            cause.code in FINAL_CODES or cause.code > SECOND_SIGNAL_CODE
        )
        if is_final or failed_node is not None or self._signals.received:
            self._remaining_restarts = 0
        if self._remaining_restarts:
            self._report_restart(worker_group, cause)
        else:
            self._report_to_nodes(worker_group, cause)
        return RunResult(state=WorkerState.FAILED)

    def _await_end(self, seconds: float) -> list[FailureRecord]:
        """Wait until the ranks of this node have ended, at most so long: some may hang. Return those that died."""
        deaths = {}
        end = time.monotonic() + seconds
        while True:
            for rank, code in self._failed_ranks().items():
                if rank not in deaths:
                    deaths[rank] = death_record(rank, code, time.time())
                    grace = 0.0 if code > SECOND_SIGNAL_CODE else DEATH_GRACE_SECONDS
                    end = min(end, time.monotonic() + grace)
            is_running = any(process.exitcode is None for process in self._processes.values())
            if not is_running or time.monotonic() >= end:
                return list(deaths.values())
            time.sleep(POLL_SECONDS)

    def _report_restart(self, worker_group: Any, cause: FailureRecord | None) -> None:
        reason = "ranks of another node failed"
        if cause is not None:
            reason = printed_failure(cause, several_ranks=len(self._processes) > 1)
        total = worker_group.spec.max_restarts
        print_message(f"{reason}\nrestart {total - self._remaining_restarts + 1} of {total}")

    def _report_to_nodes(self, worker_group: Any, cause: FailureRecord | None) -> None:
        """Let the launchers of the other nodes know that this one ends, and with which code."""
        if worker_group.group_world_size == 1 or cause is None:
            return
        with suppress(RuntimeError):  # the base class of torch's store and network errors
            worker_group.store.compare_set(_FAILED_KEY, "", f"{cause.code} {socket.gethostname()}")

    def _failed_node(self, worker_group: Any, wait_seconds: float = 0.0) -> FailureRecord | None:
        """Return the record of another node with ranks that have failed and are not restarted."""
        end = time.monotonic() + wait_seconds
        while worker_group.group_world_size > 1:
            with suppress(RuntimeError):
                if worker_group.store.check([_FAILED_KEY]):
                    code, _, host = worker_group.store.get(_FAILED_KEY).decode().partition(" ")
                    return ended_run_record(int(code), host)
            if time.monotonic() >= end:
                break
            time.sleep(POLL_SECONDS)
        return None

    def _are_all_nodes_done(self, worker_group: Any) -> bool:
        """Whether the ranks of all nodes are done. Until then, this node can start again with those that fail."""
        if worker_group.group_world_size == 1:
            return True
        newly_done = 0 if self._is_counted else 1
        self._is_counted = True
        try:
            num_done = worker_group.store.add(_DONE_KEY, newly_done)
        except RuntimeError:  # the node that serves the store has ended
            return True
        return bool(num_done >= worker_group.group_world_size)

    def _restart_workers(self, worker_group: Any) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            print_message("other nodes wait to join: all ranks start again")
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: Any, *options: Any, **more: Any) -> None:
        self._kill()

    def _shutdown(self, death_sig: Any = signal.SIGTERM, *options: Any, **more: Any) -> None:
        self._kill()

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.exitcode is None:
                process.kill()
        for process in self._processes.values():
            process.join()


def _run(variables: Texts, entrypoint: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Run a rank in its process."""
    os.environ.update(variables)
    entrypoint(*arguments)


JOIN_SECONDS = 600
"""How long nodes wait for each other; torch's default for its rendezvous is the same."""
_POLL_SECONDS = 0.5


class LocalRendezvous(StaticTCPRendezvous):
    """The rendezvous of a single node, without a server. Port 0: the ranks connect on a free port."""

    # A rank serves the store of the ranks.
    use_agent_store = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the address of the ranks. Raises OSError if the port is in use."""
        with socket.create_server((self.master_addr, self.master_port)) as server:
            address = RendezvousStoreInfo(self.master_addr, server.getsockname()[1])
        return RendezvousInfo(HashStore(), 0, 1, address)


def local_address(rendezvous: Rendezvous) -> str | None:
    """Return the address at which the other nodes reach this one. Returns None when torch finds it."""
    host = rendezvous.host
    return None if is_loopback(host) else address_towards(host)


def rendezvous_handler(rendezvous: Rendezvous) -> RendezvousHandler:
    """Return the handler of a rendezvous. Waits until its host can be reached.

    Raises:
        TimeoutError: The host cannot be reached within JOIN_SECONDS.
        Exception: torch could not connect to the host.
    """
    host, port = rendezvous.host, int(rendezvous.rdzv_endpoint.rpartition(":")[2])
    if rendezvous.rdzv_backend == LOCAL:
        return LocalRendezvous(host, port, 0, 1, rendezvous.run_id, JOIN_SECONDS)
    configs = {"rank": rendezvous.node_rank, "timeout": JOIN_SECONDS}
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
