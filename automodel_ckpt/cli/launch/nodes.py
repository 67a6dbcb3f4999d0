"""The rendezvous of a launcher: counts attempts, reports a long wait, and ends the wait on a signal."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from automodel_ckpt.cli.launch.failures import FailureDirectory, verdict
from automodel_ckpt.cli.launch.topology import Rendezvous
from automodel_ckpt.distributed.network import is_known
from automodel_ckpt.errors import EXIT_STOPPED

WORD_SECONDS = 15.0
"""After so long a wait for other machines is told."""


class StoppedRendezvous(BaseException):
    """A signal came while there were no ranks to stop. No Exception: torch's rendezvous catches those, to try again."""


class LauncherRendezvous:
    """A launcher's :class:`~automodel_ckpt.distributed.rendezvous.Host`."""

    def __init__(self, meet: Rendezvous) -> None:
        self.failure_dir: FailureDirectory | None = None
        """That of the ranks; its attempt is the number of meetings before."""
        self.received = 0
        """The signal that asked for a stop."""
        self.is_waiting = False
        self._meet = meet

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        with self.waiting():
            yield
        if self.failure_dir is not None:
            self.failure_dir.attempt += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a stop raises :class:`StoppedRendezvous`; on a single machine nothing is waited for."""
        if self._meet.max_nodes == 1:
            yield
            return
        word = threading.Timer(WORD_SECONDS, self.tell)
        word.daemon = True
        word.start()
        try:
            self.is_waiting = True
            if self.received:
                raise StoppedRendezvous
            yield
        finally:
            self.is_waiting = False
            word.cancel()
            word.join()  # ranks are forked next: no thread may hold a lock

    def stop(self, number: int) -> None:
        """A signal came: end a wait, in the main thread."""
        self.received = self.received or number
        if self.is_waiting:
            self.is_waiting = False
            raise StoppedRendezvous

    def joining_nodes(self) -> None:
        if self.failure_dir is not None:
            self.failure_dir.note_joining_nodes()

    def tell(self) -> None:
        """Report which nodes the launcher waits for."""
        least, most = self._meet.min_nodes, self._meet.max_nodes
        machines = str(most) if least == most else f"{least} to {most}"
        name = "" if self._meet.run_id == "none" else f" (run {self._meet.run_id})"
        host = self._meet.rdzv_endpoint.rpartition(":")[0].strip("[]")
        unknown = "" if is_known(host) else f"; the host name {host} cannot be resolved"
        place = f"{self._meet.rdzv_endpoint}{name}"
        text = f"{self._why()}waiting for other nodes at {place}: {machines} nodes are required{unknown}\n"
        os.write(2, text.encode())  # no lock of a stream, which a fork would copy

    def _why(self) -> str:
        """The failure that this restart follows, as a line; nothing at a run's beginning, or where machines come."""
        attempts = self.failure_dir.attempts() if self.failure_dir is not None else []
        failed = (
            verdict(self.failure_dir.records(attempts[-1]))
            if self.failure_dir is not None and attempts
            else None
        )
        return (
            f"{failed.message}\n"
            if failed is not None and failed.primary and failed.code != EXIT_STOPPED
            else ""
        )
