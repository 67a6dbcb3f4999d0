"""Run the ranks of this node with torch's elastic agent, the engine of ``torch.distributed.run``.

The agent starts the ranks, watches them, and restarts them on all nodes together. Its errors become failure records, or
errors of this package.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from automodel_ckpt.cli.launch.connection_errors import BROKEN_CONNECTION, is_connection_error
from automodel_ckpt.cli.launch.failure_channel import FailureChannel
from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.failures import FailureRecord, death_record, lost_connection_record
from automodel_ckpt.cli.launch.forked_rank import launched_rank
from automodel_ckpt.cli.launch.process import flush
from automodel_ckpt.cli.launch.rendezvous_flags import C10D, Rendezvous
from automodel_ckpt.cli.launch.rendezvous_host import RendezvousHost
from automodel_ckpt.cli.launch.worker import Loaded, RecipeClass
from automodel_ckpt.errors import EXIT_INTERNAL, AutomodelError, Problem, RecipeError, os_problem
from automodel_ckpt.parallel.ranks.network import (
    address_towards,
    hosts_unknowingly,
    is_known,
    is_loopback,
    is_own_address,
)

MONITOR_SECONDS = 0.1
"""How often the agent looks at its ranks."""
SHUTDOWN_SECONDS = 10
"""How long ranks that the agent stops may take to end, before it kills them."""
READ_SECONDS = 20
"""How long the rendezvous may take to answer. torch's agent tries twice, and does not watch its ranks meanwhile."""


class LostOtherNodes(Exception):
    """This launcher lost its connection to the other nodes; *record* states how."""

    def __init__(self, record: FailureRecord) -> None:
        super().__init__(record.message)
        self.record = record


class EarlierRunEnds(Exception):
    """The nodes of an earlier run are still leaving the rendezvous at this address, as *error* shows."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def run_agent(
    loaded: Loaded,
    recipe_class: RecipeClass,
    rendezvous: Rendezvous,
    config: Any,
    failure_dir: FailureDirectory,
) -> tuple[dict[int, int], list[FailureRecord]]:
    """Run the ranks with torch's elastic agent; return their exit codes, or the deaths that the agent detected.

    Raises :class:`LostOtherNodes` if the connection to the other nodes broke, and :class:`EarlierRunEnds` if the
    rendezvous belongs to a run that ends.
    """
    api = importlib.import_module("torch.distributed.launcher.api")
    # Otherwise every rank would print the content of the buffers.
    flush()
    codes: dict[int, int] = {}
    deaths: list[FailureRecord] = []
    try:
        run = api.elastic_launch(config, launched_rank)
        codes = run(loaded, recipe_class, failure_dir, os.getpid())
    except api.ChildFailedError as error:
        for rank, failure in error.failures.items():
            deaths.append(death_record(rank, failure.exitcode, float(failure.timestamp)))
        detected = {death.rank for death in deaths}
        for death in failure_dir.vanished_ranks(failure_dir.attempt):
            if death.rank not in detected:
                deaths.append(death)
        _notify_other_nodes(rendezvous, failure_dir, deaths)
    except api.SignalException as error:
        message = f"ended by {error.sigval.name}"
        deaths.append(FailureRecord(0.0, 0, 128 + error.sigval, message, names_rank=True))
    except AutomodelError:
        raise
    except Exception as error:
        if failure_dir.attempt < 0:
            if is_of_ending_run(error):
                raise EarlierRunEnds(error) from error
            raise rendezvous_error(rendezvous, error) from error
        # No rank has registered: the system could not start them.
        if isinstance(error, OSError) and failure_dir.last_attempt() < 0:
            raise _start_error(error) from error
        record = rendezvous_failure(rendezvous, error)
        if is_connection_error(error):
            raise LostOtherNodes(record) from error
        deaths.append(record)
    return codes, deaths


def _notify_other_nodes(
    rendezvous: Rendezvous, failure_dir: FailureDirectory, deaths: list[FailureRecord]
) -> None:
    """Report the first rank that died without writing a failure record to the other nodes."""
    store = failure_dir.store(failure_dir.attempt)
    recorded = {record.rank for record in failure_dir.records(failure_dir.attempt)}
    silent = [death for death in deaths if death.rank not in recorded]
    if rendezvous.max_nodes > 1 and store is not None and silent:
        first = min(silent, key=lambda death: death.time)
        FailureChannel(store).report(first)


def launch_config(
    rendezvous: Rendezvous,
    num_ranks: int,
    max_restarts: int,
    failure_dir: FailureDirectory,
    rendezvous_host: RendezvousHost,
) -> Any:
    """Return torch's LaunchConfig for the ranks of this node."""
    api = importlib.import_module("torch.distributed.launcher.api")
    ours = importlib.import_module("automodel_ckpt.parallel.ranks.rendezvous")
    ours.register_rendezvous()
    host = rendezvous.rdzv_endpoint.rpartition(":")[0].strip("[]")
    configs: dict[str, Any] = {"host": rendezvous_host}
    if rendezvous.rdzv_backend != C10D:
        configs["master"] = rendezvous.node_rank
    else:
        configs["read_timeout"] = READ_SECONDS
        if hosts_unknowingly(rendezvous.rdzv_endpoint):
            configs["is_host"] = True
        elif not is_known(socket.gethostname()) and not is_own_address(host):
            # torch would look up the name of this node to find out whether it is the host.
            configs["is_host"] = False
    # For ranks that the agent stops because of a signal, or of an error of the agent. After a rank has failed, torch
    # (all versions up to 2.13) waits 30 seconds before it kills the others. torch 2.10 and 2.11 have no
    # shutdown_timeout.
    optional = known_fields(api.LaunchConfig, {"shutdown_timeout": SHUTDOWN_SECONDS})
    return api.LaunchConfig(
        min_nodes=rendezvous.min_nodes,
        max_nodes=rendezvous.max_nodes,
        nproc_per_node=num_ranks,
        run_id=rendezvous.run_id,
        rdzv_backend=ours.NAME,
        rdzv_endpoint=rendezvous.rdzv_endpoint,
        rdzv_configs=configs,
        local_addr=None if is_loopback(host) else address_towards(host),
        max_restarts=max_restarts,
        monitor_interval=MONITOR_SECONDS,
        start_method="fork",
        # SignalForwarder handles the signals that stop a run.
        signals_to_handle="SIGQUIT",
        logs_specs=api.DefaultLogsSpecs(log_dir=str(failure_dir.directory / "agent")),
        **optional,
    )


