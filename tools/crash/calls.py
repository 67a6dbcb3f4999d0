"""One system call of two ranks at a time: they are killed at it, or it fails (:mod:`tools.crash.syscalls`).

Killed: from the start of a run to its end, before each call that changes the run directory. ``both``: calls of both
ranks are counted together, and both are killed (a machine dies). ``rank0``, ``rank1``: its own calls are counted, only
it is killed, and the other one up to 30 ms later (the launcher ends it).

Failed: within one ``save()``, each call of one name on the run directory by one rank, reading files included, with
ENOSPC and EIO. The call is not carried out; its rank gets the error.
"""

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import cycle, zip_longest
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from tools.crash import inspect, jobs
from tools.crash.jobs import Run
from tools.crash.pair import KILLED, THROUGH, Outcome, Pair
from tools.crash.place import NEXT_STEP, Place, Scenario, checked
from tools.crash.record import Record
from tools.crash.subjects import Loaded, Options, Subject, failed, found
from tools.crash.syscalls import Call

RANKS = {"both": (0, 1), "rank0": (0,), "rank1": (1,)}
SCENARIOS = (
    Scenario("first", (), 10),
    Scenario("save", (10, 20), 30, resumes=20),
    Scenario("prune", (10, 20, 30), 40, Options(keep_last=1), resumes=30),
    Scenario(
        "back", (10, 20, 30), 20, Options(restore_from="epoch_0_step_10", generation=1), resumes=10
    ),
    Scenario("export", (10,), 20, Options(save_consolidated=True), resumes=10),
    Scenario("recover", (10, 20), None, resumes=20, litter=True),
)
BASELINE = (Scenario("save", (20,), 30, resumes=20),)
FAULTS = (Scenario("save", (10, 20, 30), 40, Options(keep_last=2), resumes=30),)
ERRORS = (errno.ENOSPC, errno.EIO)
LIMIT_SECONDS = 30.0


@dataclass(frozen=True)
class Point:
    """The *at*-th counted call (from 1) of these *ranks*: a kill, or of this *name* a failure with *error*."""

    subject: Subject
    scenario: Scenario
    ranks: str
    at: int
    name: str = ""
    error: int = 0

    def __str__(self) -> str:
        fault = [self.name, errno.errorcode[self.error]] if self.error else []
        return "/".join([self.subject.name, self.scenario.name, self.ranks, *fault, str(self.at)])

    def counts(self, rank: int, call: Call) -> bool:
        """Whether a call is one of those that *at* counts."""
        is_one = call.name == self.name if self.error else call.changes
        return is_one and rank in RANKS[self.ranks]


@dataclass
class Watcher:
    """Notes the calls of a run, and kills or fails at the chosen one."""

    pair: Pair
    point: Point | None = None
    grace: float = 0.0
    calls: list[tuple[int, Call]] = field(default_factory=list)
    counted: int = 0
    met: Call | None = None
    """The call of the point, once it happened."""

    def __call__(self, rank: int, call: Call) -> int:
        self.calls.append((rank, call))
        point = self.point
        if point is not None and point.counts(rank, call):
            self.counted += 1
            if self.counted == point.at:
                self.met = call
                if point.error:
                    return point.error
                self.pair.kill(RANKS[point.ranks])
                self.pair.give_them(self.grace)
                return KILLED
        return THROUGH


