"""The launcher of a run whose ranks it forks: start the ranks of this node, and report how the run ended.

This process imports torch, transformers and the recipe's class, and then forks, so that the ranks start immediately.
Before the fork it computes nothing and does not initialize CUDA, because neither survives a fork. Torch's elastic agent
watches and restarts the ranks (:mod:`automodel_ckpt.cli.launch.elastic_agent`).
:mod:`automodel_ckpt.cli.launch.forked_rank` describes how ranks end.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from automodel_ckpt.checkpoint.files.layout import HANGS
from automodel_ckpt.cli.launch.elastic_agent import (
    EarlierRunEnds,
    LostOtherNodes,
    launch_config,
    rendezvous_error,
    run_agent,
)
from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.failures import (
    FailureRecord,
    name_silent_ranks,
    printed_failure,
    root_cause,
)
from automodel_ckpt.cli.launch.gpu_properties import without_initializing_cuda
from automodel_ckpt.cli.launch.hang_examiner import HangExaminer
from automodel_ckpt.cli.launch.memory_rescue import keep_memory
from automodel_ckpt.cli.launch.node_resources import cores, count_ranks, set_threads, visible_gpus
from automodel_ckpt.cli.launch.process import print_message, report_stop
from automodel_ckpt.cli.launch.recipe_import import (
    Prepare,
    configure_torch,
    import_before_forks,
    validate_cuda_not_initialized,
    validate_no_autograd_threads,
)
from automodel_ckpt.cli.launch.rendezvous_flags import LOCAL, Rendezvous
from automodel_ckpt.cli.launch.rendezvous_host import RendezvousHost, RendezvousInterrupted
from automodel_ckpt.cli.launch.shared_directory import scratch_directory
from automodel_ckpt.cli.launch.signal_forwarder import SignalForwarder
from automodel_ckpt.cli.launch.worker import Loaded, RecipeClass
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.errors import EXIT_DONE, EXIT_INTERNAL
from automodel_ckpt.parallel.ranks.hangs import poll_seconds
from automodel_ckpt.parallel.ranks.stop import StoppedWaiting, stop_request

MAX_LAUNCHES = 3
"""How often the ranks of a single node are started if they cannot connect to each other."""


def run_forked(flags: LaunchFlags, rendezvous: Rendezvous, prepare: Prepare) -> int:
    """Fork the ranks of this node and return the exit code of the run. Raises :class:`StoppedWaiting` for a signal."""
    host = RendezvousHost(rendezvous)
    with (
        scratch_directory() as directory,
        SignalForwarder(FailureDirectory(directory), host) as signals,
        ExitStack() as until_end,
    ):
        # torch reads the number of threads at its import, before it can count the GPUs.
        set_threads(os.environ, _estimated_ranks(flags.nproc_per_node))
        configure_torch(os.environ)
        with stop_request().interrupting():
            loaded, recipe_class = import_before_forks(prepare)
        torch = importlib.import_module("torch")
        section = getattr(loaded.config, "distributed", None)
        on_gpu = getattr(section, "backend", None) != "gloo"
        # torch's agents count the GPUs, too, before they fork ranks.
        until_end.enter_context(without_initializing_cuda())
        num_ranks = count_ranks(flags.nproc_per_node, torch.cuda.device_count(), on_gpu=on_gpu)
        validate_cuda_not_initialized(torch)
        validate_no_autograd_threads()
        # A signal after the imports: no rank exists yet that it could be sent to.
        if signals.received:
            raise StoppedWaiting
        host.examiner = _hang_examiner(loaded, rendezvous)
        host.max_restarts = rendezvous.max_restarts(flags.max_restarts)
        for launch in range(1, MAX_LAUNCHES + 1):
            # One per launch: records of ranks that could not connect must not count later.
            failure_dir = FailureDirectory(
                directory / f"launch_{launch}", is_elastic=rendezvous.is_elastic
            )
            signals.failure_dir = failure_dir
            host.begin(failure_dir)
            try:
                codes, deaths = _run_agents(
                    loaded, recipe_class, rendezvous, num_ranks, failure_dir, host
                )
            except RendezvousInterrupted:
                if failure_dir.attempt >= 0:
                    keep_memory(loaded, EXIT_INTERNAL)
                return report_stop(signals.received, "while waiting for the other nodes")
            finally:
                host.close()
            # Only on one node: the launchers of other nodes do not take part in this loop.
            may_repeat = rendezvous.rdzv_backend == LOCAL and not signals.received
            if launch == MAX_LAUNCHES or not may_repeat or not _never_connected(failure_dir):
                break
            print_message("the ranks could not connect to each other: starting them again")
        code = _report_outcome(
            failure_dir, codes, deaths, num_ranks=num_ranks, num_nodes=rendezvous.max_nodes
        )
        keep_memory(loaded, code)
        return code


def _estimated_ranks(requested: str) -> int:
    """Estimate the number of ranks on this node for ``--nproc-per-node`` without torch."""
    if requested.isdigit():
        return int(requested)
    if requested == "cpu":
        return cores()
    return visible_gpus(os.environ) or cores()


def _hang_examiner(loaded: Loaded, rendezvous: Rendezvous) -> HangExaminer | None:
    """Return what examines ranks of this node when a step hangs; None without the section ``hangs`` or other nodes."""
    settings = getattr(loaded.config, "hangs", None)
    if settings is None or rendezvous.max_nodes == 1:
        return None
    run = Path(with_local_directory(loaded.config).checkpoint.checkpoint_dir)
    return HangExaminer(run / HANGS, poll_seconds(settings.min_seconds))


def _run_agents(
    loaded: Loaded,
    recipe_class: RecipeClass,
    rendezvous: Rendezvous,
    num_ranks: int,
    failure_dir: FailureDirectory,
    host: RendezvousHost,
) -> tuple[dict[int, int], list[FailureRecord]]:
    """Run the ranks with :func:`run_agent`, again whenever this launcher lost the other nodes and may rejoin them.

    It also runs them again if those of another node fail after they have ended, and it tries again while the nodes of
    an earlier run leave the rendezvous, as they do if a scheduler starts a node anew before the others have ended.
    """
    ours = importlib.import_module("automodel_ckpt.parallel.ranks.rendezvous")
    max_restarts = host.max_restarts
    while True:
        config = launch_config(rendezvous, num_ranks, max_restarts, failure_dir, host)
        try:
            return run_agent(loaded, recipe_class, rendezvous, config, failure_dir)
        except ours.OtherNodesStartAgain:
            max_restarts = host.max_restarts - host.restarts
            continue
        except EarlierRunEnds as ends:
            if not host.may_join_later():
                raise rendezvous_error(rendezvous, ends.error) from ends.error
            host.pause()
            continue
        except LostOtherNodes as lost:
            if not host.may_rejoin():
                return {}, [lost.record]
        host.report_loss()
        host.pause()
        # The agent restarts the ranks, which is one of the restarts.
        max_restarts = host.max_restarts - host.restarts - 1


def _never_connected(failure_dir: FailureDirectory) -> bool:
    """Whether the ranks of the last attempt failed because they could not connect to each other."""
    return any(not record.connected for record in failure_dir.records(failure_dir.last_attempt()))


def _report_outcome(
    failure_dir: FailureDirectory,
    codes: Mapping[int, int],
    deaths: list[FailureRecord],
    *,
    num_ranks: int,
    num_nodes: int,
) -> int:
    """Return the exit code of the run; print its root cause if it failed.

    A death that the agent detected counts only if the rank wrote no record. Records of earlier attempts do not count.
    """
    attempt = failure_dir.last_attempt()
    records = failure_dir.records(attempt)
    recorded = {record.rank for record in records}
    silent = [death for death in deaths if death.rank not in recorded]
    cause = root_cause(records + silent)
    if cause is None:
        # Ranks return the codes that a restart cannot fix: the agent takes them for success.
        return max(codes.values(), default=EXIT_DONE)
    if not deaths and set(codes.values()) == {EXIT_DONE}:
        return EXIT_DONE
    started = failure_dir.processes(attempt)
    cause = name_silent_ranks(cause, records, started, is_all=num_nodes == 1)
    # If all ranks failed with the same message, the rank does not matter.
    messages = {record.message for record in records}
    all_failed = len(records) == len(codes or records)
    is_common = len(records) > 1 and len(messages) == 1 and all_failed
    several_ranks = num_ranks * num_nodes > 1 and not is_common
    if any(record.follows_log for record in records):
        # A rank that was killed has no failure record.
        cause = dataclasses.replace(cause, follows_log=True)
    print_message(printed_failure(cause, several_ranks=several_ranks))
    return cause.code or EXIT_INTERNAL
