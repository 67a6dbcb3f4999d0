"""Run a rank that the launcher of this package forked, and end it so that the other ranks end too.

A rank ends in one of two ways:

* If it is done, or with a code that a restart cannot fix (2, 3, 4, 75), it *returns* the code. The elastic agent
  treats every returned value as success: it neither restarts nor signals any rank.
* With code 1, it exits with status 1, so that the agent restarts or ends the ranks.

If only one rank fails, the others wait for it in a collective. They detect the failure in one of three ways:

1. The failed rank writes its failure record, and *then* leaves its process groups. With gloo, this breaks the
   connections of the other ranks and raises in their collectives. A rank that fails for this reason finds the record in
   the failure directory, and returns its code if that is final.
2. Each rank has a thread (:mod:`automodel_ckpt.cli.launch.peer_watch`) that looks for records of other ranks, and for
   ranks that died without one. It ends its own rank if that has not ended PEER_GRACE_SECONDS later: a backend may not
   detect the failure (NCCL), or the rank may be busy elsewhere. After a death, it waits only DEATH_NOTICE_SECONDS for a
   rank that has not noticed it, because the others do not need a record of this rank. After a second signal to one
   rank, it does not wait.
3. The agent sends SIGTERM if a rank died, and SIGKILL 30 seconds later.

Ranks of other nodes are notified by :class:`~automodel_ckpt.cli.launch.failure_channel.FailureChannel`, which stores
the failure in the failure directory of their node.

A rank whose connections broke waits SECONDARY_DELAY_SECONDS before it exits, so that the agent reports the rank that
died first. A rank that is restarted although the root cause is final (way 2 exits with 1) returns its code immediately.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.cli.launch import peer_watch
from automodel_ckpt.cli.launch.failure_channel import FailureChannel, receive_failure
from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.failures import (
    FINAL_CODES,
    FailureRecord,
    hang_record,
    printed_failure,
    root_cause,
    second_signal_record,
)
from automodel_ckpt.cli.launch.peer_watch import (
    dead_peers,
    end_with_failed_peer,
    failed_peer,
    unless_ended_by_agent,
    watch_nodes,
    watch_peers,
)
from automodel_ckpt.cli.launch.process import (
    exit_now,
    flush,
    is_local_rank_0,
    print_message,
    restart_count,
    this_rank,
    world_size,
)
from automodel_ckpt.cli.launch.store_linger import (
    default_store,
    hang_grace_seconds,
    serve_failure,
    serve_until_received,
)
from automodel_ckpt.cli.launch.suspended import kill_suspended_ranks
from automodel_ckpt.cli.launch.worker import Loaded, RecipeClass, run_rank
from automodel_ckpt.errors import EXIT_DONE, EXIT_INTERNAL, EXIT_STOPPED
from automodel_ckpt.logs.start_time import note_process_start
from automodel_ckpt.parallel.ranks import hang_action, peers
from automodel_ckpt.parallel.ranks.process_stacks import StackDump
from automodel_ckpt.parallel.ranks.stop import stop_request

SECONDARY_DELAY_SECONDS = 1.0
"""How long a rank whose failure followed from another one's waits for the agent to notice the other one."""
AGENT_POLL_SECONDS = 0.02
FORKS_SECONDS = 10.0
"""How long a rank waits until the launchers have forked all other ranks, before it connects to any store."""
FORKS_POLL_SECONDS = 0.002
JOIN_NOTICE_SECONDS = 3.0
"""How long a stopped rank waits for its agent to report that nodes join."""
JOIN_POLL_SECONDS = 0.1
PR_SET_PDEATHSIG = 1


