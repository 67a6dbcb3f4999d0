"""Watch for steps that do not end (section ``hangs``): dump the stacks of all ranks, and name the rank that is late."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.files.layout import HANGS
from automodel_ckpt.checkpoint.memory.requests import ARRIVAL_SECONDS
from automodel_ckpt.checkpoint.run.notes import DATA, STEPS
from automodel_ckpt.config.keys.monitoring import HangsConfig
from automodel_ckpt.logs.timeline import Timeline
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.parallel.ranks import hangs
from automodel_ckpt.parallel.ranks.agree import gather_or_raise
from automodel_ckpt.parallel.ranks.hangs import (
    ProcessAddress,
    RankState,
    StackDump,
    report_on,
)
from automodel_ckpt.parallel.ranks.stop import StopRequest

log = logging.getLogger("automodel_ckpt")

_MIN_STEPS, _MAX_STEPS = 8, 200
"""The steps that the median needs, and is of: the first ones of a process compile and allocate."""
_PAUSE_POLLS = 20
_JOIN_SECONDS = 15.0
_WORKING = (STEPS, DATA)
_SUSPENDED_SECONDS = 1.0
"""If a poll is so much late, the process was suspended."""
_STOP_MIN_SECONDS = 60.0
"""In place of a longer ``min_seconds`` after a stop request, which waits for the present step. Launchers leave a run at
least two minutes."""
_TIMEOUT_SHARE = 2 / 3
"""A step with nothing to compare it with hangs if a rank waits in it for this share of the timeout of collectives."""
_PHASES = {DATA: "waiting for data", STEPS: "in a step"}


class HangWatch:
    """A thread on each rank that notices a step which takes much longer than usual; a context manager.

    Time in saves, validations and start-up does not count, nor does the wait for the data of the first step: a stream
    may have to go to its position. Neither does the time in which this process is suspended: if a rank is suspended
    alone, the others report it, and if all are, none is late. The first steps of a run may take long, but a rank must
    not wait in a collective for most of its timeout. The thread works while the main thread waits in a collective. The
    rank with the lowest number that responds reports what all ranks have written.
    """

    def __init__(self, loop: Any) -> None:
        """*loop* is the training loop. The stacks are written to its run directory.

        After a stop request, a hang is found sooner, and ends the run.
        """
        checkpointer: Checkpointer = loop.checkpointer
        self._settings: HangsConfig = loop.config.hangs
        self._layout: RankLayout = loop.layout
        self._timeline: Timeline = loop.run_log.timeline
        self._root = checkpointer.directory / HANGS
        # Until all ranks see a file: nodes without shared storage send each other what they write.
        self._arrival_seconds = ARRIVAL_SECONDS if checkpointer.nodes is not None else 0.0
        self._stop_request: StopRequest = loop.stop_request
        self._has_noticed_stop = False
        self._step_seconds: deque[float] = deque(maxlen=_MAX_STEPS)
        self._completed = 0
        self._worked_before = 0.0
        self._timeout_seconds: float = 60 * loop.config.distributed.timeout_minutes
        self._collectives: dict[str, int] = {}
        self._worked_at_collective = 0.0
        """The time in steps when this rank was last seen to begin a collective."""
        self._times_guard = threading.Lock()
        """Held while the thread changes the two times above, which the main thread sets after each step."""
        self._reported: set[int] = set()
        self._answered: set[int] = set()
        self._num_overdue = 0
        self._done = threading.Event()
        self._dump: StackDump | None = None
        self._addresses: list[ProcessAddress | None] = []
        self.hosts: list[str] = []
        """The names of the nodes of all ranks, once it is entered."""
        self._start = uuid.uuid4().hex
        self._poll_seconds = hangs.poll_seconds(self._settings.min_seconds)
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    def __enter__(self) -> HangWatch:
        """Start to watch. A collective."""
        self._worked_before = self._worked_at_collective = self._worked()
        # It needs a temporary file, which a rank may not be able to create.
        gathered = gather_or_raise(self._layout.gloo_group, self._describe)
        self._addresses = [address for address, _, _ in gathered]
        self.hosts = [host for _, host, _ in gathered]
        self._start = gathered[0][2]
        self._thread.start()
        return self

    def _describe(self) -> tuple[ProcessAddress | None, str, str]:
        """Return the address of this process, which dumps its stacks from here on, its host, and an id of the start."""
        address = None
        if threading.current_thread() is threading.main_thread():
            self._dump = StackDump()
            address = self._dump.address
        return address, socket.gethostname(), self._start

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(_JOIN_SECONDS)
        if self._dump is not None:
            self._dump.close()

    def note_step(self, step: int) -> None:
        """Note that *step* is complete on this rank."""
        with self._times_guard:
            self._step_seconds.append(self._worked() - self._worked_before)
            self._worked_before, self._completed = self._worked(), step

    def _worked(self) -> float:
        return self._timeline.seconds_in(_WORKING if self._step_seconds else (STEPS,))

    @property
    def _usual(self) -> float | None:
        """The median of the steps, which the present one is compared with. None at the start."""
        times = list(self._step_seconds)
        return median(times) if len(times) >= _MIN_STEPS else None

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        while True:
            seconds, begin = self._poll_seconds, time.monotonic()
            if self._done.wait(seconds):
                return
            try:
                self._leave_out(time.monotonic() - begin - seconds)
                self._check()
            except Exception:
                # Nothing here may fail a run.
                log.debug("the watch for steps that hang failed", exc_info=True)

    def _leave_out(self, seconds: float) -> None:
        """Do not count *seconds* in which this thread could not run as a part of the present step."""
        if seconds < _SUSPENDED_SECONDS:
            return
        with self._times_guard:
            worked = self._worked()
            # At most to now: the step may have begun later, or the process was suspended in a save.
            self._worked_before = min(self._worked_before + seconds, worked)
            self._worked_at_collective = min(self._worked_at_collective + seconds, worked)

    def _check(self) -> None:
        step = self._completed + 1
        if self._stop_request.wanted and not self._has_noticed_stop:
            self._has_noticed_stop = True
            # A hang that was only reported ends the run now.
            self._reported.clear()
        seconds = self._seconds()
        is_overdue = seconds > self._limit()
        # Twice: this thread may read the time while the main thread adds to it.
        self._num_overdue = self._num_overdue + 1 if is_overdue else 0
        if step not in self._reported and self._num_overdue >= 2:
            self._reported.add(step)
            self._report(step, seconds)
        elif step not in self._reported:
            self._answer(step)

    def _limit(self) -> float:
        usual, least = self._usual, self._settings.min_seconds
        if self._stop_request.wanted:
            least = min(least, _STOP_MIN_SECONDS)
        if usual is not None:
            return max(least, self._settings.factor * usual)
        return max(least, _TIMEOUT_SHARE * self._timeout_seconds)

    def _seconds(self) -> float:
        """The seconds of the present step, or, with nothing to compare them with, since it began a collective."""
        worked = self._worked()
        if self._usual is not None:
            return worked - self._worked_before
        collectives = hangs.collective_counts()
        if collectives != self._collectives:
            self._collectives, self._worked_at_collective = collectives, worked
        return worked - max(self._worked_before, self._worked_at_collective)

    def _answer(self, step: int) -> None:
        """Write the state of this rank if another one has found that a step hangs."""
        for number in (step - 1, step, step + 1):
            directory = self._root / f"step_{number}"
            if number not in self._answered and hangs.read_states(directory, self._start):
                self._answered.add(number)
                hangs.write_state(directory, self._state(is_overdue=False))

    def _state(self, *, is_overdue: bool) -> RankState:
        phase = self._timeline.current_phase
        place = hangs.place_of_main_thread()
        return RankState(
            self._layout.rank,
            self._start,
            self._completed,
            phase,
            self._worked() - self._worked_before,
            hangs.collective_counts(),
            f"{_PHASES.get(phase, phase)}: {place}",
            is_overdue,
        )

    def _report(self, step: int, seconds: float) -> None:
        """Write the state of this rank and wait for the other ranks' states. Only the lowest overdue rank reports."""
        directory = self._root / f"step_{step}"
        mine = self._state(is_overdue=True)
        hangs.write_state(directory, mine)
        states = self._collect(directory) | {self._layout.rank: mine}
        overdue = [rank for rank, state in states.items() if state.is_overdue]
        silent = [rank for rank in range(self._layout.world_size) if rank not in states]
        notes = self._examine(directory, silent, overdue)
        if self._layout.rank != min(overdue):
            return
        found = hangs.verdict(states, range(self._layout.world_size), notes, _WORKING, self.hosts)
        # With nothing to compare the step with, another rank must have waited for those that are late: all may compile
        # for as long as they want.
        late = set() if found is None else set(found.ranks)
        if found is None or (self._usual is None and (not late or set(overdue) <= late)):
            # Another rank saves, for example, or compiles. Look again later.
            self._reported.discard(step)
            self._num_overdue = -_PAUSE_POLLS
            return
        if self._completed + 1 != step:
            return
        duration = f"no collective has begun for {seconds:.0f} s"
        usual = self._usual
        if usual is not None:
            duration = f"it takes {seconds:.0f} s, and the median is {usual:.3g} s"
        text = f"step {step} hangs: {duration}\n  {found.text}\n  stacks of all ranks: {directory}"
        ends = self._settings.restart and hangs.may_restart(os.environ)
        if self._stop_request.wanted and hangs.restart is not None:
            ends = True
            text += "\n  a stop was requested, which waited for this step: nothing was saved"
        mark = f"start {self._start} {'is restarted' if ends else 'waits'}"
        # A rank with a lower number may have been too slow to write its state, and then reports, too.
        if mark in hangs.read_text(directory / hangs.REPORT):
            return
        hangs.write_text(directory, hangs.REPORT, f"{text}\n  {mark}\n")
        if ends:
            assert hangs.restart is not None
            # The end of this rank can end the process that sends the report to other nodes.
            time.sleep(self._arrival_seconds)
            hangs.restart(text)
        log.error("%s", text)

    def _collect(self, directory: Path) -> dict[int, RankState]:
        """Wait until all ranks have written their states, at most for a few polls of their threads."""
        seconds = 4 * self._poll_seconds + 2.0 + 2 * self._arrival_seconds
        end = time.monotonic() + seconds
        found = hangs.read_states(directory, self._start)
        while len(found) < self._layout.world_size and time.monotonic() < end:
            time.sleep(self._poll_seconds / 2)
            found = hangs.read_states(directory, self._start)
        return found

    def _examine(
        self, directory: Path, silent: Sequence[int], overdue: Sequence[int]
    ) -> dict[int, str]:
        """Find out what the *silent* ranks of this node do. Returns notes about them, by rank.

        Only the lowest of the *overdue* ranks of a node does it: each dump takes a while.
        """
        notes = {}
        here = [rank for rank in overdue if self._is_on_this_node(rank)]
        for rank in silent if min(here) == self._layout.rank else ():
            address = self._addresses[rank]
            report = report_on(address) if address is not None else None
            if report is not None:
                notes[rank] = report.note
                hangs.write_stacks(directory, rank, self._start, report)
        return notes

    def _is_on_this_node(self, rank: int) -> bool:
        address = self._addresses[rank]
        return rank == self._layout.rank or (address is not None and address.is_on_this_node)
