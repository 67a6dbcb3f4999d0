"""The launcher's side of a rendezvous: counts attempts, reports a long wait, and ends the wait on a signal.

A launcher whose connection to the host of the rendezvous breaks, or that another node leaves alone while it joins, has
not failed: with restarts left, it joins again (:meth:`RendezvousHost.may_rejoin`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.failures import FINAL_CODES, hang_record, root_cause
from automodel_ckpt.cli.launch.hang_examiner import HangExaminer
from automodel_ckpt.cli.launch.rendezvous_flags import C10D, Rendezvous
from automodel_ckpt.cli.launch.start_watch import StartWatch
from automodel_ckpt.cli.launch.suspended import kill_suspended_ranks
from automodel_ckpt.errors import EXIT_STOPPED
from automodel_ckpt.parallel.ranks.network import is_known

WAIT_REPORT_SECONDS = 15.0
"""How long the launcher waits for other nodes before it reports that it waits."""
REJOIN_SECONDS = 600.0
"""How long a launcher that lost its connection to the other nodes tries to join them again."""
REJOIN_PAUSE_SECONDS = 1.0
ENDING_SECONDS = 120.0
"""How long a launcher waits until the nodes of an earlier run have left the rendezvous that it joins."""


class Handler(Protocol):
    """What the launcher needs of torch's RendezvousHandler."""

    def shutdown(self) -> bool: ...


class RendezvousInterrupted(BaseException):
    """A signal arrived while the launcher waited for other nodes and had no ranks to stop.

    It is not an Exception, because torch's rendezvous catches those and tries again.
    """