def launched_rank(
    loaded: Loaded, recipe_class: RecipeClass, failure_dir: FailureDirectory, launcher: int
) -> int:
    """Run a rank that our launcher (process id *launcher*) forked.

    Returns its exit code, or exits; the docstring of this module describes when.
    """
    _die_with(launcher)
    attempt, rank = failure_dir.attempt, this_rank()
    # Importing the packages, which the launcher does once, is a part of the first start.
    note_process_start(os.getpid() if attempt else launcher)
    channel = FailureChannel.of_this_rank(os.environ)
    nodes_joined = failure_dir.has_joining_nodes(attempt - 1)
    earlier = _cause_of_restart(failure_dir, attempt)
    is_final = earlier is not None and earlier.code in FINAL_CODES
    if attempt and (failure_dir.stop_signals() or is_final):
        return earlier.code if earlier else EXIT_INTERNAL
    _register(failure_dir, attempt, rank)
    await_forks(failure_dir, attempt, world_size(), int(os.environ["GROUP_WORLD_SIZE"]))
    if attempt and is_local_rank_0():
        is_elastic = failure_dir.is_elastic
        _report_restart(earlier, nodes_joined=nodes_joined, is_elastic=is_elastic)
    done = threading.Event()
    _start_watches(failure_dir, attempt, rank, channel, done)
    hang_action.restart = partial(_restart_after_hang, failure_dir, attempt, rank, channel)
    failures: list[FailureRecord] = []
    stores: list[Any] = []  # references that keep the ranks' store alive

    def on_failure(record: FailureRecord) -> None:
        record = unless_ended_by_agent(failure_dir, attempt, record)
        outside = stop_request().interrupted and not record.primary and not record.timed_out
        record = replace(record, outside_collective=outside)
        failures.append(record)
        failure_dir.write(attempt, record)
        if channel is not None and not record.stopped_in_training:
            stores.append(default_store())
            if record.primary:
                channel.report(record)

    on_training = _dump_stacks_until_training(failure_dir, attempt, rank)
    code = run_rank(loaded, recipe_class, on_failure, on_training=on_training)
    # The watcher must not end this rank while it waits below.
    done.set()
    # Before this process ends: peers take one that ends without this file for a dead rank.
    failure_dir.mark_done(attempt, rank)
    if stores and rank == 0:
        serve_failure(channel)
    return _end_rank(failure_dir, attempt, code, failures[0] if failures else None, channel)


def _start_watches(
    failure_dir: FailureDirectory,
    attempt: int,
    rank: int,
    channel: FailureChannel | None,
    done: threading.Event,
) -> None:
    """Start the thread that watches the other ranks of this node until *done*, and on local rank 0 that for nodes."""
    watch = (failure_dir, attempt, rank, done, channel)
    threading.Thread(target=watch_peers, args=watch, daemon=True).start()
    if channel is not None and is_local_rank_0():
        nodes = (failure_dir, attempt, rank)
        threading.Thread(target=watch_nodes, args=nodes, daemon=True).start()


def _dump_stacks_until_training(
    failure_dir: FailureDirectory, attempt: int, rank: int
) -> Callable[[], None]:
    """Let the launcher find out where this rank is, until the returned function is called: training begins."""
    dumping = ExitStack()
    # Some containers do not allow files in memory.
    with contextlib.suppress(OSError):
        dumping.enter_context(StackDump())

    def on_training() -> None:
        # The watch over steps has another dump.
        dumping.close()
        # Only a report depends on it.
        with contextlib.suppress(OSError):
            failure_dir.mark_training(attempt, rank)

    return on_training


def _cause_of_restart(failure_dir: FailureDirectory, attempt: int) -> FailureRecord | None:
    """Return the failure that ended the ranks of the attempt before; None if there is none, or it is unknown."""
    if attempt == 0:
        return None
    cause = failure_dir.cause_of_end(attempt - 1)
    if cause is None or not failure_dir.has_joining_nodes(attempt - 1):
        return cause
    # Other records are those of ranks that were stopped because nodes joined.
    is_failure = cause.primary and cause.code != EXIT_STOPPED
    return cause if is_failure else None


