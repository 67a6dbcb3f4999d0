"""Kill sweep: SIGKILL before each call that changes the run directory, of two ranks, and see what the next start finds.

Counted are the calls of :mod:`tools.crash.syscalls` with ``changes`` that concern the run directory, from the start of
the run to its end. ``both``: calls of both ranks are counted together, and both are killed (a machine dies). ``rank0``,
``rank1``: its own calls are counted, only it is killed, and the other one up to 30 ms later (the launcher ends it).
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, zip_longest
from pathlib import Path
from typing import TypeVar

from tools.crash import inspect, jobs
from tools.crash.jobs import Run
from tools.crash.pair import KILLED, THROUGH, Outcome, Pair
from tools.crash.record import Record
from tools.crash.subjects import Loaded, Options, Subject, all_ranks
from tools.crash.syscalls import RENAMES, Call

PointLike = TypeVar("PointLike")

MODES = {"both": (0, 1), "rank0": (0,), "rank1": (1,)}
NEXT_STEP = 900
SHM = "/dev/shm"  # noqa: S108


@dataclass(frozen=True)
class Scenario:
    """What is there before (*prepared* steps), and what the run that is killed does: load, then save *step* (None: no
    save). *resumes*: the step that a start finds where the save did not come about."""

    name: str
    prepared: tuple[int, ...]
    step: int | None
    options: Options = field(default_factory=Options)
    resumes: int | None = None
    litter: bool = False

    @property
    def final(self) -> str | None:
        return None if self.step is None else f"epoch_0_step_{self.step}"


SCENARIOS = (
    Scenario("first", (), 10),
    Scenario("save", (10, 20), 30, resumes=20),
    Scenario("prune", (10, 20, 30), 40, Options(keep_last=1), resumes=30),
    Scenario(
        "back", (10, 20, 30), 20, Options(restore_from="epoch_0_step_10", generation=1), resumes=10
    ),
    Scenario("export", (10,), 20, Options(export=True), resumes=10),
    Scenario("recover", (10, 20), None, resumes=20, litter=True),
)
BASELINE_SCENARIO = Scenario("save", (20,), 30, resumes=20)


@dataclass(frozen=True)
class Point:
    """Where to kill: the *at*-th counted call (from 1)."""

    subject: Subject
    scenario: Scenario
    mode: str
    at: int

    def __str__(self) -> str:
        return f"{self.subject.name}/{self.scenario.name}/{self.mode}/{self.at}"


@dataclass
class Killer:
    """Counts the calls that change something, and kills at the chosen one."""

    pair: Pair
    final: str | None
    mode: str = "both"
    at: float = float("inf")
    grace: float = 0.0
    names: list[str] = field(default_factory=list)
    call: str = "the end of the run"
    renaming: bool = False
    renamed: bool = False

    def __call__(self, rank: int, call: Call) -> int:
        if not call.changes or rank not in MODES[self.mode]:
            return THROUGH
        self.names.append(call.name)
        if rank == 0:
            # The leader's next call shows that its rename before has been carried out.
            self.renamed = self.renamed or self.renaming
        if len(self.names) == self.at:
            self.call = f"rank {rank}: {call}"
            self.pair.kill(MODES[self.mode])
            self.pair.give_them(self.grace)
            return KILLED
        if rank == 0 and call.name in RENAMES and call.path == self.final:
            self.renaming = True
        return THROUGH


class Sweep:
    """Runs points: a fresh pair for each that is killed, one pair that starts anew after every kill."""

    def __init__(self, seed: int) -> None:
        jobs.warm_up()
        self.random = random.Random(seed)
        self.directory = Path(tempfile.mkdtemp(prefix="crash-", dir=SHM))
        self.root = self.directory / "run"
        self._templates: dict[tuple[str, str], Path] = {}
        self._starter: Pair | None = None

    @property
    def starter(self) -> Pair:
        """The ranks that start anew; a new pair when one of the last has died."""
        if self._starter is not None and not self._starter.alive:
            self.replace_starter()
        self._starter = self._starter or Pair()
        return self._starter

    def replace_starter(self) -> None:
        """After a start that failed, perhaps on one rank only: its group may be out of step."""
        if self._starter is not None:
            self._starter.close()
            self._starter = None

    def close(self) -> None:
        self.replace_starter()
        shutil.rmtree(self.directory, ignore_errors=True)

    def lay_out(self, subject: Subject, scenario: Scenario) -> None:
        """Put what the scenario starts from in the place of the run directory."""
        key = (subject.name, scenario.name)
        if key not in self._templates:
            self._templates[key] = self._prepared(
                subject, scenario, self.directory / f"template-{len(self._templates)}"
            )
        shutil.rmtree(self.root, ignore_errors=True)
        if self._templates[key].exists():
            shutil.copytree(self._templates[key], self.root, symlinks=True)

    def _prepared(self, subject: Subject, scenario: Scenario, path: Path) -> Path:
        if scenario.prepared:
            for outcome in self.starter.run(jobs.whole, Run(subject, str(path), scenario.prepared)):
                if outcome.error is not None:
                    raise outcome.error
        if scenario.litter:
            _litter(path)
        return path

    def calls(self, subject: Subject, scenario: Scenario, mode: str) -> list[str]:
        """The names of the calls there are to be killed at, in a run that is left alone."""
        self.lay_out(subject, scenario)
        with Pair(str(self.root)) as pair:
            killer = Killer(pair, None, mode)
            outcomes = pair.run(jobs.whole, self._run(subject, scenario), decide=killer)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return killer.names

    def _run(self, subject: Subject, scenario: Scenario) -> Run:
        steps = () if scenario.step is None else (scenario.step,)
        return Run(subject, str(self.root), steps, scenario.options)

    def kill(self, point: Point) -> Killer:
        """Run the scenario, killed at the point."""
        subject, scenario = point.subject, point.scenario
        self.lay_out(subject, scenario)
        final = str(self.root / scenario.final) if scenario.final else None
        with Pair(str(self.root)) as pair:
            delay = self.random.uniform(0, 0.03)
            killer = Killer(pair, final, point.mode, point.at, delay)
            pair.run(jobs.whole, self._run(subject, scenario), decide=killer)
        return killer

    def restart(self, point: Point) -> list[Outcome]:
        """The next start, with the same settings; its session stays open."""
        run = Run(point.subject, str(self.root), (), point.scenario.options)
        return self.starter.run(jobs.begin, run)


def _litter(root: Path) -> None:
    """What killed saves and removals leave: staging directories torn and sealed, trash, links half swapped."""
    newest = root / "epoch_0_step_20"
    shutil.copytree(newest, root / f".epoch_0_step_30.staging-{'a' * 32}")
    torn = root / f".epoch_0_step_40.staging-{'b' * 32}"
    shutil.copytree(newest, torn)
    (torn / "MANIFEST.json").unlink()
    (torn / ".parts").mkdir()
    (torn / ".parts" / "rank_00000").write_text("{")
    trash = root / f".trash-{'c' * 32}"
    shutil.copytree(root / "epoch_0_step_10", trash)
    (trash / "config.yaml").unlink()
    (root / f".LATEST.{'d' * 32}").symlink_to("epoch_0_step_20")
    for pointer in ("LATEST", "LOWEST_VAL"):
        (root / pointer).unlink()
        (root / pointer).symlink_to("epoch_0_step_10")


def judge(sweep: Sweep, point: Point) -> tuple[str, list[str], str]:
    """Kill there and start anew: (outcome, broken promises, the call)."""
    sweep.lay_out(point.subject, point.scenario)
    before = inspect.contents(sweep.root)
    killer = sweep.kill(point)
    after = inspect.contents(sweep.root)
    final = point.scenario.final
    published = final is not None and final in after and after[final] != before.get(final)
    wrong = _lost(
        before, after, final, pruning=published and point.scenario.options.keep_last is not None
    )
    if point.mode != "rank1" and (
        (published and not killer.renaming)
        or (killer.renamed and not published and final is not None)
    ):
        wrong.append("the final name is there before its rename, or not after it")
    wrong += inspect.damage(sweep.root)
    wrong += _wrong_start(sweep, point, published)
    return "new" if published else "old", wrong, killer.call


def _lost(
    before: dict[str, str], after: dict[str, str], final: str | None, *, pruning: bool
) -> list[str]:
    """Checkpoints from before that are neither as they were nor set aside as they were."""
    kept = set(after.values())
    return [
        f"{name} is not what it was"
        for name, digest in before.items()
        if digest not in kept and not (pruning and name not in after)
    ]


def _wrong_start(sweep: Sweep, point: Point, published: bool) -> list[str]:
    """What is wrong with the next start, and with a save after it."""
    scenario = point.scenario
    outcomes = sweep.restart(point)
    if errors := [
        f"rank {r} cannot start: {o.error or 'died'}" for r, o in enumerate(outcomes) if not o.ok
    ]:
        sweep.replace_starter()
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
    wrong += inspect.leftovers(sweep.root, running=True) + inspect.wrong_pointers(sweep.root)
    for job, arguments in ((jobs.save, ((NEXT_STEP,),)), (jobs.end, ())):
        outcomes = sweep.starter.run(job, *arguments)
        wrong += [
            f"the next save fails on rank {r}: {o.error or 'died'}"
            for r, o in enumerate(outcomes)
            if not o.ok
        ]
    wrong += inspect.leftovers(sweep.root, running=False) + inspect.damage(sweep.root)
    return wrong + inspect.wrong_pointers(sweep.root)


def classify(sweep: Sweep, point: Point) -> tuple[str, str]:
    """What a baseline's next start finds after the kill: (outcome, the call)."""
    killer = sweep.kill(point)
    outcomes = sweep.restart(point)
    if not all(outcome.ok for outcome in outcomes):
        sweep.replace_starter()
        return "no start", killer.call
    found: Loaded | None = all_ranks([outcome.value for outcome in outcomes])
    if found is None:
        return (
            "ranks differ" if any(o.value for o in outcomes) else "starts from nothing"
        ), killer.call
    if found.seed is None:
        return "a mixture, unnoticed", killer.call
    return ("new" if found.step == point.scenario.step else "old"), killer.call


