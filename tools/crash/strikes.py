"""Runs that are hit by failures again and again until they are done: the core of ``goodput`` and ``goodput-nodes``.

Most failures come at marked points (:mod:`tools.crash.points`): there, the process that arrives is killed, or another
target. In a restart, the point follows a first failure. The others come at random instants. Each run must end bit by
bit as an undisturbed one, lose at most the promised steps per failure, and leave nothing.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tools.crash import endurance, losses
from tools.crash.launched import NODE, NODE_SILENTLY, Launched, kill
from tools.crash.losses import Loss, Losses
from tools.crash.points import PROCESSES, RANK, SAVE, SENDER, WRITER, Armed, Point, points_in
from tools.crash.record import Record
from tools.crash.sigterm import check_sigterm

AGAIN = "{}, and {} in the restart"
MAX_LOST = 1
"""Completed steps that a failure may cost with a save to memory after every step."""
MAX_NODES = 1
"""Nodes whose loss costs no more, with one replica. Two failures may hit different nodes."""
RESTARTS = 100
SAVE_EVERY = 4
"""Steps between checkpoints on disk."""
NEW_STEP_SECONDS = 150.0
"""How long a run may take to complete a new step after a failure, on a busy machine too."""
_POINT_SECONDS = 60.0
_AGAIN_SHARE = 0.2
"""The part of the failures at random instants that another one follows."""


@dataclass(frozen=True)
class Way:
    """How runs are saved, and what hits them: *targets*, at *points*, or, in *random_share*, at random instants.

    At a point, *arrived_share* of the failures hit the process that arrives, and the others one of *targets*.
    *max_lost* is the promise for the steps that a failure costs; None: none. *is_ours*: the end is compared.
    """

    name: str
    targets: Sequence[str]
    keys: Mapping[str, Any] = field(default_factory=dict)
    points: Sequence[Point] = ()
    max_lost: int | None = None
    random_share: float = 0.2
    arrived_share: float = 0.7
    restarts: int = RESTARTS
    is_ours: bool = True


@dataclass
class Result:
    """What a campaign found, with the losses by what was killed, and by the point."""

    record: Record
    by_target: Losses = field(default_factory=lambda: Losses("killed"))
    by_point: Losses = field(default_factory=lambda: Losses("at the point"))
    codes: Counter[str] = field(default_factory=Counter)
    """How often launchers ended with each exit code."""

    def add(self, other: Result) -> None:
        """Take what another process of the campaign found."""
        self.record.add_all(other.record)
        self.by_target.add_all(other.by_target)
        self.by_point.add_all(other.by_point)
        self.codes += other.codes

    def finished(self) -> Record:
        """The record with its tables."""
        self.record.notes = {
            **self.by_target.notes(),
            "exit codes of launchers": dict(self.codes),
        }
        self.record.note_missing()
        tables = [found.table() for found in (self.by_target, self.by_point) if found]
        if unmeasured := self.record.points - len(self.by_target):
            tables.append(
                f"Not in the tables: {unmeasured} failures after which a run ended without a further step."
            )
        self.record.table = "\n\n".join(tables)
        return self.record


@dataclass(frozen=True)
class _Failure:
    """What was hit, at which *instant*, when the step *before* was complete; at which point, if not at random.

    *num_nodes* were lost with their memory.
    """

    target: str
    instant: float
    before: int
    point: Point | None = None
    num_nodes: int = 0


class Campaign:
    """Runs of each of *ways* in turn, to step *steps*, with their files in *base*.

    *start* makes a run of a name and a way. What is found goes to *result*.
    """

    def __init__(
        self,
        base: Path,
        ways: Sequence[Way],
        start: Callable[[str, Way], Launched],
        result: Result,
        chance: random.Random,
        *,
        steps: int,
    ) -> None:
        self.base = base
        self.ways = ways
        self.start = start
        self.result = result
        self.record = result.record
        self.chance = chance
        self.steps = steps
        self._tried: Counter[Point] = Counter()
        self._points_wanted = 0
        self._end = 0.0
        for way in ways:
            self.record.require(f"{way.name}: {point.name}" for point in way.points)
        undisturbed = self.start("undisturbed", Way("", ()))
        with undisturbed:
            assert self._await_end(undisturbed), undisturbed.log
        self.right = endurance.result_of(base / undisturbed.name, steps)

    def run_all(self, points_wanted: int, seconds: float) -> None:
        """At least *points_wanted* failures, and one at each marked point, unless *seconds* pass before.

        No process arrives at some points unless the run is in a state that depends on time: a rank reads from another
        node if that node has the newest checkpoint. Such a point is tried again.
        """
        self._points_wanted = points_wanted
        self._end = time.monotonic() + seconds
        number = self.chance.randrange(len(self.ways))
        while self._goes_on():
            number += 1
            self._run(f"run-{number}", self.ways[number % len(self.ways)])

    def _goes_on(self) -> bool:
        are_enough = self.record.points >= self._points_wanted and all(self.record.marked.values())
        return not are_enough and time.monotonic() < self._end

    def _run(self, name: str, way: Way) -> None:
        run = self.start(name, way)
        wrong: list[str] = []
        with run:
            while self._goes_on():
                broken = self._strike(run, way)
                if broken is None:
                    break
                wrong += broken
            if not self._await_end(run):
                wrong.append("it does not end")
            elif way.is_ours:
                wrong += endurance.differences(self.base / name, self.right, self.steps)
                wrong += [f"left: {text}" for text in run.left()]
            self.result.codes.update(f"node {node}: {code}" for node, code in run.ended)
        if wrong:
            failure = {"violations": wrong, "run": name, "way": way.name, "log": run.log[-20000:]}
            self.record.failures.append(failure)
            print(f"VIOLATION {name}, {way.name}: {wrong}", flush=True)

    # ---------------------------------------------------------------- a failure

    def _strike(self, run: Launched, way: Way) -> list[str] | None:
        """One failure and what follows: which promises were broken; None if the run ended before."""
        completed = losses.completed(run.marks())
        if not self._await_step(run, completed + self.chance.randint(1, 3)):
            return None
        failure = self._fail(run, way, self._choose(way))
        if failure is None:
            return []
        self.record.add(f"{way.name}: {failure.target}")
        if failure.point is not None:
            self.record.count_at(f"{way.name}: {failure.point.name}")
        if not self._await_step(run, failure.before + 1, since=failure.instant):
            text = f"{way.name}: {failure.target}: no new step after {failure.before}"
            return None if run.supervise() else [text]
        return self._lost(run, way, failure)

    def _choose(self, way: Way) -> Point | None:
        """One of the points that were tried least; None: a random instant."""
        if not way.points or self.chance.random() < way.random_share:
            return None
        fewest = min(self._tried[point] for point in way.points)
        chosen = self.chance.choice([each for each in way.points if self._tried[each] == fewest])
        self._tried[chosen] += 1
        return chosen

    def _fail(self, run: Launched, way: Way, point: Point | None) -> _Failure | None:
        """Hit the run; None if nothing was there to hit."""
        if point is None:
            return self._fail_at_random(run, way)
        with Armed(run.marks_at, point) as armed:
            if point in points_in(SAVE, nodes=True):
                return self._fail_at(run, way, point, armed)
            first = self._hit(run, point.after or self._restarting_target(way))
            second = self._fail_at(run, way, point, armed) if first is not None else None
        return _both(first, second)

    def _fail_at_random(self, run: Launched, way: Way) -> _Failure | None:
        time.sleep(self.chance.random() * 0.3)
        is_twice = self.chance.random() < _AGAIN_SHARE
        target = self._restarting_target(way) if is_twice else self.chance.choice(way.targets)
        first = self._hit(run, target)
        if first is None or not is_twice:
            return first
        self._pause(run, self.chance.random() * 4)
        return _both(first, self._hit(run, RANK))

    def _fail_at(self, run: Launched, way: Way, point: Point, armed: Armed) -> _Failure | None:
        """Hit the process that arrives at *point*, or another target, then; None if none arrives."""
        process = self._await_process(run, armed)
        if process is None:
            return None
        failure = None
        if self.chance.random() > way.arrived_share:
            failure = self._hit(run, self.chance.choice(way.targets))
        if failure is None:
            failure = _Failure(PROCESSES[point], time.monotonic(), losses.completed(run.marks()))
            kill([process])
        return replace(failure, point=point)

    def _hit(self, run: Launched, target: str) -> _Failure | None:
        before, instant = losses.completed(run.marks()), time.monotonic()
        if not run.hit(target, self.chance.randrange(run.num_nodes), self.chance):
            return None
        return _Failure(target, instant, before, num_nodes=target in (NODE, NODE_SILENTLY))

    def _restarting_target(self, way: Way) -> str:
        """A target after whose failure the ranks start again."""
        return self.chance.choice([each for each in way.targets if each not in (WRITER, SENDER)])

    def _lost(self, run: Launched, way: Way, failure: _Failure) -> list[str]:
        """Note what a failure lost, after the run has continued. Returns the promise that it broke, if any."""
        seconds = time.monotonic() - failure.instant
        resumed_step = losses.resumed(run.marks(), failure.instant, failure.before)
        steps = failure.before - resumed_step
        loss = Loss(steps, seconds)
        self.result.by_target.add(way.name, failure.target, loss)
        if failure.point is not None:
            self.result.by_point.add(way.name, failure.point.name, loss)
        if way.max_lost is None or failure.num_nodes > MAX_NODES or steps <= way.max_lost:
            return []
        return [f"{way.name}: {failure.target} cost {steps} steps after {failure.before}"]

    # ---------------------------------------------------------------- waiting

    def _pause(self, run: Launched, seconds: float) -> None:
        """Let the run go on for so long."""
        self._await(run, lambda: False, seconds)

    def _await_process(self, run: Launched, armed: Armed) -> int | None:
        """The process that stops at the armed point; None if none does before the run ends."""
        self._await(run, lambda: armed.stopped is not None, _POINT_SECONDS)
        return armed.stopped

    def _await_step(self, run: Launched, step: int, since: float = 0.0) -> bool:
        """Whether *step* is completed, after the instant *since*, before the run ends and within the time."""

        def is_completed() -> bool:
            return losses.has_completed(run.marks(), step, since)

        return self._await(run, is_completed, NEW_STEP_SECONDS)

    def _await_end(self, run: Launched) -> bool:
        self._await(run, lambda: False, NEW_STEP_SECONDS)
        return run.supervise()

    def _await(self, run: Launched, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether *condition* becomes true before the run ends and within so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            check_sigterm()
            if condition():
                return True
            if run.supervise():
                return False
            time.sleep(0.005)
        return False


def _both(first: _Failure | None, second: _Failure | None) -> _Failure | None:
    """The failure that another one followed in the restart, where it did."""
    if first is None or second is None:
        return first
    return replace(
        first,
        target=AGAIN.format(first.target, second.target),
        point=second.point,
        num_nodes=first.num_nodes + second.num_nodes,
    )


def words_of(way: Way, recipe: Path, run: Path, steps: int, keys: Mapping[str, Any]) -> list[str]:
    """The words of a command that trains in *run* to step *steps*, with more *keys* of the *recipe*."""
    every_key = {
        "checkpoint.checkpoint_dir": run,
        "checkpoint.save_consolidated": "false",
        "step_scheduler.max_steps": steps,
        "step_scheduler.ckpt_every_steps": SAVE_EVERY,
        "validation_dataset": "null",
        "step_scheduler.val_every_steps": "null",
        **way.keys,
        **keys,
    }
    overrides = [f"--{name}={value}" for name, value in every_key.items()]
    return ["--trust=tools", f"--max-restarts={way.restarts}", str(recipe), *overrides]


def in_processes(num_processes: int, work: Callable[[int], Result]) -> Result:
    """What *work* found in so many processes together; its argument is the number of the process."""
    context = multiprocessing.get_context("fork")
    workers, links = [], []
    for number in range(num_processes):
        here, there = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(there, work, number))
        worker.start()
        there.close()
        workers.append(worker)
        links.append(here)
    try:
        result, *others = [_received(link) for link in links]
    finally:
        # Those that are done have ended. Others clean up.
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
    for other in others:
        result.add(other)
    return result


def _work(link: Connection, work: Callable[[int], Result], number: int) -> None:
    # Ctrl-C goes to all processes of the terminal. The first process then ends this one, once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    link.send(work(number))


def _received(link: Connection) -> Result:
    result: Result = link.recv()
    return result
