"""Measure how a run spends its time: ``timeline.jsonl`` of the run directory, from which ``ckpt goodput`` computes.

Rank 0 is in exactly one phase at each moment, so that the phases of a start add up to its duration. A start has two
lines: one when it begins, one when it ends. A process that is killed writes no second line. Its times are therefore
also in ``.timeline.json``, a small file that is updated in place; the next start writes the line from it.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.checkpoint.files.layout import TIMELINE_LOG, TIMELINE_STATE
from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.run.notes import (
    DATA,
    END,
    FAILED,
    KILLED,
    OTHER,
    PHASES,
    SAVES,
    SLOT_BYTES,
    START,
    STARTUP,
    STEPS,
    VALIDATION,
    read_state,
    read_timeline,
)
from automodel_ckpt.errors import LeaseLost, SaveFailed
from automodel_ckpt.logs.metrics import JsonlLog

# Shorter steps share an update of the state.
_PUBLISH_SECONDS = 0.05

_Item = TypeVar("_Item")
# When this start of the run began, in seconds since 1970. None in a program that calls a recipe.
_noted: float | None = None


def note_process_start(process: int) -> None:
    """Note that this start of the run began when a *process* of this system was started."""
    global _noted
    _noted = _process_start(process)


def _process_start(process: int) -> float:
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        # Field 22 of proc(5) is in clock ticks since the boot.
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    return time.time()


class Timeline:
    """Measures the phases of this start. The main thread of a rank uses it; others may call :meth:`seconds_in`.

    It measures on every rank. Only rank 0 calls :meth:`open`, and so writes files.
    """

    outcome: str = FAILED
    """What ended this start: ``done``, ``stopped`` (by a signal, after saving) or ``failed``."""

    def __init__(self) -> None:
        now = time.time()
        self.started = min(now, _noted or now)
        self.step = 0
        """The newest step that was logged."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase = STARTUP
        self._since = time.monotonic() - (now - self.started)
        self._logged = 0.0
        self._num_steps = 0
        self._identity = uuid.uuid4().hex
        self._log: JsonlLog | None = None
        # Descriptor of the file of the state.
        self._state: int | None = None
        self._num_published = 0
        self._publish_after = 0.0
        # Held while the state changes or is written.
        self._lock = threading.Lock()
        self._closed = threading.Event()

    # ---------------------------------------------------------------- measuring

    def enter(self, phase: str) -> str:
        """End the present phase now, and begin *phase*; returns the one before."""
        now = time.monotonic()
        with self._lock:
            earlier = self._phase
            self._seconds[earlier] += now - self._since
            self._since, self._phase = now, phase
            if now >= self._publish_after or phase in (SAVES, VALIDATION, OTHER):
                self._publish(now)
        return earlier

    @property
    def current_phase(self) -> str:
        return self._phase

    def seconds_in(self, phases: Collection[str]) -> float:
        """Return the seconds in *phases* until now. Another thread may call it, and see a phase twice as it ends."""
        phase, since = self._phase, self._since
        seconds = sum(self._seconds[name] for name in phases)
        return seconds + time.monotonic() - since if phase in phases else seconds

    def seconds_outside(self, phases: Collection[str]) -> float:
        """Return the seconds in complete phases other than *phases*."""
        return sum(value for name, value in self._seconds.items() if name not in phases)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in the phase *name* within the context, and in the present one again afterwards."""
        earlier = self.enter(name)
        try:
            yield
        finally:
            self.enter(earlier)

    def waiting_for(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Yield *items*, and count the time until each as waiting for data. Closing it closes a generator *items*."""
        missing = object()
        try:
            while True:
                with self.phase(DATA):
                    item: Any = next(items, missing)
                if item is missing:
                    return
                yield item
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def seconds_of_step(self, step: int) -> float:
        """Return the seconds of the phase ``steps`` since the last call, for the line of *step* in the log."""
        self.step = step
        self._num_steps += 1
        self.enter(self._phase)
        seconds = self._seconds[STEPS] - self._logged
        self._logged += seconds
        return seconds

    # ---------------------------------------------------------------- files

    def open(
        self,
        directory: Path,
        check_lease: Callable[[], None],
        *,
        step: int,
        resumed_from: str | None,
        world_size: int,
        beat_seconds: float | None = None,
    ) -> None:
        """Write this start to the files in *directory*, and the end of the one before if it was killed.

        The run continues after *step*. *check_lease* raises :class:`LeaseLost` if another run owns the directory. With
        *beat_seconds*, a thread updates the state as often: a phase may be long, and a kill may end it, as it ends a
        step that hangs.
        """
        self.step = step
        log = JsonlLog(directory / TIMELINE_LOG, before_writing=check_lease)
        # The time of a run must not fail it. What cannot be read or written is not recorded.
        with suppress(OSError, LeaseLost, SaveFailed):
            # Removes a torn last line.
            log.truncate_after(math.inf)
            killed = _killed_start(directory)
            if killed is not None:
                log.append(killed)
            begin = {"event": START, "start": self._identity, "time": self.started, "step": step}
            log.append({**begin, "from": resumed_from, "world_size": world_size})
            self._log = log
            path = directory / TIMELINE_STATE
            # A process that still writes to the earlier file does not change this one.
            replace_file(path, b" " * (2 * SLOT_BYTES))
            self._state = open_regular(path, os.O_WRONLY)
        with self._lock:
            self._publish(time.monotonic())
        if beat_seconds is not None and self._state is not None:
            beat = threading.Thread(
                target=self._beat, args=(beat_seconds,), name="timeline", daemon=True
            )
            beat.start()

    def _beat(self, seconds: float) -> None:
        while not self._closed.wait(seconds):
            with self._lock:
                self._publish(time.monotonic())

    def close(self, *, lease_is_lost: bool = False) -> None:
        """Write the line of the end. With *lease_is_lost*, the files belong to another run."""
        self._closed.set()
        self.enter(OTHER)
        if self.outcome != FAILED:
            # What follows the last step is no lost step.
            self._seconds[OTHER] += self._seconds[STEPS] - self._logged
            self._seconds[STEPS] = self._logged
        log, self._log = self._log, None
        if log is not None and not lease_is_lost:
            with suppress(OSError, LeaseLost):
                log.append(self._record(time.monotonic()) | {"outcome": self.outcome})
                log.close()
        with self._lock:
            if self._state is not None:
                os.close(self._state)
                self._state = None

    def _record(self, now: float) -> ValueDict:
        seconds = dict(self._seconds)
        seconds[self._phase] += now - self._since
        return {
            "event": END,
            "start": self._identity,
            "time": self.started + sum(seconds.values()),
            "step": self.step,
            # More than the difference of the steps if the run went back after a spike.
            "num_steps": self._num_steps,
            "logged": self._logged,
            "seconds": seconds,
        }

    def _publish(self, now: float) -> None:
        if self._state is None:
            return
        self._publish_after = now + _PUBLISH_SECONDS
        self._num_published += 1
        text = json.dumps(self._record(now)).encode().ljust(SLOT_BYTES - 1) + b"\n"
        # A kill never interrupts it. A full or lost disk must not fail a run here.
        with suppress(OSError):
            os.pwrite(self._state, text, SLOT_BYTES * (self._num_published % 2))


def _killed_start(directory: Path) -> ValueDict | None:
    """Return the line of the end of the last start, if that did not write one; None otherwise. Raises OSError."""
    state = read_state(directory)
    if state is None:
        return None
    ended = {record["start"] for record in read_timeline(directory) if record["event"] == END}
    return None if state["start"] in ended else state | {"outcome": KILLED}
