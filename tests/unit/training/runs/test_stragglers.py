"""Ranks that are slower than others: which are reported, with which numbers, and that noise is not."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.checkpoint.run.timeline import ARRIVAL, FORWARD, SAVES, STEPS
from automodel_ckpt.config.keys.monitoring import HangsConfig
from automodel_ckpt.logs.timeline import Timeline
from automodel_ckpt.training.values.readback import ForwardTimer
from automodel_ckpt.training.watch.stragglers import (
    Figures,
    Straggler,
    StragglerWatch,
    _median_of_others,
    slower_ranks,
)

USUAL = Figures(wait=0.1, step=2.0, forward=1.0, per_token=0.01)


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        (USUAL, []),
        (Figures(0.1, 2.0, 1.3, 0.013), [Straggler(1, FORWARD, 1.3, 1.0)]),
        (Figures(0.1, 2.0, 1.05, 0.0105), []),
        # Longer rows, or shorter ones.
        (Figures(0.1, 2.0, 1.3, 0.01), []),
        (Figures(0.1, 2.0, 1.0, 0.013), []),
        (Figures(0.1, 2.0, 0.0, 0.0), []),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_a_rank_is_slow_by_its_time_and_by_that_for_each_token(
    mine: Figures, expected: list[Straggler], num_ranks: int
) -> None:
    figures = [USUAL] * num_ranks
    figures[1] = mine
    assert slower_ranks(figures, [0] * num_ranks, 0.1) == expected


def test_the_rank_that_others_wait_for_and_only_ranks_of_one_stage_are_compared() -> None:
    waiting = Figures(0.5, 2.0, 1.0, 0.01)
    (found,) = slower_ranks([waiting, Figures(0.0, 2.0, 1.0, 0.01), waiting], [0] * 3, 0.1)
    assert found == Straggler(1, ARRIVAL, 0.5, 2.0)
    assert found.share == 0.25
    last = Figures(0.1, 2.0, 1.7, 0.017)
    assert slower_ranks([USUAL, USUAL, last, last], [0, 0, 1, 1], 0.1) == []


def test_the_median_of_the_others_is_that_of_a_list_without_the_rank() -> None:
    chance = random.Random(3)
    for count in (2, 3, 8, 9):
        values = [float(chance.randint(0, 4)) for _ in range(count)]
        for number, own in enumerate(values):
            others = values[:number] + values[number + 1 :]
            assert _median_of_others(sorted(values), own) == median(others)


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
            each.note_forward(FakeTime(seconds, num_tokens))  # type: ignore[arg-type]
            each.note_step()
            here = each.figures_here()
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


def test_messages_become_rarer_and_the_end_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    watched = watch(4, 0, [], steps=10)
    with caplog.at_level(logging.INFO, "automodel_ckpt"):
        for step in range(1, 101):
            watched.note_step()
            if step % 10 == 0:
                slow = 1.5 if step < 100 else 1.0
                watched.compare(step, [0, 1, 1, 1] * 3 + [0, 1, slow, slow])
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in texts] == [
        *["rank 3 (node n1) is slower than the others"] * 3,
        "rank 3 (node n1) is no longer slower than the others",
    ]
    assert "for 20 steps, its forward passes have taken 1.5 s, 50% more than the median" in texts[0]
    assert "for 40 steps" in texts[1]
    assert "for 80 steps" in texts[2]


@pytest.mark.parametrize(("share", "num_reports"), [(0.4, 2), (0.6, 0)])
def test_the_section_sets_what_is_slow(share: float, num_reports: int) -> None:
    """straggler_steps: 7, and straggler_share: *share*, for a rank that is slower by a half."""
    reports: list[Mapping[str, Any]] = []
    watched = watch(4, 0, reports, steps=7, share=share)
    for step in range(1, 22):
        watched.note_step()
        if watched.figures_here():
            watched.compare(step, [0, 1, 1, 1] * 3 + [0, 1, 1.5, 1.5])
    assert len(reports) == num_reports


def test_waits_after_a_save_do_not_count() -> None:
    """Rank 0 has the most work in a save, and the others wait for it."""
    timeline = Timeline()
    timeline.enter(STEPS)
    watched = watch(2, 1, [], timeline, steps=2)
    watched.note_wait(0.1)
    watched.note_step()
    with timeline.phase(SAVES):
        pass
    watched.note_wait(5.0)
    watched.note_wait(0.3)
    watched.note_step()
    assert watched.figures_here()[4] == pytest.approx(0.2)
    assert watched.figures_here()[:4] == [0.0] * 4


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
    found = StragglerWatch(settings, layout, timeline or Timeline(), hosts, reports.append)
    found._interrupted = found._timeline.seconds_outside((STEPS,))
    return found


def test_one_forward_pass_of_a_step_is_measured() -> None:
    timer = ForwardTimer(nn.Linear(2, 2), torch.device("cpu"))
    rows = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "pixels": torch.zeros(100)}
    assert timer.take() is None
    began = time.perf_counter()
    for _ in range(2):
        with timer.measuring(rows):
            torch.ones(1)
    first = timer.take()
    assert first is not None
    assert (first.num_tokens, first.waits) == (6, ())
    assert 0.0 < first.seconds <= time.perf_counter() - began
    assert timer.take() is None
