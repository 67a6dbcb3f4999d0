"""The launcher of a run with forked ranks: start the ranks of this node, and report how the run ended.

This process imports torch, transformers and the recipe's class, and then forks, so that the ranks start immediately.
Before the fork it computes nothing and does not initialize CUDA, because neither survives a fork. Torch's elastic agent
watches and restarts the ranks (:mod:`automodel_ckpt.cli.launch.agent.elastic_agent`).

How a rank ends is in the failure directory. If only one rank fails, the others may wait for it in a collective. The
failed rank writes its failure record, and *then* leaves its process groups. With gloo, this breaks the connections of
the others, which then fail, too. The agent kills those that have not noticed it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import tempfile
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from automodel_ckpt.base.python_child import freeze_in_forked_processes
from automodel_ckpt.cli.launch.failures import (
    FailureDirectory,
    FailureRecord,
    hang_record,
    lost_connection_record,
    name_silent_ranks,
    printed_failure,
    root_cause,
    second_signal_record,
)
from automodel_ckpt.cli.launch.gpu_properties import without_initializing_cuda
from automodel_ckpt.cli.launch.node_resources import cores, count_ranks, set_threads, visible_gpus
from automodel_ckpt.cli.launch.process import exit_now, flush, print_message, report_stop, this_rank
from automodel_ckpt.cli.launch.ranks import Rendezvous
from automodel_ckpt.cli.launch.signal_forwarder import SignalForwarder
from automodel_ckpt.cli.launch.worker import (
    Prepare,
    RecipeClass,
    configure_torch,
    import_recipe,
    keep_memory,
    run_rank,
)
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.errors import (
    EXIT_DONE,
    EXIT_INTERNAL,
    AutomodelError,
    RecipeError,
)
from automodel_ckpt.parallel.ranks import hangs
from automodel_ckpt.parallel.ranks.network import is_known
from automodel_ckpt.parallel.ranks.stop import StoppedWaiting, stop_request

PR_SET_PDEATHSIG = 1
MONITOR_SECONDS = 0.1
"""How often the agent looks at its ranks."""


def launched_rank(
    loaded: LoadedRecipe, recipe_class: RecipeClass, failure_dir: FailureDirectory, launcher: int
) -> NoReturn:
    """Run a rank that our launcher (process id *launcher*) forked, and exit with its code."""
    _die_with(launcher)
    # Crashes of libraries print a stack.
    faulthandler.enable()
    rank = this_rank()
    from automodel_ckpt.logs.timeline import note_process_start

    # Importing the packages, which the launcher does once, is a part of the first start.
    note_process_start(os.getpid() if failure_dir.attempt else launcher)
    stop = stop_request()
    stop.on_immediate_end = lambda number: failure_dir.write(second_signal_record(rank, number))
    stop.install()
    # The launcher has blocked them. One that it forwarded meanwhile arrives now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop.handled)
    hangs.restart = partial(_end_after_hang, failure_dir, rank)
    failures = []

    def on_failure(record: FailureRecord) -> None:
        outside = stop.interrupted and not record.primary and not record.timed_out
        failures.append(record)
        failure_dir.write(replace(record, outside_collective=outside))

    code = run_rank(loaded, recipe_class, on_failure)
    if code == EXIT_DONE or failures[0].stopped_in_training:
        failure_dir.mark_done(rank)
    flush()
    sys.exit(code)


def _end_after_hang(failure_dir: FailureDirectory, rank: int, message: str) -> None:
    """End this rank because a step hangs, so that the launcher restarts all ranks. Called by a thread."""
    failure_dir.write(hang_record(message, rank))
    exit_now(EXIT_INTERNAL)


def _die_with(launcher: int) -> None:
    """Make the kernel kill this process when the launcher dies, even by SIGKILL. Saves are atomic, so this is safe."""
    # The kernel sends it when the thread that forked this process ends (prctl(2)):
    # it has to live as long as the launcher, as its main thread does.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os._exit(EXIT_INTERNAL)


def run_forked(flags: LaunchFlags, rendezvous: Rendezvous, prepare: Prepare) -> int:
    """Fork the ranks of this node and return the exit code of the run. Raises :class:`StoppedWaiting` for a signal."""
    scratch = tempfile.TemporaryDirectory(prefix="ckpt-train-")
    with scratch as directory, SignalForwarder() as signals:
        # torch reads the number of threads at its import, before it can count the GPUs.
        set_threads(os.environ, _estimated_ranks(flags.nproc_per_node))
        configure_torch(os.environ)
        with stop_request().interrupting():
            loaded, recipe_class = import_before_forks(prepare)
        torch = import_module("torch")
        on_gpu = loaded.config.distributed.backend != "gloo"
        with without_initializing_cuda():
            num_gpus = torch.cuda.device_count()
        num_ranks = count_ranks(flags.nproc_per_node, num_gpus, on_gpu=on_gpu)
        validate_cuda_not_initialized(torch)
        # A signal after the imports: no rank exists yet that it could be sent to.
        if signals.received:
            raise StoppedWaiting
        failure_dir = FailureDirectory(Path(directory))
        arguments = (loaded, recipe_class, failure_dir, os.getpid())
        max_restarts = rendezvous.max_restarts(flags.max_restarts)
        try:
            code = _run_agent(rendezvous, num_ranks, max_restarts, arguments, signals)
        except StoppedWaiting:
            if failure_dir.attempt >= 0:
                keep_memory(loaded, EXIT_INTERNAL)
            return report_stop(signals.received, "while waiting for the other nodes")
        keep_memory(loaded, code)
        return code


def import_before_forks(prepare: Prepare) -> tuple[LoadedRecipe, RecipeClass]:
    """Import the recipe's code in a process that forks ranks, and return the recipe and its class.

    Code that reads the properties of a GPU when it is imported, such as bitsandbytes and torchao, does not initialize
    CUDA, which would not survive a fork.
    """

    def prepare_without_cuda() -> tuple[LoadedRecipe, RecipeClass]:
        with without_initializing_cuda():
            return prepare()

    freeze_in_forked_processes()
    return import_recipe(prepare_without_cuda)


def validate_cuda_not_initialized(torch: Any) -> None:
    """Raise :class:`RecipeError` if this process has initialized CUDA, which does not survive a fork."""
    if torch.cuda.is_initialized():
        raise RecipeError(
            "the recipe's code uses a GPU while it is imported; ranks that are forked afterwards cannot use any",
            "recipe, _target_",
            "torch.cuda is initialized",
            "move that code into a function, or start the ranks with torchrun",
        )


def _estimated_ranks(requested: str) -> int:
    """Estimate the number of ranks on this node for ``--nproc-per-node`` without torch."""
    if requested.isdigit():
        return int(requested)
    if requested == "cpu":
        return cores()
    return visible_gpus(os.environ) or cores()


def _run_agent(
    rendezvous: Rendezvous,
    num_ranks: int,
    max_restarts: int,
    arguments: tuple[LoadedRecipe, Any, FailureDirectory, int],
    signals: SignalForwarder,
) -> int:
    """Run the ranks with torch's elastic agent, and return the exit code of the run.

    Raises:
        StoppedWaiting: A signal arrived while no rank was running.
        AutomodelError: The ranks could not be started.
    """
    # It imports torch, which reads variables that are set before.
    agents = import_module("automodel_ckpt.cli.launch.agent.elastic_agent")
    server = import_module("torch.distributed.elastic.agent.server")
    try:
        handler = signals.wait_for(lambda: agents.rendezvous_handler(rendezvous))
        spec = server.WorkerSpec(
            role="default",
            local_world_size=num_ranks,
            rdzv_handler=handler,
            entrypoint=launched_rank,
            args=arguments,
            max_restarts=max_restarts,
            monitor_interval=MONITOR_SECONDS,
            local_addr=agents.local_address(rendezvous),
        )
        agent = agents.RankAgent(spec, arguments[2], signals, _waiting_text(rendezvous))
    except Exception as error:
        raise _start_error(rendezvous, error) from error
    try:
        has_failed, failures = agent.run().is_failed(), agent.failures
    except Exception as error:
        if not agent.ranks:
            raise _start_error(rendezvous, error) from error
        lost = lost_connection_record(error, -1, "to the other nodes", where=_place(rendezvous))
        has_failed, failures = True, [*agent.failures, lost]
    finally:
        handler.shutdown()
    if not failures:
        return EXIT_INTERNAL if has_failed else EXIT_DONE
    return _report(failures, agent.ranks, num_nodes=rendezvous.max_nodes)


def _report(failures: list[FailureRecord], ranks: list[int], *, num_nodes: int) -> int:
    """Print the root cause of a run that failed or was stopped, and return its exit code."""
    cause = root_cause(failures)
    assert cause is not None
    cause = name_silent_ranks(cause, failures, ranks, is_all=num_nodes == 1)
    # If all ranks failed with the same message, the rank does not matter.
    is_common = 1 < len(failures) == len(ranks) and len({each.message for each in failures}) == 1
    several_ranks = len(ranks) * num_nodes > 1 and not is_common
    if any(record.follows_log for record in failures):
        # A rank that was killed has no failure record.
        cause = replace(cause, follows_log=True)
    print_message(printed_failure(cause, several_ranks=several_ranks))
    return cause.code or EXIT_INTERNAL


def _waiting_text(rendezvous: Rendezvous) -> str:
    """Return which nodes the launcher waits for; empty on a single node."""
    least, most = rendezvous.min_nodes, rendezvous.max_nodes
    if most == 1:
        return ""
    num_nodes = str(most) if least == most else f"{least} to {most}"
    endpoint = rendezvous.rdzv_endpoint
    if rendezvous.run_id != "none":
        endpoint += f" (run {rendezvous.run_id})"
    text = f"waiting for other nodes at {endpoint}: {num_nodes} nodes are required"
    host = rendezvous.host
    return text if is_known(host) else f"{text}; the host name {host} cannot be resolved"


def _place(rendezvous: Rendezvous) -> str:
    return f"rendezvous {rendezvous.rdzv_backend} at {rendezvous.rdzv_endpoint}"


def _start_error(rendezvous: Rendezvous, error: Exception) -> AutomodelError:
    if isinstance(error, AutomodelError):
        return error
    return RecipeError(
        "the ranks could not be started",
        _place(rendezvous),
        f"{type(error).__name__}: {error}",
        "check that the address is the one of this run, that its port is free, that all nodes were started, and "
        "whether the system can start processes (ulimit -u, the free memory)",
    )
