"""Threads of a rank that watch its peers (the other ranks of its node) and other nodes, and end it when one has failed.

They are needed because a backend may not detect the failure, or the rank may be busy elsewhere.
The docstring of :mod:`automodel_ckpt.cli.launch.forked_rank` describes how ranks end together.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable
from itertools import count

from automodel_ckpt.cli.launch.failure_channel import FailureChannel, receive_failure
from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.failures import (
    FINAL_CODES,
    SECOND_SIGNAL_CODE,
    FailureRecord,
    terminated_record,
    unreachable_node_record,
)
from automodel_ckpt.cli.launch.process import exit_now, is_local_rank_0, print_message
from automodel_ckpt.cli.launch.process_state import has_ended
from automodel_ckpt.cli.launch.store_linger import hang_grace_seconds, unreachable_grace_seconds
from automodel_ckpt.cli.launch.suspended import kill_suspended_ranks, suspension_warnings
from automodel_ckpt.errors import EXIT_INTERNAL, EXIT_STOPPED
from automodel_ckpt.parallel.ranks.keepalive import keep_connection, listen, serve_connections
from automodel_ckpt.parallel.ranks.stop import stop_request

PEER_GRACE_SECONDS = 10.0
"""How long a rank may take to end after another one has failed."""
DEATH_NOTICE_SECONDS = 2.0
"""How long a rank may take to notice that another one died without a failure record."""
POLL_SECONDS = 0.5
CHANNEL_POLLS = 4
"""The failure channel is read once in so many polls: it asks another node."""


def watch_peers(
    failure_dir: FailureDirectory,
    attempt: int,
    rank: int,
    done: threading.Event,
    channel: FailureChannel | None,
) -> None:
    """Watch the other ranks of this node until *done*, and end this rank when one has failed. Runs in a thread.

    The thread of local rank 0 also receives failures from other nodes.
    """
    num_polls_suspended: Counter[int] = Counter()
    for poll in count(1):
        if done.wait(POLL_SECONDS):
            return
        if poll % CHANNEL_POLLS == 0 and is_local_rank_0():
            receive_failure(channel, failure_dir, attempt)
        processes = failure_dir.processes(attempt)
        for warning in suspension_warnings(processes, rank, num_polls_suspended):
            print_message(warning)
        if not stop_request().elsewhere and _stopped_before_training(failure_dir, attempt, rank):
            stop_request().follow()
        failed = failed_peer(failure_dir, attempt, rank)
        if failed is not None:
            reason = f"rank {failed} failed"
        elif _others_restart(failure_dir, attempt):
            reason = "ranks of another node failed"
        else:
            continue
        if not _ends_in_time(failure_dir, attempt, rank, done):
            failure_dir.write(attempt, _terminated(rank, reason))
            kill_suspended_ranks(failure_dir, attempt)
            exit_now(EXIT_INTERNAL)


def watch_nodes(failure_dir: FailureDirectory, attempt: int, rank: int) -> None:
    """Report a node that does not respond, so that the ranks of this node end. Runs in a thread of local rank 0.

    All nodes connect to rank 0, which reports the failure to the others.
    """
    channel = FailureChannel.of_this_rank(os.environ)
    assert channel is not None

    def report_unreachable(other: int, seconds: float) -> None:
        record = unreachable_node_record(other, seconds)
        if rank == 0:
            channel.report(record)
        failure_dir.write(attempt, record)

    if rank == 0:
        listener, token = listen(), secrets.token_hex(16)
        while not channel.publish_keepalive(listener.getsockname()[1], token):
            time.sleep(POLL_SECONDS)
        # Does not return: on rank 0, nothing of this function is left to do.
        serve_connections(listener, token, report_unreachable)
    while (published := channel.keepalive()) is None:
        time.sleep(POLL_SECONDS)
    keep_connection(*published, rank, report_unreachable)


def end_with_failed_peer(failure_dir: FailureDirectory, attempt: int, rank: int) -> None:
    """End this rank, which has returned its code, if a peer dies or fails before it returns one. Runs in a thread.

    A rank that is done ignores signals, so that they do not change its code. The agent would wait 30 seconds for it.
    """
    while not _is_ended_by_agent(failure_dir, attempt, rank):
        time.sleep(POLL_SECONDS)
    exit_now(EXIT_INTERNAL)


def _is_ended_by_agent(failure_dir: FailureDirectory, attempt: int, rank: int) -> bool:
    """Whether the agent ends the ranks of this node because another one, or one of another node, has failed."""
    if failure_dir.has_joining_nodes(attempt):
        return True
    failed = {
        record.rank for record in failure_dir.records(attempt) if record.code not in FINAL_CODES
    }
    for peer, process in failure_dir.processes(attempt).items():
        if peer == rank or not has_ended(process):
            continue
        if not failure_dir.is_done(attempt, peer):
            return True
        # Without a signal, the agent may have taken its code for a success.
        if peer in failed and stop_request().requested:
            return True
    return False


def _others_restart(failure_dir: FailureDirectory, attempt: int) -> bool:
    """Whether the agent ends the ranks of this node because those of another one have failed."""
    # With a range of --nnodes, new nodes may join, and the ranks have to save.
    return not failure_dir.is_elastic and failure_dir.has_joining_nodes(attempt)


def _ends_in_time(
    failure_dir: FailureDirectory, attempt: int, rank: int, done: threading.Event
) -> bool:
    """Wait for *done* after another rank has failed or died, as long as this rank may take to end."""
    records = failure_dir.records(attempt)
    if not any(record.rank != rank for record in records):
        if done.wait(DEATH_NOTICE_SECONDS):
            return True
        # Without a failure record, it has nothing to close: it waits for other ranks, or its step cannot be used.
        if not any(record.rank == rank for record in failure_dir.records(attempt)):
            return False
    return done.wait(_grace_seconds(records))


def _grace_seconds(records: Iterable[FailureRecord]) -> float:
    """How many seconds a rank has to end after failures of other ranks that wrote *records*."""
    grace = PEER_GRACE_SECONDS
    for record in records:
        if record.code > SECOND_SIGNAL_CODE:
            grace = 0.0
        elif record.node_unreachable:
            grace = min(grace, unreachable_grace_seconds())
        elif record.is_hang:
            grace = min(grace, hang_grace_seconds())
    return grace


def _stopped_before_training(failure_dir: FailureDirectory, attempt: int, rank: int) -> bool:
    """Whether another rank of this node was stopped before training."""
    records = failure_dir.records(attempt)
    return any(record.rank != rank and not record.was_training for record in records)


def failed_peer(failure_dir: FailureDirectory, attempt: int, rank: int) -> int | None:
    """Return a rank of this node that failed or died; None if there is none.

    A rank that a signal stopped during training has not failed.
    """
    for record in failure_dir.records(attempt):
        if record.rank != rank and not record.stopped_in_training:
            return record.rank
    dead = dead_peers(failure_dir, attempt, rank)
    if not dead:
        return None
    failure_dir.mark_vanished(attempt)
    return dead[0]


def dead_peers(failure_dir: FailureDirectory, attempt: int, rank: int) -> list[int]:
    """Return the ranks of this node whose processes ended before they were done."""
    dead = []
    for peer, process in failure_dir.processes(attempt).items():
        if peer != rank and has_ended(process) and not failure_dir.is_done(attempt, peer):
            dead.append(peer)
    return dead


def unless_ended_by_agent(
    failure_dir: FailureDirectory, attempt: int, record: FailureRecord
) -> FailureRecord:
    """Return *record*, or that of a terminated rank if its signal came from the agent, because another rank failed.

    Before training, a rank takes every signal for a stop. The record of a stop would end the run on all nodes.
    """
    is_early_stop = record.code == EXIT_STOPPED and record.primary and not record.was_training
    if not is_early_stop or failure_dir.stop_signals():
        return record
    if _others_restart(failure_dir, attempt):
        return _terminated(record.rank, "ranks of another node failed")
    failure_dir.mark_vanished(attempt)
    others = [*failure_dir.records(attempt), *failure_dir.vanished_ranks(attempt)]
    failed = [
        each.rank for each in others if each.code != EXIT_STOPPED and each.rank != record.rank
    ]
    if not failed:
        return record
    return _terminated(record.rank, f"rank {failed[0]} failed")


def _terminated(rank: int, reason: str) -> FailureRecord:
    return terminated_record(rank, f"rank {rank} was terminated because {reason}")
