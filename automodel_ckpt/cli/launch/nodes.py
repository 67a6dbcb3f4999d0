"""The launcher's side of a rendezvous: counts attempts, reports a long wait, and ends the wait on a signal."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from automodel_ckpt.cli.launch.failures import FailureDirectory, root_cause
from automodel_ckpt.cli.launch.topology import Rendezvous
from automodel_ckpt.distributed.network import is_known
from automodel_ckpt.errors import EXIT_STOPPED

WAIT_REPORT_SECONDS = 15.0
"""How long the launcher waits for other nodes before it reports that it waits."""


class RendezvousInterrupted(BaseException):
    """A signal arrived while the launcher waited for other nodes and had no ranks to stop.

    It is not an Exception, because torch's rendezvous catches those and tries again.
    """


class RendezvousHost:
    """A launcher's :class:`~automodel_ckpt.distributed.rendezvous.Host`.

    *failure_dir* is the directory of the ranks; its ``attempt`` is the number of completed rendezvous minus one.
    *received* is the signal that requested a stop, or 0.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.failure_dir: FailureDirectory | None = None
        self.received = 0
        self.is_waiting = False
        self._rendezvous = rendezvous

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Entered during a rendezvous. Counts it when it is complete."""
        with self.waiting():
            yield
        if self.failure_dir is not None:
            self.failure_dir.attempt += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Entered while the launcher waits for other nodes: :meth:`stop` raises :class:`RendezvousInterrupted` inside.

        Does nothing on a single node, where no wait is needed.
        """
        if self._rendezvous.max_nodes == 1:
            yield
            return
        timer = threading.Timer(WAIT_REPORT_SECONDS, self.report_wait)
        timer.daemon = True
        timer.start()
        try:
            self.is_waiting = True
            # The signal may have come just before is_waiting was set, when stop() raised nothing.
            if self.received:
                raise RendezvousInterrupted
            yield
        finally:
            self.is_waiting = False
            timer.cancel()
            timer.join()  # ranks are forked next: no thread may hold a lock

    def stop(self, number: int) -> None:
        """Record a signal and end a wait. Called in the main thread, by its signal handler."""
        self.received = self.received or number
        if self.is_waiting:
            self.is_waiting = False
            raise RendezvousInterrupted

    def joining_nodes(self) -> None:
        """Record that nodes wait to join, before the agent stops the ranks for them."""
        if self.failure_dir is not None:
            self.failure_dir.mark_joining_nodes()

    def report_wait(self) -> None:
        """Report which nodes the launcher waits for, after the failure that led to this restart, if any."""
        rendezvous = self._rendezvous
        least, most = rendezvous.min_nodes, rendezvous.max_nodes
        num_nodes = str(most) if least == most else f"{least} to {most}"
        endpoint = rendezvous.rdzv_endpoint
        if rendezvous.run_id != "none":
            endpoint += f" (run {rendezvous.run_id})"
        text = f"waiting for other nodes at {endpoint}: {num_nodes} nodes are required"
        host = rendezvous.rdzv_endpoint.rpartition(":")[0].strip("[]")
        if not is_known(host):
            text += f"; the host name {host} cannot be resolved"
        # os.write takes no lock of a stream, which a fork would copy in its locked state.
        os.write(2, f"{self._last_failure()}{text}\n".encode())

    def _last_failure(self) -> str:
        """Return the failure that led to this restart, as a line.

        Returns an empty text at the first start, or if ranks were restarted because nodes joined.
        """
        if self.failure_dir is None or not self.failure_dir.attempts():
            return ""
        failure = root_cause(self.failure_dir.records(self.failure_dir.attempts()[-1]))
        if failure is None or not failure.primary or failure.code == EXIT_STOPPED:
            return ""
        return f"{failure.message}\n"