def all_points(
    sweep: Sweep, subjects: tuple[Subject, ...], scenarios: tuple[Scenario, ...]
) -> list[Point]:
    """Every point there is, in random order, but by turns one at a write and one at any other call while there are
    both: of the calls, nine in ten are small writes."""
    writes: list[Point] = []
    others: list[Point] = []
    for subject in subjects:
        for scenario in scenarios:
            for mode in MODES:
                for at, name in enumerate(sweep.calls(subject, scenario, mode), start=1):
                    (writes if name == "write" else others).append(
                        Point(subject, scenario, mode, at)
                    )
    sweep.random.shuffle(writes)
    sweep.random.shuffle(others)
    return [point for pair in zip_longest(others, writes) for point in pair if point is not None]


def chosen(
    points: Sequence[PointLike], only: str | None, limit: int, seconds: float
) -> Iterator[PointLike]:
    """Up to *limit* points within *seconds*, round and round; the one named *only* where one is."""
    if only is not None:
        points = [point for point in points if str(point) == only]
    end = time.monotonic() + seconds
    for number, point in enumerate(cycle(points) if only is None else points):
        if number >= limit or time.monotonic() > end:
            return
        yield point


def run(
    subjects: tuple[Subject, ...],
    *,
    points: int,
    seed: int,
    seconds: float,
    only: str | None = None,
    scenarios: tuple[Scenario, ...] = SCENARIOS,
    name: str = "kill sweep",
) -> Record:
    """The campaign over this project's formats."""
    sweep = Sweep(seed)
    record = Record(name, {"points": points, "seed": seed, "seconds": seconds, "only": only})
    try:
        every = all_points(sweep, subjects, scenarios)
        record.notes["distinct points"] = len(every)
        for point in chosen(every, only, points, seconds):
            outcome, wrong, call = judge(sweep, point)
            record.add(outcome, wrong, point=str(point), call=call)
    finally:
        sweep.close()
    return record


def run_baseline(subject: Subject, *, points: int, seed: int, seconds: float) -> Record:
    """Run the kill sweep over another program's way of saving, and count the outcomes."""
    sweep = Sweep(seed)
    record = Record(
        f"kill sweep of {subject.name}", {"points": points, "seed": seed, "seconds": seconds}
    )
    try:
        every = all_points(sweep, (subject,), (BASELINE_SCENARIO,))
        record.notes["distinct points"] = len(every)
        for point in chosen(every, None, points, seconds):
            outcome, call = classify(sweep, point)
            record.add(outcome)
            record.notes.setdefault(outcome, []).append(f"{point}: {os.path.basename(call)}")
    finally:
        sweep.close()
    return record
