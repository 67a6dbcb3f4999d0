"""Run a rank that the launcher of this package forked. How it ends is in the failure directory.

If only one rank fails, the others may wait for it in a collective. The failed rank writes its failure record, and
*then* leaves its process groups. With gloo, this breaks the connections of the others, which then fail, too. The
launcher (:mod:`automodel_ckpt.cli.launch.agent.elastic_agent`) kills those that have not noticed it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from typing import NoReturn

from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.failures import FailureRecord, hang_record, second_signal_record
from automodel_ckpt.cli.launch.process import exit_now, flush, this_rank
from automodel_ckpt.cli.launch.worker import Loaded, RecipeClass, run_rank
from automodel_ckpt.errors import EXIT_DONE, EXIT_INTERNAL
from automodel_ckpt.logs.start_time import note_process_start
from automodel_ckpt.parallel.ranks import hang_action
from automodel_ckpt.parallel.ranks.stop import stop_request

PR_SET_PDEATHSIG = 1


def launched_rank(
    loaded: Loaded, recipe_class: RecipeClass, failure_dir: FailureDirectory, launcher: int
) -> NoReturn:
    """Run a rank that our launcher (process id *launcher*) forked, and exit with its code."""
    _die_with(launcher)
    # Crashes of libraries print a stack.
    faulthandler.enable()
    rank = this_rank()
    # Importing the packages, which the launcher does once, is a part of the first start.
    note_process_start(os.getpid() if failure_dir.attempt else launcher)
    stop = stop_request()
    stop.on_immediate_end = lambda number: failure_dir.write(second_signal_record(rank, number))
    stop.install()
    # The launcher has blocked them. One that it forwarded meanwhile arrives now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop.signals)
    hang_action.restart = partial(_end_after_hang, failure_dir, rank)
    failures: list[FailureRecord] = []

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
