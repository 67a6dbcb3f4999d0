"""Watch for steps that do not end (section ``hangs``): dump the stacks of all ranks, and name the rank that is late."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from statistics import median
from types import TracebackType

from automodel_ckpt.checkpoint.layout import HANGS
from automodel_ckpt.checkpoint.run.timeline import DATA, STEPS
from automodel_ckpt.config.schema import HangsConfig
from automodel_ckpt.distributed import hang_action, hangs
from automodel_ckpt.distributed.agree import gather_objects
from automodel_ckpt.distributed.hangs import RankState, StackDump, Verdict
from automodel_ckpt.distributed.mesh import RankLayout
from automodel_ckpt.training.timeline import Timeline

log = logging.getLogger("automodel_ckpt")

REPORT = "report.txt"

WINDOW_STEPS = 100
"""Steps over which the waits of ranks are compared."""
_NUM_FIRST_STEPS = 3
"""Steps at the start of a process that compile and allocate, and are no measure of others."""
_MIN_STEPS, _MAX_STEPS = 5, 200
_PAUSE_POLLS = 20
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.2, 15.0
_WORKING = (STEPS, DATA)
_PHASES = {DATA: "waiting for data", STEPS: "in a step"}


class HangWatch:
    """A thread on each rank that notices a step which takes much longer than the median; a context manager.

    Time in saves, validations and start-up does not count. The thread works while the main thread waits in a
    collective. The rank with the lowest number that responds reports what all ranks have written.
    """

    def __init__(
        self, settings: HangsConfig, layout: RankLayout, timeline: Timeline, run: Path
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._timeline = timeline
        self._root = run / HANGS
        self._durations: deque[float] = deque(maxlen=_MAX_STEPS)
        self._num_skipped = 0
        self._completed = 0
        self._worked_before = 0.0
        self._waited = 0.0
        self._window_seconds = 0.0
        self._num_in_window = 0
        self._slow_before: set[int] = set()
        self._reported: set[int] = set()
        self._answered: set[int] = set()
        self._num_overdue = 0
        poll_seconds = settings.min_seconds / 20
        self._poll_seconds = min(max(poll_seconds, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS)
        self._done = threading.Event()
        self._dump: StackDump | None = None
        self._addresses: list[tuple[str, int, int]] = []
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    def __enter__(self) -> HangWatch:
        """Start to watch. A collective."""
        self._worked_before = self._worked()
        if threading.current_thread() is threading.main_thread():
            self._dump = StackDump()
        mine = self._dump.address if self._dump is not None else ("", 0, 0)
        self._addresses = gather_objects(self._layout.gloo_group, mine)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join(_MAX_POLL_SECONDS)
        if self._dump is not None:
            self._dump.close()

    def note_step(self, step: int) -> None:
        """Note that *step* is complete on this rank. A collective, which communicates in every hundredth call."""
        worked = self._worked()
        seconds = worked - self._worked_before
        self._find_stragglers(seconds)
        self._worked_before, self._completed = worked, step
        if self._num_skipped < _NUM_FIRST_STEPS:
            self._num_skipped += 1
        else:
            self._durations.append(seconds)

    def note_wait(self, seconds: float) -> None:
        """Note how long this rank has waited for the others at the collective of a step."""
        self._waited += seconds

    def _find_stragglers(self, seconds: float) -> None:
        """Report ranks that the others waited for in two windows of steps, with the time."""
        self._window_seconds += seconds
        self._num_in_window += 1
        if self._num_in_window < WINDOW_STEPS:
            return
        mine = self._waited / self._num_in_window
        step_seconds = self._window_seconds / self._num_in_window
        self._waited = self._window_seconds = 0.0
        self._num_in_window = 0
        waits = gather_objects(self._layout.gloo_group, mine)
        slow = hangs.stragglers(waits, step_seconds, self._settings.straggler_share)
        again = self._slow_before.intersection(slow)
        self._slow_before = set(slow)
        if not again or not self._layout.is_rank0:
            return
        for rank in sorted(again):
            late = median(waits) - waits[rank]
            log.warning(
                "rank %d is slower than the others: in the last %d steps, they waited %.3g s for it in each step of "
                "%.3g s",
                rank,
                WINDOW_STEPS,
                late,
                step_seconds,
            )

    def _worked(self) -> float:
        return self._timeline.seconds_in(_WORKING)

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        while not self._done.wait(self._poll_seconds):
            # Nothing here may fail a run.
            with contextlib.suppress(Exception):
                self._check()

    def _check(self) -> None:
        step = self._completed + 1
        seconds = self._worked() - self._worked_before
        limit = self._limit()
        is_overdue = limit is not None and seconds > limit
        # Twice: this thread may read the time while the main thread adds to it.
        self._num_overdue = self._num_overdue + 1 if is_overdue else 0
        if step not in self._reported and self._num_overdue >= 2:
            self._reported.add(step)
            self._report(step, seconds)
        elif step not in self._reported:
            self._answer(step)

    def _limit(self) -> float | None:
        if len(self._durations) < _MIN_STEPS:
            return None
        usual = median(list(self._durations))
        return max(self._settings.min_seconds, self._settings.factor * usual)

    def _answer(self, step: int) -> None:
        """Write the state of this rank if another one has found that a step hangs."""
        for number in (step - 1, step, step + 1):
            directory = self._root / f"step_{number}"
            if number not in self._answered and directory.is_dir():
                times = [path.stat().st_mtime for path in directory.glob("rank_*.txt")]
                if max(times, default=0.0) >= self._timeline.started:
                    self._answered.add(number)
                    hangs.write_state(directory, self._state(is_overdue=False))

    def _state(self, *, is_overdue: bool) -> RankState:
        phase = self._timeline.current_phase
        place = hangs.place_of_main_thread()
        return RankState(
            self._layout.rank,
            time.time(),
            self._completed,
            phase,
            self._worked() - self._worked_before,
            hangs.collective_counts(),
            f"{_PHASES.get(phase, phase)}: {place}",
            is_overdue,
        )

    def _report(self, step: int, seconds: float) -> None:
        """Write the state of this rank, wait for those of the others, and report if this is the lowest overdue rank."""
        directory = self._root / f"step_{step}"
        began = time.time()
        mine = self._state(is_overdue=True)
        hangs.write_state(directory, mine)
        states = self._collect(directory, began) | {self._layout.rank: mine}
        notes = self._dump_silent(directory, states)
        if self._layout.rank != min(rank for rank, state in states.items() if state.is_overdue):
            return
        found = hangs.verdict(states, self._layout.world_size, notes, _WORKING)
        if found is None:
            # Another rank saves, for example. Look again later.
            self._reported.discard(step)
            self._num_overdue = -_PAUSE_POLLS
        if found is None or self._completed + 1 != step:
            return
        text = self._text(step, seconds, found, directory)
        report = directory / REPORT
        if report.exists() and report.stat().st_mtime >= self._timeline.started:
            return
        hangs.write_text(directory, REPORT, f"{text}\n")
        if self._settings.restart and hang_action.may_restart(os.environ):
            assert hang_action.restart is not None
            hang_action.restart(text)
        log.error("%s", text)

    def _collect(self, directory: Path, began: float) -> dict[int, RankState]:
        """Wait until all ranks have written their states, at most for a few polls of their threads."""
        # Clocks of nodes differ by less than a minute. A file may be that of an earlier start.
        since = max(self._timeline.started, began - 60.0)
        end = time.monotonic() + 4 * self._poll_seconds + 2.0
        states = hangs.read_states(directory, since)
        while len(states) < self._layout.world_size and time.monotonic() < end:
            time.sleep(self._poll_seconds / 2)
            states = hangs.read_states(directory, since)
        return states

    def _dump_silent(self, directory: Path, states: dict[int, RankState]) -> dict[int, str]:
        """Dump the stacks of processes of this node that do not respond; returns notes about them, by rank."""
        notes = {}
        for rank, address in enumerate(self._addresses):
            if rank in states:
                continue
            stacks, note = hangs.stacks_of(address)
            if note:
                notes[rank] = note
            if stacks:
                hangs.write_text(directory, f"stacks_of_rank_{rank}.txt", stacks)
        return notes

    def _text(self, step: int, seconds: float, found: Verdict, directory: Path) -> str:
        usual = median(list(self._durations))
        return (
            f"step {step} hangs: it takes {seconds:.0f} s, and the median is {usual:.3g} s\n"
            f"  {found.text}\n"
            f"  stacks of all ranks: {directory}"
        )