def _register(failure_dir: FailureDirectory, attempt: int, rank: int) -> None:
    """Register this process, so that the launcher sends its signals to it.

    The handlers are installed before, and signals that the launcher has already received are read afterwards from the
    failure directory: none is missed.
    """
    stop = stop_request()
    stop.on_immediate_end = lambda number: failure_dir.write(
        attempt, second_signal_record(rank, number)
    )
    peers.find_dead = partial(dead_peers, failure_dir, attempt, rank)
    stop.is_restart = lambda: failure_dir.has_joining_nodes(attempt)
    stop.a_peer_died = lambda: failed_peer(failure_dir, attempt, rank) is not None
    stop.install()
    failure_dir.register_process(attempt, rank)
    if is_local_rank_0():
        failure_dir.record_store(attempt, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    for number in failure_dir.stop_signals()[:1]:
        stop.note(number)


def await_forks(
    failure_dir: FailureDirectory, attempt: int, num_ranks: int, num_nodes: int
) -> None:
    """Wait until the launchers of all nodes have forked their ranks, *num_ranks* in total.

    A thread of one launcher serves the store of the ranks. For each connection it looks up a host name, under a lock of
    the C library that fork() does not reset. A rank that was forked meanwhile inherits the lock in its locked state,
    and its first lookup never returns. So no rank may connect while others are being forked. After FORKS_SECONDS, or a
    signal to the launcher, this returns in any case: a rank that was killed, or that is forked again after the signal,
    does not register, and the launcher of another node may have failed.
    """

    def are_forked() -> bool:
        if num_nodes > 1:
            return failure_dir.has_forked(attempt)
        # Each rank registers when it begins. The launcher would notice later.
        return len(failure_dir.processes(attempt)) >= num_ranks

    end = time.monotonic() + FORKS_SECONDS
    while not are_forked() and not failure_dir.stop_signals():
        if time.monotonic() > end:
            return
        time.sleep(FORKS_POLL_SECONDS)


def _report_restart(earlier: FailureRecord | None, *, nodes_joined: bool, is_elastic: bool) -> None:
    if nodes_joined and earlier is None:
        # Without a range of --nnodes, only nodes whose ranks have failed join again.
        reason = "nodes joined" if is_elastic else "ranks of another node failed"
        print_message(f"{reason}: restarted with {counted(world_size(), 'rank')}")
        return
    reason = "a rank died"
    if earlier and earlier.primary:
        reason = printed_failure(earlier, several_ranks=world_size() > 1)
    total = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
    # The agent counts the failures of its own ranks.
    number = f"restart {restart_count()} of {total}"
    again = f"restarted with {counted(world_size(), 'rank')}" if nodes_joined else number
    print_message(f"{reason}\n{again}")


def _restart_after_hang(
    failure_dir: FailureDirectory,
    attempt: int,
    rank: int,
    channel: FailureChannel | None,
    message: str,
) -> None:
    """End this rank because a step hangs, so that the agent restarts all ranks. Called by a thread."""
    record = hang_record(message, rank)
    if channel is not None:
        channel.report(record)
    failure_dir.write(attempt, record)
    kill_suspended_ranks(failure_dir, attempt)
    # The ranks of this node end after this time, too: one of them may serve the store.
    serve_until_received(channel, hang_grace_seconds())
    exit_now(EXIT_INTERNAL)


def _end_rank(
    failure_dir: FailureDirectory,
    attempt: int,
    code: int,
    failure: FailureRecord | None,
    channel: FailureChannel | None,
) -> int:
    """Return the exit code of a rank that ended with *code*, or exit so that the agent restarts or ends the ranks.

    *failure* is the record of this rank; None if it did not fail. A secondary failure returns the code of the root
    cause, if that is final.
    """
    if failure is not None:
        # run_rank() takes a signal of the agent, which ends this rank, for a stop request.
        code = failure.code
    if failure is not None and not failure.primary and code not in FINAL_CODES:
        _await_agent(SECONDARY_DELAY_SECONDS)
        failure_dir.mark_vanished(attempt)
        receive_failure(channel, failure_dir, attempt)
        cause = root_cause(failure_dir.records(attempt))
        if cause is not None and cause.code in FINAL_CODES:
            return cause.code
    if code not in FINAL_CODES and code != EXIT_DONE:
        kill_suspended_ranks(failure_dir, attempt)
        exit_now(EXIT_INTERNAL)
    if code == EXIT_STOPPED and failure_dir.is_elastic:
        _restart_if_nodes_join(failure_dir, attempt)
    if failure is not None and code != EXIT_STOPPED:
        # The agent waits for all ranks. If others are still in a collective, it ends them and this rank, and would
        # wait 30 seconds for a handler that only notes the signal.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    flush()
    ending = (failure_dir, attempt, this_rank())
    threading.Thread(target=end_with_failed_peer, args=ending, daemon=True).start()
    return code


def _await_agent(seconds: float) -> None:
    """Wait until the agent ends the ranks of this node, because it has noticed a rank that died, at most so long."""
    end = time.monotonic() + seconds
    while not stop_request().requested and time.monotonic() < end:
        time.sleep(AGENT_POLL_SECONDS)


def _restart_if_nodes_join(failure_dir: FailureDirectory, attempt: int) -> None:
    """Exit so that the agent restarts this rank, if the ranks were stopped because nodes join; otherwise return.

    An agent stops its ranks itself, one after the other. The first rank that gets its signal stops all ranks, and other
    nodes' agents may not have noticed yet that nodes join.
    """
    got_signal = bool(stop_request().requested)
    limit = 0.0 if got_signal or failure_dir.stop_signals() else JOIN_NOTICE_SECONDS
    end = time.monotonic() + limit
    while not failure_dir.has_joining_nodes(attempt):
        if time.monotonic() > end:
            return
        time.sleep(JOIN_POLL_SECONDS)
    if not got_signal:
        # Wait for this node's agent to end this process as it ends the others.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(peer_watch.PEER_GRACE_SECONDS)
    exit_now(EXIT_STOPPED)


def _die_with(launcher: int) -> None:
    """Make the kernel kill this process when the launcher dies, even by SIGKILL. Saves are atomic, so this is safe."""
    # The kernel sends it when the thread that forked this process ends (prctl(2)):
    # it has to live as long as the launcher, as its main thread does.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os._exit(EXIT_INTERNAL)
