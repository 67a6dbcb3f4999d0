"""How the time of a run was spent, and which share of it was useful: ``ckpt goodput``.

    total   = start-up + steps + lost steps + saves + data + validation + restarts + down + other
    goodput = steps / total

Each start of a run measures its phases, which add up to its duration. *Steps* are those in ``training.jsonl``: their
lines have the seconds of each. The rest of the time in steps is *lost*: steps that a resume repeated, whose lines it
removed, and the step that a kill interrupted. The start-up of all starts but the first is *restarts*, and *down* is the
time between two starts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.run.timeline import (
    DATA,
    DONE,
    END,
    FAILED,
    KILLED,
    OTHER,
    PHASES,
    SAVES,
    START,
    STARTUP,
    STEPS,
    STOPPED,
    VALIDATION,
    read_state,
    read_timeline,
)
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.report.log_records import read_records

LOST, RESTARTS, DOWN = "lost_steps", "restarts", "down"
CATEGORIES = {
    STEPS: "steps",
    STARTUP: "start-up",
    VALIDATION: "validation",
    SAVES: "waiting for saves",
    DATA: "waiting for data",
    LOST: "lost steps",
    RESTARTS: "restarts",
    DOWN: "down between starts",
    OTHER: "other",
}
"""The categories of a run's time, and their titles. Each moment belongs to one."""
OUTCOMES = (DONE, STOPPED, FAILED, KILLED)
RUNNING = "running or killed"


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run: when it began, in seconds since 1970; its phases; the steps it was between; what ended it.

    *logged* is the part of the phase ``steps`` that lines of steps contain.
    """

    began: float
    seconds: dict[str, float]
    first_step: int
    last_step: int
    logged: float
    outcome: str

    @property
    def duration(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Goodput:
    """The time of a run by category, in seconds; its starts; and how many steps were made more than once."""

    seconds: dict[str, float]
    starts: tuple[Start, ...]
    num_steps: int
    num_lost_steps: int

    @property
    def total(self) -> float:
        """Seconds from the first start to the end of the last."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The share of the time that was spent in steps that the run still has."""
        return self.seconds[STEPS] / self.total if self.total > 0 else 0.0


def read_goodput(directory: Path) -> Goodput:
    """Return how the run in *directory* spent its time. Raises :class:`CheckpointUnusable` if that was not recorded."""
    steps = [record for record in read_records(directory / layout.TRAINING_LOG) if _is_step(record)]
    starts = _starts(directory, steps)
    if not starts:
        raise CheckpointUnusable(
            "this run has no record of its time",
            where=str(directory / layout.TIMELINE_LOG),
            value="no start",
            hint="use the directory of a run of this version or later",
        )
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for number, start in enumerate(starts):
        for phase in PHASES:
            category = RESTARTS if phase == STARTUP and number > 0 else phase
            seconds[category] += start.seconds[phase]
        if number > 0:
            earlier = starts[number - 1]
            # Clocks of different nodes may differ.
            seconds[DOWN] += max(0.0, start.began - earlier.began - earlier.duration)
    # A step that is not over yet is not lost.
    last = starts[-1]
    unfinished = last.seconds[STEPS] - last.logged if last.outcome == RUNNING else 0.0
    kept = min(seconds[STEPS], sum(record["seconds"] for record in steps) + max(0.0, unfinished))
    seconds[LOST] = seconds[STEPS] - kept
    seconds[STEPS] = kept
    num_made = sum(start.last_step - start.first_step for start in starts)
    return Goodput(seconds, tuple(starts), len(steps), max(0, num_made - len(steps)))


def _is_step(record: dict[str, Any]) -> bool:
    seconds = record.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return False
    return "event" not in record and 0 <= seconds < float("inf")


def _starts(directory: Path, steps: list[dict[str, Any]]) -> list[Start]:
    """Read the starts of a run, in their order. The last one may still run."""
    lines = list(read_timeline(directory))
    ends = {record["start"]: record for record in lines if record["event"] == END}
    state = read_state(directory)
    if state is not None:
        ends.setdefault(state["start"], state | {"outcome": RUNNING})
    begins = [record for record in lines if record["event"] == START]
    starts = []
    for number, begin in enumerate(begins):
        end = ends.get(begin["start"])
        if end is not None:
            starts.append(_start(begin, end))
            continue
        # Its end was on a disk that the next start did not have.
        until = begins[number + 1]["time"] if number + 1 < len(begins) else float("inf")
        own = [record for record in steps if begin["time"] <= _timestamp(record) < until]
        starts.append(_start_from_log(begin, own))
    return starts


def _start(begin: dict[str, Any], end: dict[str, Any]) -> Start:
    outcome = end.get("outcome")
    return Start(
        float(begin["time"]),
        {phase: float(end["seconds"][phase]) for phase in PHASES},
        begin["step"],
        max(end["step"], begin["step"]),
        float(end["logged"]),
        outcome if outcome in (*OUTCOMES, RUNNING) else FAILED,
    )


def _start_from_log(begin: dict[str, Any], steps: list[dict[str, Any]]) -> Start:
    """Return a start whose end is unknown, from the lines of its *steps*."""
    seconds = dict.fromkeys(PHASES, 0.0)
    start = Start(float(begin["time"]), seconds, begin["step"], begin["step"], 0.0, KILLED)
    if not steps:
        return start
    seconds[STEPS] = float(sum(record["seconds"] for record in steps))
    duration = _timestamp(steps[-1]) - start.began
    seconds[OTHER] = max(0.0, duration - seconds[STEPS])
    last_step = max(start.first_step, steps[-1]["step"])
    return replace(start, last_step=last_step, logged=seconds[STEPS])


def _timestamp(record: dict[str, Any]) -> float:
    value = record.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value)
