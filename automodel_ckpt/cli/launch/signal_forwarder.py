"""Forward the signals of the launcher to the ranks that it forked.

Ranks that get a signal save and return 75, which may take long. Torch's agent would end them after a few seconds.
Therefore the agent handles only SIGQUIT, and this module the signals that stop a run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import Any, NoReturn

from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.failures import printed_failure, root_cause
from automodel_ckpt.cli.launch.process_state import has_ended
from automodel_ckpt.cli.launch.rendezvous_host import RendezvousHost
from automodel_ckpt.errors import EXIT_DONE, EXIT_INTERNAL
from automodel_ckpt.parallel.ranks.stop import SAME_SIGNAL_SECONDS, stop_request


class SignalForwarder:
    """Forwards this process's signals to the ranks while it is entered. A second signal ends a run without ranks.

    *failure_dir* is the directory of the ranks, whose process ids it has; set it again for each new launch. *received*
    is the first signal, or 0. If there was one, further signals are ignored afterwards, until another run: the exit
    code of a run that was stopped must not change while this process ends.
    """

    def __init__(self, failure_dir: FailureDirectory, rendezvous_host: RendezvousHost) -> None:
        self.received = 0
        self.failure_dir = failure_dir
        self._rendezvous_host = rendezvous_host
        self._process = os.getpid()
        self._first_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalForwarder:
        for number in stop_request().signals:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, _ignore if self.received else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # This is a rank that has not installed its own handlers yet.
            stop_request().note(number)
            return
        # Record the signal before listing the processes: a rank that registers meanwhile reads it from the directory.
        self.failure_dir.record_signal(number)
        is_second = self.received and time.monotonic() - self._first_at >= SAME_SIGNAL_SECONDS
        if not self.received:
            self.received, self._first_at = number, time.monotonic()
            stop_request().note(number)
        has_ranks = False
        for process in self.failure_dir.processes(self.failure_dir.last_attempt()).values():
            if _send(process, number):
                has_ranks = True
        if is_second and not has_ranks:
            self._exit_immediately(number)
        # Last, since both may raise: the ranks have got the signal.
        self._rendezvous_host.stop(number)
        stop_request().wake(number, frame)

    def _exit_immediately(self, number: int) -> NoReturn:
        """End for a second signal when no rank runs. If all ranks were done, their exit code is kept."""
        failure_dir = self.failure_dir
        attempt = failure_dir.last_attempt()
        ranks = failure_dir.processes(attempt)
        cause = root_cause(failure_dir.records(attempt))
        code = cause.code if cause is not None else EXIT_DONE
        are_done = all(failure_dir.is_done(attempt, rank) for rank in ranks)
        if not ranks or not are_done or code == EXIT_INTERNAL:
            sys.stderr.write(f"stopped immediately by a second {signal.Signals(number).name}\n")
            os._exit(128 + number)
        if cause is not None:
            sys.stderr.write(printed_failure(cause, several_ranks=len(ranks) > 1) + "\n")
        os._exit(code)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal after the work is done. SIG_IGN in its place would be taken for nohup's by a later run."""


def _send(process: int, number: int) -> bool:
    """Send a signal; return False if the process has ended."""
    # kill() succeeds for a process that has ended and whose parent has not read its status yet.
    if has_ended(process):
        return False
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return False
    return True
