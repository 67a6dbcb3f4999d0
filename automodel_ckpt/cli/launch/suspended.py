"""Suspended ranks: SIGSTOP, a debugger or a job's manager stopped the process, which handles no other signal then."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping

from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.failures import terminated_record
from automodel_ckpt.cli.launch.process_state import is_suspended

SUSPENDED_POLLS = 20
"""A peer must be suspended in so many polls in a row before a warning. Not seconds: the whole job may be suspended."""


def kill_suspended_ranks(failure_dir: FailureDirectory, attempt: int) -> None:
    """Kill the suspended ranks of this node. They cannot handle the agent's SIGTERM, and it would wait 30 seconds."""
    for peer, process in failure_dir.processes(attempt).items():
        if is_suspended(process):
            message = f"rank {peer} was suspended when the other ranks had failed"
            failure_dir.write(attempt, terminated_record(peer, message))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def suspension_warnings(
    processes: Mapping[int, int], rank: int, num_polls: Counter[int]
) -> Iterator[str]:
    """Yield a warning about each suspended rank of this node, once: only a person can continue it.

    The lowest rank that is not suspended warns. *num_polls* counts in how many polls in a row each peer was suspended.
    """
    suspended = set()
    for peer, process in processes.items():
        if peer != rank and is_suspended(process):
            suspended.add(peer)
    for peer in num_polls.keys() - suspended:
        del num_polls[peer]
    num_polls.update(suspended)
    # There is none after a launcher with an error has removed its directory.
    if rank != min(processes.keys() - suspended, default=None):
        return
    for peer in suspended:
        if num_polls[peer] == SUSPENDED_POLLS:
            yield (
                f"warning: rank {peer} (process {processes[peer]}) is suspended; the other ranks wait for it, at most "
                f"distributed.timeout_minutes. `kill -CONT {processes[peer]}` continues it"
            )