class RendezvousHost:
    """A launcher's :class:`~automodel_ckpt.parallel.ranks.rendezvous.Host`.

    *failure_dir* is the directory of the ranks; its ``attempt`` is the number of completed rendezvous minus one.
    *examiner* examines ranks that do not respond, None if there is nothing to examine.
    *received* is the signal that requested a stop, or 0.
    *max_restarts* limits *restarts*, the restarts after failures. Those for joining nodes do not count.
    """

    def __init__(self, rendezvous: Rendezvous, max_restarts: int = 0) -> None:
        self.failure_dir: FailureDirectory | None = None
        self.examiner: HangExaminer | None = None
        self._start_watch = StartWatch()
        self.received = 0
        self.is_waiting = False
        self.max_restarts = max_restarts
        self.restarts = 0
        self._rendezvous = rendezvous
        self._nodes_join = False
        self._kept: Handler | None = None
        self._alone_since = 0.0
        self._has_reported_loss = False

    def begin(self, failure_dir: FailureDirectory) -> None:
        """Begin a launch whose ranks use *failure_dir*, with all restarts."""
        self.failure_dir = failure_dir
        self.restarts = 0

    @contextlib.contextmanager
    def during_rendezvous(self) -> Iterator[None]:
        """Entered during a rendezvous. Counts it when it is complete."""
        with self.waiting():
            yield
        if self.failure_dir is None:
            return
        is_restart = self.failure_dir.attempt >= 0
        if is_restart and not self._nodes_join:
            self.restarts += 1
        self._nodes_join = False
        self._alone_since = 0.0
        self._has_reported_loss = False
        self.failure_dir.attempt += 1

    def may_rejoin(self) -> bool:
        """Whether this launcher, whose agent lost the other nodes, joins them again.

        It needs a restart, and has REJOIN_SECONDS. Its ranks must be able to start again.
        """
        if not self.can_rejoin() or not self.starts_again():
            return False
        self._nodes_join = False
        self._alone_since = self._alone_since or time.monotonic()
        return time.monotonic() - self._alone_since < REJOIN_SECONDS

    def starts_again(self) -> bool:
        """Whether the ranks of this node, which have ended, may start again with those of other nodes.

        They do not if they ended for a reason that a restart cannot fix, or for a signal.
        """
        failure_dir = self.failure_dir
        if failure_dir is None or failure_dir.stop_signals():
            return False
        cause = root_cause(failure_dir.records(failure_dir.attempt))
        is_final = cause is not None and cause.code in FINAL_CODES
        # Ranks that the agent stopped, because it lost the other nodes, end with a final code.
        return not is_final or failure_dir.has_joining_nodes(failure_dir.attempt)

    def may_join_later(self) -> bool:
        """Whether this launcher, which has not joined yet, waits for the end of an earlier run at the same address."""
        if self._rendezvous.rdzv_backend != C10D:
            return False
        if not self._alone_since:
            self._alone_since = time.monotonic()
            text = f"waiting for the end of an earlier run at {self._rendezvous.rdzv_endpoint}"
            os.write(2, f"{text}, for up to {ENDING_SECONDS / 60:.0f} minutes\n".encode())
        return time.monotonic() - self._alone_since < ENDING_SECONDS

    def can_rejoin(self) -> bool:
        """Whether this launcher has a rendezvous that outlives its agent, and a restart left."""
        is_hosted = self._rendezvous.rdzv_backend == C10D
        return is_hosted and self.restarts < self.max_restarts

    def pause(self) -> None:
        """Wait before joining again. Raises :class:`RendezvousInterrupted` for a signal."""
        with self.waiting():
            time.sleep(REJOIN_PAUSE_SECONDS)

    def leave(self, handler: Handler) -> bool:
        """Shut a handler down, unless an agent may follow that uses it."""
        if self.can_rejoin() or self._nodes_join:
            self._kept = handler
            return True
        return handler.shutdown()

    def kept(self) -> Handler | None:
        """Return the handler that :meth:`leave` kept, once."""
        kept, self._kept = self._kept, None
        return kept

    def close(self) -> None:
        """Tell the other nodes that this one does not join again."""
        handler = self.kept()
        if handler is not None:
            handler.shutdown()

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

    def poll(self) -> None:
        """Examine the ranks of this node if their start takes long, or if a step hangs and none of them can."""
        failure_dir = self.failure_dir
        if failure_dir is None:
            return
        self._start_watch.poll(failure_dir)
        if self.examiner is not None:
            self.examiner.poll(lambda: failure_dir.processes(failure_dir.attempt))

    def ranks_forked(self) -> None:
        """Record that the ranks of all nodes have been forked, for which those of this node wait."""
        if self.failure_dir is not None:
            self.failure_dir.mark_forked()

    def joining_nodes(self) -> None:
        """Record that nodes wait to join, before the agent stops the ranks for them."""
        self._nodes_join = True
        self._mark_joining_nodes()

    def lost_connection(self) -> None:
        """Record that the agent stops the ranks for a new rendezvous, if there is one."""
        if self.can_rejoin():
            self._mark_joining_nodes()

    def _mark_joining_nodes(self) -> None:
        if self.failure_dir is None:
            return
        self.failure_dir.mark_joining_nodes()
        attempt = self.failure_dir.attempt
        report = self.examiner.take_report() if self.examiner is not None else ""
        if report:
            rank = min(self.failure_dir.processes(attempt))
            self.failure_dir.write(attempt, hang_record(report, rank))
        if report or not self.failure_dir.is_elastic:
            # The ranks of another node have failed. The agent would wait half a minute for a suspended rank.
            kill_suspended_ranks(self.failure_dir, attempt)

    def report_loss(self) -> None:
        """Report that this launcher joins the other nodes again, unless it did so already."""
        if self._has_reported_loss:
            return
        self._has_reported_loss = True
        minutes = REJOIN_SECONDS / 60
        text = (
            f"the connection to the other nodes broke: joining them again at {self._rendezvous.rdzv_endpoint}, "
            f"for up to {minutes:.0f} minutes"
        )
        os.write(2, f"{self._last_failure()}{text}\n".encode())

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
        if self.failure_dir is None:
            return ""
        failure = root_cause(self.failure_dir.records(self.failure_dir.last_attempt()))
        if failure is None or not failure.primary or failure.code == EXIT_STOPPED:
            return ""
        return f"{failure.message}\n"
