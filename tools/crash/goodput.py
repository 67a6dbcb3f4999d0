"""What a failure costs a training with checkpoints in memory, and whether the run ends as if there had been none.

A run of two ranks is hit again and again at random instants: a rank, all ranks, a writer, or the launcher is killed, or
a rank again in the restart after its failure. The end of each run is compared bit by bit with an undisturbed one, and
nothing may be left in memory. Every second run has no checkpoints in memory, for comparison.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from tools.crash import endurance, inspect, signals
from tools.crash.record import Record
from tools.crash.trainer import Trainer

STEPS = 20
TARGETS = ("rank0", "rank1", "all", "launcher", "restart", "writer")
MAX_LOST = 1
"""Completed steps that a failure may cost with a save to memory after every step."""
RESTARTS = 100
END_SECONDS = 90.0


def run(
    *,
    points_wanted: int,
    seed: int,
    seconds: float,
    base: Path | None = None,
    compares: bool = True,
) -> Record:
    """At least *points_wanted* failures, unless *seconds* pass before; with *compares*, half of them without memory."""
    record = Record("goodput", {"points": points_wanted, "seed": seed})
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    lost: dict[str, list[tuple[int, float]]] = {}
    with tempfile.TemporaryDirectory(dir=base) as directory:
        signals.import_what_ranks_need()
        campaign = _Campaign(Path(directory), record, chance, lost)
        number = 0
        while record.points < points_wanted and time.monotonic() < end:
            number += 1
            campaign.run(number, in_memory=not compares or number % 2 == 1)
    for name, found in sorted(lost.items()):
        steps = [step for step, _ in found]
        record.notes[name] = {
            "failures": len(found),
            "lost steps, most": max(steps),
            "lost steps, mean": round(sum(steps) / len(steps), 2),
            "seconds to the next new step, median": round(median(t for _, t in found), 2),
        }
    return record


class _Campaign:
    def __init__(
        self,
        base: Path,
        record: Record,
        chance: random.Random,
        lost: dict[str, list[tuple[int, float]]],
    ) -> None:
        self.base, self.record, self.chance, self.lost = base, record, chance, lost
        whole = signals.Chain(base, "whole")
        with whole.start(steps=STEPS) as trainer:
            assert trainer.wait(END_SECONDS) and trainer.code == 0, trainer.log
        self.right = endurance.result_of(whole.root, STEPS)

    def run(self, number: int, *, in_memory: bool) -> None:
        """One run with its failures."""
        chain = signals.Chain(self.base, f"run-{number}")
        memory = self.base / f"memory-{number}"
        memory.mkdir()
        keys: dict[str, Any] = {}
        if in_memory:
            keys = {"checkpoint.memory.every_steps": 1, "checkpoint.memory.directory": memory}
        wrong: list[str] = []
        code: int | None = None
        # A start follows each kill of the launcher.
        while code is None or code < 0:
            with chain.start(steps=STEPS, max_restarts=RESTARTS, keys=keys) as trainer:
                wrong += self._strike(trainer, in_memory=in_memory)
                if not trainer.wait(END_SECONDS):
                    wrong.append("it does not end")
                    break
                code = trainer.code
                wrong += [f"process {pid} is left" for pid in trainer.orphans()]
            if code not in (0, -signal.SIGKILL):
                wrong.append(f"exit code {code}")
        if code == 0:
            wrong += endurance.differences(chain.root, self.right, STEPS)
            wrong += [f"left in memory: {path.name}" for path in memory.iterdir()]
        wrong += inspect.damage(chain.root)
        if wrong:
            self.record.failures.append(
                {"violations": wrong, "run": number, "log": trainer.log[-3000:]}
            )
            print(f"VIOLATION run {number}: {wrong}", flush=True)

    def _strike(self, trainer: Trainer, *, in_memory: bool) -> list[str]:
        """Kill again and again until the command ends; which promises were broken."""
        wrong: list[str] = []
        while True:
            completed = _completed(trainer)
            if not _await_step(trainer, completed + self.chance.randint(1, 4)):
                return wrong
            time.sleep(self.chance.random() * 0.2)
            # Saves on disk are synchronous here and have no writer.
            target = self.chance.choice(TARGETS if in_memory else TARGETS[:-1])
            before = _completed(trainer)
            instant = _kill(trainer, "rank1" if target == "restart" else target)
            if instant is None:
                return wrong
            if target == "restart":
                time.sleep(self.chance.random() * 2)
                _kill(trainer, self.chance.choice(("rank0", "rank1")))
            name = f"{'memory' if in_memory else 'disk'}: {target}"
            if target == "launcher":
                self.record.add(name)
                return wrong
            if not _await_step(trainer, before + 1, since=instant):
                self.record.add(name)
                return wrong
            steps = before - _resumed(trainer, instant, before)
            self.lost.setdefault(name, []).append((steps, time.monotonic() - instant))
            self.record.add(name)
            if in_memory and steps > MAX_LOST:
                wrong.append(f"{name} cost {steps} steps")


def _completed(trainer: Trainer) -> int:
    """The last step that rank 0 has completed: it waits for the data of the next one."""
    return max((mark.step for mark in trainer.marks(0) if mark.name == "data"), default=0)


def _await_step(trainer: Trainer, step: int, since: float = 0.0) -> bool:
    """Whether rank 0 completes *step*, after the instant *since*, before the command ends."""
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end:
        for mark in trainer.marks(0):
            if mark.name == "data" and mark.step >= step and mark.seconds > since:
                return True
        if trainer.wait(0.005):
            return False
    return False


def _resumed(trainer: Trainer, instant: float, before: int) -> int:
    """The step that the ranks continued from after a kill at *instant*; *before* if they did not start again."""
    steps = [mark.step for mark in trainer.marks(0) if mark.seconds > instant]
    return min([before, *steps])


def _kill(trainer: Trainer, target: str) -> float | None:
    """Kill one process or all ranks; the instant, None if there is none."""
    ranks = trainer.ranks()
    found: list[int] = []
    if target == "launcher":
        found = [trainer.pid]
    elif target == "all":
        found = list(ranks.values())
    elif target == "writer":
        found = [pid for pid in endurance.members(trainer.pid) if _parent(pid) in ranks.values()]
        found = found[:1]
    elif int(target[-1]) in ranks:
        found = [ranks[int(target[-1])]]
    killed = False
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
            killed = True
        except ProcessLookupError:
            continue
    return time.monotonic() if killed else None


def _parent(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[1])