class Sweep(Place):
    def run(self, subject: Subject, scenario: Scenario, point: Point | None = None) -> Watcher:
        """Run the scenario to its end, or killed at the point."""
        self.lay_out(subject, scenario)
        steps = () if scenario.step is None else (scenario.step,)
        with closing(Pair(str(self.root))) as pair:
            grace = self.random.uniform(0, 0.03)
            watcher = Watcher(pair, point, grace)
            job = Run(subject, self.root, steps, scenario.options)
            outcomes = pair.run(jobs.whole, job, decide=watcher)
        if point is None:
            checked(outcomes)
        return watcher

    def save(
        self, pair: Pair, subject: Subject, scenario: Scenario, point: Point | None
    ) -> tuple[Watcher, list[Outcome]]:
        """Start on the scenario's directory, then save with the fault."""
        watcher = Watcher(pair, point)
        checked(pair.run(jobs.begin, Run(subject, self.root, (), scenario.options)))
        pair.tell(jobs.save, (scenario.step,))
        return watcher, pair.finish(watcher, seconds=LIMIT_SECONDS)

    def kills(self, subject: Subject, scenario: Scenario) -> Iterator[tuple[str, Point]]:
        """The names of the calls at which an undisturbed run can be killed, and the points."""
        calls = self.run(subject, scenario).calls
        for ranks, numbers in RANKS.items():
            names = [call.name for rank, call in calls if call.changes and rank in numbers]
            for at, name in enumerate(names, start=1):
                yield name, Point(subject, scenario, ranks, at)

    def faults(self, subject: Subject, scenario: Scenario) -> Iterator[tuple[str, Point]]:
        """Every call of an undisturbed save, with every error."""
        self.lay_out(subject, scenario)
        with closing(Pair(str(self.root))) as pair:
            watcher, _ = self.save(pair, subject, scenario, None)
        counts = Counter((rank, call.name) for rank, call in watcher.calls)
        for (rank, name), count in sorted(counts.items()):
            for at in range(1, count + 1):
                for error in ERRORS:
                    yield name, Point(subject, scenario, f"rank{rank}", at, name, error)


Judge = Callable[[Sweep, Point], tuple[str, list[str], object]]
"""Runs a point; returns its outcome, broken promises, and the call."""


def judge_kill(sweep: Sweep, point: Point) -> tuple[str, list[str], object]:
    scenario = point.scenario
    sweep.lay_out(point.subject, scenario)
    before = inspect.contents(sweep.root)
    watcher = sweep.run(point.subject, scenario, point)
    after = inspect.contents(sweep.root)
    saves = scenario.step is not None
    published = saves and after.get(scenario.final, "") not in ("", before.get(scenario.final))
    # Checkpoints from before are as they were, perhaps set aside; a published save may have removed some.
    may_go = published and scenario.options.keep_last is not None
    kept = set(after.values())
    wrong = [
        f"{name} is not what it was"
        for name, digest in before.items()
        if digest not in kept and not (may_go and name not in after)
    ]
    wrong += inspect.damage(sweep.root) + _wrong_start(sweep, point, published)
    return "new" if published else "old", wrong, watcher.met


def _wrong_start(sweep: Sweep, point: Point, published: bool) -> list[str]:
    """What is wrong with the next start, and with a save after it."""
    scenario = point.scenario
    outcomes = sweep.start(point.subject, scenario.options)
    if errors := failed("the next start fails", outcomes):
        return errors
    right: Loaded | None = None
    if published and scenario.step is not None:
        right = Loaded(scenario.step, scenario.options.seed(scenario.step))
    elif scenario.resumes is not None:
        right = Loaded(scenario.resumes, scenario.resumes)
    wrong = [
        f"rank {r} resumed from {o.value}, not {right}"
        for r, o in enumerate(outcomes)
        if o.value != right
    ]
    wrong += inspect.unclean(sweep.root, running=True)
    wrong += failed("the next save fails", sweep.pair.run(jobs.save, (NEXT_STEP,)))
    wrong += failed("the end fails", sweep.pair.run(jobs.end))
    return wrong + inspect.unclean(sweep.root, running=False) + inspect.damage(sweep.root)


def judge_baseline(sweep: Sweep, point: Point) -> tuple[str, list[str], object]:
    """What another program's next start finds after the kill: counted, no promise."""
    watcher = sweep.run(point.subject, point.scenario, point)
    outcome, loaded = found(sweep.start(point.subject))
    if loaded is not None and not outcome:
        outcome = "new" if loaded.step == point.scenario.step else "old"
    return outcome, [], watcher.met


def judge_fault(sweep: Sweep, point: Point) -> tuple[str, list[str], object]:
    sweep.lay_out(point.subject, point.scenario)
    before = inspect.contents(sweep.root)
    with closing(Pair(str(sweep.root))) as pair:
        watcher, outcomes = sweep.save(pair, point.subject, point.scenario, point)
        now = inspect.contents(sweep.root)
        is_there = point.scenario.final in now
        if watcher.met is None:
            outcome, wrong = "not reached", failed("it fails", outcomes)
        elif any(each.kind for each in outcomes):
            outcome = "failed on both ranks"
            wrong = _wrong_failure(point, watcher.met, outcomes, sweep.root)
            wrong += [
                f"{name} is not what it was" for name in before if before[name] != now.get(name)
            ]
            wrong += [f"the save failed, and {point.scenario.final} is there"] * is_there
        else:
            # A fault may be borne only where the checkpoint is whole, pointed to or not.
            outcome = "saved all the same"
            wrong = ["save() returned, and there is no checkpoint"] * (not is_there)
            wrong += inspect.damage(sweep.root)
        if any(each.died for each in outcomes):
            wrong.append(f"a rank died, or took longer than {LIMIT_SECONDS} s")
        else:
            wrong += _wrong_afterwards(sweep, pair, point)
        return outcome, wrong, watcher.met


