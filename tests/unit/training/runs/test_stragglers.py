"""Ranks that are slower than others: which are reported, with which numbers, and that noise is not."""

import random
from collections.abc import Mapping
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_ckpt.checkpoint.run.notes import FORWARD, STEPS
from automodel_ckpt.config.keys.monitoring import HangsConfig
from automodel_ckpt.logs.timeline import Timeline
from automodel_ckpt.training.watch.stragglers import StragglerWatch


@pytest.mark.parametrize("slow", [None, 17])
def test_noise_is_not_reported_and_a_rank_that_is_slower_by_a_third_is(slow: int | None) -> None:
    """32 ranks, rows of all lengths, and times that vary by a tenth, with a delay now and then."""
    chance = random.Random(5)
    reports: list[Mapping[str, Any]] = []
    timeline: Any = SteppingTimeline()
    watches = [watch(32, rank, reports, timeline) for rank in range(32)]
    for step in range(1, 601):
        sums: list[float] = []
        for rank, each in enumerate(watches):
            num_tokens = chance.randint(100, 1000)
            seconds = (0.05 + num_tokens / 2000) * chance.gauss(1.0, 0.1)
            if chance.random() < 0.02:
                seconds += 1.0
            if rank == slow:
                seconds *= 1.3
            each.note_wait(abs(chance.gauss(0.01, 0.01)))
            each.note_step()
            forward: Any = FakeTime(seconds, num_tokens)
            here = each.figures_here(forward)
            sums = [a + b for a, b in zip(sums, here, strict=True)] if sums else here
        timeline.seconds += 1.0
        for each in watches:
            each.compare(step, sums)
    if slow is None:
        assert reports == []
        return
    assert {report["rank"] for report in reports} == {slow}
    assert [report["step"] for report in reports] == list(range(200, 601, 100))
    assert [report["steps"] for report in reports] == [200, *[100] * 4]
    assert mean(report["share"] for report in reports) == pytest.approx(0.3, abs=0.05)
    for report in reports:
        assert report["share"] > 0.1
        assert (report["event"], report["part"], report["node"]) == ("straggler", FORWARD, "n8")


class SteppingTimeline:
    """All of its time is in steps."""

    seconds = 0.0

    def seconds_in(self, _: Any) -> float:
        return self.seconds

    def seconds_outside(self, _: Any) -> float:
        return 0.0


class FakeTime:
    def __init__(self, seconds: float, num_tokens: int) -> None:
        self.seconds, self.num_tokens = seconds, num_tokens


def watch(
    num_ranks: int,
    rank: int,
    reports: list[Mapping[str, Any]],
    timeline: Timeline | None = None,
    steps: int = 100,
    share: float = 0.1,
) -> StragglerWatch:
    layout: Any = SimpleNamespace(
        rank=rank, world_size=num_ranks, is_rank0=rank == 0, sizes=SimpleNamespace(pp=1)
    )
    settings = HangsConfig(straggler_steps=steps, straggler_share=share)
    hosts = [f"n{number // 2}" for number in range(num_ranks)]

    def note(event: str, step: int, record: Mapping[str, Any]) -> None:
        reports.append({"event": event, "step": step, **record})

    found = StragglerWatch(settings, layout, timeline or Timeline(), hosts, note)
    found._interrupted = found._timeline.seconds_outside((STEPS,))
    return found


@pytest.mark.parametrize(("share", "num_reports"), [(0.4, 2), (0.6, 0)])
def test_the_section_sets_what_is_slow(share: float, num_reports: int) -> None:
    """straggler_steps: 7, and straggler_share: *share*, for a rank that is slower by a half."""
    reports: list[Mapping[str, Any]] = []
    watched = watch(4, 0, reports, steps=7, share=share)
    for step in range(1, 22):
        watched.note_step()
        if watched.figures_here(None):
            watched.compare(step, [0, 1, 1, 1] * 3 + [0, 1, 1.5, 1.5])
    assert len(reports) == num_reports