def known_fields(config_class: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the *settings* that are fields of a dataclass; older versions of torch lack some."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in settings.items() if name in names}


def rendezvous_failure(rendezvous: Rendezvous, error: Exception) -> FailureRecord:
    """Return the record of a launcher that could not join the other nodes again, or whose connection to them broke."""
    where = f"rendezvous {rendezvous.rdzv_backend} at {rendezvous.rdzv_endpoint}"
    api = importlib.import_module("torch.distributed.elastic.rendezvous")
    if isinstance(error, (TimeoutError, api.RendezvousTimeoutError)):
        seconds = importlib.import_module("automodel_ckpt.parallel.ranks.rendezvous").JOIN_SECONDS
        what = f"the other nodes did not join again within {seconds / 60:.0f} minutes"
        hint = "run the same command on all nodes to resume from the newest checkpoint"
    elif isinstance(error, api.RendezvousClosedError):
        what = "another node ended the run"
        hint = "see the log of that node"
    else:
        return lost_connection_record(error, -1, "to the other nodes", where=where)
    problem = Problem(what, where, f"{type(error).__name__}: {error}", hint)
    return FailureRecord(
        time.time(), -1, EXIT_INTERNAL, f"error: {problem}", primary=False, names_rank=True
    )


def is_of_ending_run(error: Exception) -> bool:
    """Whether a rendezvous failed because it was closed, or its host ended, and not because the host is unknown."""
    api = importlib.import_module("torch.distributed.elastic.rendezvous")
    if isinstance(error, api.RendezvousClosedError):
        return True
    cause = error.__cause__
    return is_connection_error(error) and BROKEN_CONNECTION.search(str(cause)) is not None


def rendezvous_error(rendezvous: Rendezvous, error: Exception) -> AutomodelError:
    return RecipeError(
        "the ranks could not be started",
        where=f"rendezvous {rendezvous.rdzv_backend} at {rendezvous.rdzv_endpoint}",
        value=f"{type(error).__name__}: {error}",
        hint="check that the address is the one of this run, that its port is free, and that all nodes were started",
    )


def _start_error(error: OSError) -> AutomodelError:
    """Return the error for a system that cannot start a process or create a semaphore, which needs /dev/shm."""
    hint = "check ulimit -u, the free memory, and that /dev/shm is writable"
    problem = os_problem(error, "the system could not start the ranks", hint=hint)
    return AutomodelError.all_of([problem])
