"""Nth-call faults: on one rank of two, one call of a save after the other fails with ENOSPC or EIO.

Counted are the calls of one name on the run directory by one rank within one ``save()``: opening and closing, reading
files included, and every call that changes something. The call is not carried out; its rank gets the error.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.errors import SaveFailed
from tools.crash import inspect, jobs
from tools.crash.jobs import Run
from tools.crash.kill import Scenario, Sweep, chosen
from tools.crash.pair import NUM_RANKS, THROUGH, Outcome, Pair
from tools.crash.record import Record
from tools.crash.subjects import Options, Subject
from tools.crash.syscalls import RENAMES, Call

SCENARIO = Scenario("save", (10, 20, 30), 40, Options(keep_last=2), resumes=30)
ERRORS = (errno.ENOSPC, errno.EIO)
LIMIT_SECONDS = 30.0
NEXT_STEP = 50


@dataclass(frozen=True)
class Fault:
    """The *at*-th call (from 1) of this *name* on *rank* fails with the errno *number*."""

    subject: Subject
    rank: int
    name: str
    at: int
    number: int

    def __str__(self) -> str:
        return f"{self.subject.name}/rank{self.rank}/{self.name}/{self.at}/{errno.errorcode[self.number]}"


class Injector:
    """Counts calls by rank and name, and says which one fails."""

    def __init__(self, final: Path, fault: Fault | None = None) -> None:
        self.counts: Counter[tuple[int, str]] = Counter()
        self.failed: Call | None = None
        self.published = False
        self._final, self._fault = str(final), fault

    def __call__(self, rank: int, call: Call) -> int:
        self.counts[rank, call.name] += 1
        fault = self._fault
        if fault and (rank, call.name, self.counts[rank, call.name]) == (
            fault.rank,
            fault.name,
            fault.at,
        ):
            self.failed = call
            return fault.number
        if call.name in RENAMES and call.path == self._final and self.failed is None:
            self.published = True
        return THROUGH


class Faults(Sweep):
    """One pair of ranks that is never killed, only failed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._pair: Pair | None = None

    @property
    def pair(self) -> Pair:
        if self._pair is not None and not self._pair.alive:
            self._pair.close()
            self._pair = None
        self._pair = self._pair or Pair(str(self.root))
        return self._pair

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
        super().close()

    def save(self, subject: Subject, fault: Fault | None) -> tuple[Injector, list[Outcome]]:
        """Start on the scenario's directory, then save with the fault."""
        self.lay_out(subject, SCENARIO)
        assert SCENARIO.final is not None
        injector = Injector(self.root / SCENARIO.final, fault)
        for outcome in self.pair.run(
            jobs.begin, Run(subject, str(self.root), (), SCENARIO.options)
        ):
            if outcome.error is not None:
                raise outcome.error
        return injector, self.pair.run(jobs.save, (SCENARIO.step,), decide=injector)


def all_faults(faults: Faults, subject: Subject) -> list[Fault]:
    """Every call of an undisturbed save, with every errno."""
    injector, _ = faults.save(subject, None)
    return [
        Fault(subject, rank, name, at, number)
        for (rank, name), count in sorted(injector.counts.items())
        for at in range(1, count + 1)
        for number in ERRORS
    ]


def judge(faults: Faults, fault: Fault) -> tuple[str, list[str], str]:
    """Save with the fault: (outcome, broken promises, the call that failed)."""
    faults.lay_out(fault.subject, SCENARIO)
    before = inspect.contents(faults.root)
    injector, outcomes = faults.save(fault.subject, fault)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    call = str(injector.failed or "the call did not happen")
    if injector.failed is None:
        outcome, wrong = (
            "not reached",
            [f"rank {r} failed: {o.error}" for r, o in enumerate(outcomes) if not o.ok],
        )
    elif failed:
        outcome, wrong = (
            "failed on both ranks",
            _wrong_failure(fault, injector.failed, outcomes, faults.root),
        )
        wrong += [
            f"{name} is not what it was"
            for name in before
            if before[name] != _now(faults.root).get(name)
        ]
        wrong += [f"the save failed, and {SCENARIO.final} is there"] * (
            SCENARIO.final in _now(faults.root)
        )
    else:
        outcome, wrong = "saved all the same", _wrong_success(faults.root, injector)
    if any(outcome.died for outcome in outcomes):
        wrong.append(f"a rank died, or took longer than {LIMIT_SECONDS} s")
    return outcome, wrong + _wrong_afterwards(faults, fault), call