def _wrong_failure(point: Point, call: Call, outcomes: list[Outcome], root: Path) -> list[str]:
    """Both ranks must say which rank met which error on which path."""
    wrong = []
    for rank, outcome in enumerate(outcomes):
        if outcome.kind != "SaveFailed":
            wrong.append(f"rank {rank} ended with {outcome.kind}, no SaveFailed: {outcome.error}")
            continue
        text = " | ".join(outcome.error.split("\n  "))
        said = {"rank": f"rank {point.ranks[-1]}", "errno": errno.errorcode[point.error]}
        for what, part in said.items():
            if part not in text:
                wrong.append(f"rank {rank}'s error does not name the {what}")
        if not any(name in text for name in _paths_of(call, root)):
            wrong.append(f"rank {rank}'s error does not name the path: {text}")
    return wrong


def _paths_of(call: Call, root: Path) -> tuple[str, ...]:
    """What a message may name: the file itself; its directory or the run's where the call was a library's own, or only
    read; for a link that was to be swapped, the link."""
    name = os.path.basename(call.path)
    if not call.changes or layout.HF_METADATA in call.path:
        parents = [str(path) for path in Path(call.path).parents if path.is_relative_to(root)]
        return (name, *parents)
    return (name, name[1:].split(".")[0]) if name.startswith(".") else (name,)


def _wrong_afterwards(sweep: Sweep, pair: Pair, point: Point) -> list[str]:
    """The next save of the same run, then a new start, which clears what was left over."""
    wrong = failed("the save afterwards fails", pair.run(jobs.save, (NEXT_STEP,)))
    wrong += failed("the end afterwards fails", pair.run(jobs.end))
    if wrong:
        return wrong
    run = Run(point.subject, sweep.root, (), point.scenario.options)
    steps = {o.value.step if o.ok and o.value else None for o in pair.run(jobs.begin, run)}
    wrong = [] if steps == {NEXT_STEP} else [f"the next start finds {steps}"]
    wrong += inspect.unclean(sweep.root, running=True)
    pair.run(jobs.end)
    return wrong + inspect.damage(sweep.root)


def points_of(
    sweep: Sweep,
    subjects: tuple[Subject, ...],
    scenarios: tuple[Scenario, ...],
    *,
    faults: bool = False,
) -> list[Point]:
    """Every point there is, in random order, but by turns one at a write and one at any other call while there are
    both: of the calls, nine in ten are small writes."""
    list_points = sweep.faults if faults else sweep.kills
    every = [
        named
        for subject in subjects
        for scenario in scenarios
        for named in list_points(subject, scenario)
    ]
    sweep.random.shuffle(every)
    writes = [point for name, point in every if name == "write"]
    others = [point for name, point in every if name != "write"]
    return [point for both in zip_longest(others, writes) for point in both if point is not None]


def run(
    name: str,
    subjects: tuple[Subject, ...],
    judge: Judge,
    scenarios: tuple[Scenario, ...] = SCENARIOS,
    *,
    points: int,
    seed: int,
    seconds: float,
    only: str | None = None,
) -> Record:
    """A campaign of *points* within *seconds*, or of the one named *only*. Kills begin again when all were made: the
    other rank lives on for another time."""
    record = Record(name, {"points": points, "seed": seed, "seconds": seconds, "only": only})
    faults = judge is judge_fault
    with Sweep(seed) as sweep:
        every = points_of(sweep, subjects, scenarios, faults=faults)
        record.notes["distinct points"] = len(every)
        if only is not None:
            every = [point for point in every if str(point) == only]
        for point in every if faults or only is not None else cycle(every):
            if not record.goes_on:
                break
            outcome, wrong, call = judge(sweep, point)
            record.add(outcome, wrong, point=str(point), call=str(call))
    return record
