"""How the time of a run was spent, and which share of it was useful: ``ckpt goodput``.

    total   = start-up + steps + lost steps + saves + data + validation + restarts + down + other
    goodput = steps / total

Each start of a run measures its phases, which add up to its duration. *Steps* are the steps in ``training.jsonl``:
their lines have the seconds of each. The rest of the time in steps is *lost*: steps that were repeated after a resume
or a spike (their earlier lines were removed), and the step that a kill interrupted. The start-up of all starts but the
first is *restarts*, and *down* is the time between two starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.run.notes import (
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
from automodel_ckpt.logs.log_records import number_of, read_records

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


@dataclass(frozen=True)
class Start:
    """One start of a run: when it began, in seconds since 1970; its phases; the steps it was between; what ended it.

    *num_steps* is how many it made, each repetition counted; *logged* is the part of the phase ``steps`` that lines of
    steps contain.
    """

    began: float
    seconds: dict[str, float]
    first_step: int
    last_step: int
    num_steps: int
    logged: float
    outcome: str

    @property
    def duration(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Goodput:
    """The time of a run by category, in seconds; its starts; how many steps were made more than once."""

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
    steps = []
    for record in read_records(directory / layout.TRAINING_LOG):
        duration = number_of(record.get("seconds"))
        if "event" not in record and duration is not None and duration >= 0:
            steps.append(record)
    starts = _starts(directory)
    if not starts:
        raise CheckpointUnusable(
            "this run has no record of its time",
            directory / layout.TIMELINE_LOG,
            "no start",
            "use the directory of a run, the checkpoint.checkpoint_dir of its recipe",
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
    num_lost = max(0, sum(start.num_steps for start in starts) - len(steps))
    return Goodput(seconds, tuple(starts), len(steps), num_lost)


def _starts(directory: Path) -> list[Start]:
    """Read the starts of a run, in their order. The last one may still run."""
    lines = list(read_timeline(directory))
    ends = {record["start"]: record for record in lines if record["event"] == END}
    state = read_state(directory)
    if state is not None:
        ends.setdefault(state["start"], state | {"outcome": RUNNING})
    # The time of a start that left no end, as on a disk that was lost, counts as the time until the next one.
    lost = {"step": 0, "seconds": dict.fromkeys(PHASES, 0.0), "logged": 0.0, "outcome": KILLED}
    starts = []
    for begin in (record for record in lines if record["event"] == START):
        end = ends.get(begin["start"], lost)
        first_step, outcome = begin["step"], end.get("outcome")
        last_step = max(end["step"], first_step)
        start = Start(
            float(begin["time"]),
            {phase: float(end["seconds"][phase]) for phase in PHASES},
            first_step,
            last_step,
            end.get("num_steps", last_step - first_step),
            float(end["logged"]),
            outcome if outcome in (*OUTCOMES, RUNNING) else FAILED,
        )
        starts.append(start)
    return starts