def _now(root: Path) -> dict[str, str]:
    return inspect.contents(root)


def _wrong_failure(fault: Fault, call: Call, outcomes: list[Outcome], root: Path) -> list[str]:
    """Both ranks must say which rank met which error on which path."""
    wrong = []
    for rank, outcome in enumerate(outcomes):
        if not isinstance(outcome.error, SaveFailed):
            wrong.append(
                f"rank {rank} ended with {type(outcome.error).__name__}, no SaveFailed: {outcome.error}"
            )
            continue
        text = " | ".join(str(outcome.error).split("\n  "))
        said = {"rank": f"rank {fault.rank}", "errno": errno.errorcode[fault.number]}
        wrong += [
            f"rank {rank}'s error does not name the {what}"
            for what, part in said.items()
            if part not in text
        ]
        if not any(name in text for name in _paths_of(call, root)):
            wrong.append(f"rank {rank}'s error does not name the path: {text}")
    return wrong


def _paths_of(call: Call, root: Path) -> tuple[str, ...]:
    """What a message may name: the file itself; its directory or the run's where the call was a library's own, or only
    read; for a link that was to be swapped, the link."""
    name = os.path.basename(call.path)
    if not call.changes or layout.HF_METADATA in call.path:
        return (
            name,
            *(str(parent) for parent in Path(call.path).parents if parent.is_relative_to(root)),
        )
    return (name, name[1:].split(".")[0]) if name.startswith(".") else (name,)


def _wrong_success(root: Path, injector: Injector) -> list[str]:
    """A fault may be borne only where the checkpoint is whole and pointed to all the same, or just not pointed to."""
    assert SCENARIO.final is not None
    wrong = (
        [] if (root / SCENARIO.final).is_dir() else ["save() returned, and there is no checkpoint"]
    )
    return wrong + inspect.damage(root)


def _wrong_afterwards(faults: Faults, fault: Fault) -> list[str]:
    """The next save of the same run, then a new start, which clears what was left over."""
    wrong = []
    for job, arguments in ((jobs.save, ((NEXT_STEP,),)), (jobs.end, ())):
        outcomes = faults.pair.run(job, *arguments)
        wrong += [
            f"{job.__name__} afterwards fails on rank {r}: {o.error or 'died'}"
            for r, o in enumerate(outcomes)
            if not o.ok
        ]
    if wrong:
        faults.pair.kill(range(NUM_RANKS))
        faults.pair.finish()
        return wrong
    outcomes = faults.pair.run(
        jobs.begin, Run(fault.subject, str(faults.root), (), SCENARIO.options)
    )
    found = {outcome.value.step if outcome.ok and outcome.value else None for outcome in outcomes}
    wrong += [] if found == {NEXT_STEP} else [f"the next start finds {found}"]
    wrong += inspect.leftovers(faults.root, running=True) + inspect.wrong_pointers(faults.root)
    faults.pair.run(jobs.end)
    return wrong + inspect.damage(faults.root)


def run(
    subjects: tuple[Subject, ...],
    *,
    points: int,
    seed: int,
    seconds: float,
    only: str | None = None,
) -> Record:
    """The campaign: all faults in random order, or as many as *points* and *seconds* allow."""
    faults = Faults(seed)
    record = Record("faults", {"points": points, "seed": seed, "seconds": seconds, "only": only})
    try:
        every = _shuffled(faults, subjects)
        record.notes["distinct points"] = len(every)
        for fault in chosen(every, only, min(points, len(every)), seconds):
            outcome, wrong, call = judge(faults, fault)
            record.add(outcome, wrong, point=str(fault), call=call)
    finally:
        faults.close()
    return record


def _shuffled(faults: Faults, subjects: tuple[Subject, ...]) -> list[Fault]:
    """By turns a failing write and any other failing call: the writes are many and alike."""
    every = [fault for subject in subjects for fault in all_faults(faults, subject)]
    faults.random.shuffle(every)
    return [
        *_in_turn([f for f in every if f.name != "write"], [f for f in every if f.name == "write"])
    ]


def _in_turn(first: list[Fault], second: list[Fault]) -> Iterator[Fault]:
    for index in range(max(len(first), len(second))):
        yield from (part[index] for part in (first, second) if index < len(part))
