"""The estimate in tools/goodput_model.py, compared with the figures of its source and with a simulation."""

from __future__ import annotations

import random

import pytest

from tools.goodput_model import Saving, goodput, interval_of, optimum

MINUTE, HOUR = 60.0, 3600.0


@pytest.mark.parametrize(
    ("mtbf", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)]
)
def test_the_best_interval_is_that_of_the_paper(mtbf: float, minutes: float) -> None:
    """Daly (2006), figures 3 to 5: a dump takes 5 minutes."""
    assert optimum(5 * MINUTE, mtbf) / MINUTE == pytest.approx(minutes, abs=0.5)


def simulated(interval: float, saving: Saving, restart: float, mtbf: float) -> float:
    """The useful share of a run of 20,000 failures. An asynchronous save is written while training continues."""
    chance = random.Random(1)
    useful = seconds = 0.0
    for _ in range(20_000):
        left = chance.expovariate(1 / mtbf)
        seconds += left
        left -= restart + saving.load
        # The saves that were usable before the failure, each after its interval and the wait of those before.
        cycle = interval + saving.wait
        usable = (left - saving.usable + saving.wait) / cycle
        useful += interval * max(0, int(usable))
    return useful / seconds


@pytest.mark.parametrize(
    ("interval", "saving"),
    [
        (10.0, Saving("memory", wait=0.1, usable=3, load=1)),
        (120.0, Saving("store", wait=0.1, usable=110, load=100)),
        (800.0, Saving("store", wait=110, usable=110, load=100)),
    ],
)
@pytest.mark.parametrize("restart", [5.0, 300.0])
def test_the_goodput_is_that_of_a_simulated_run(
    interval: float, saving: Saving, restart: float
) -> None:
    expected = simulated(interval, saving, restart, HOUR)
    assert goodput(interval, saving, restart, HOUR) == pytest.approx(expected, rel=0.03)


def test_an_interval_has_whole_steps_and_is_not_shorter_than_a_write() -> None:
    assert interval_of(Saving("memory", 0.1, 3, 1, every_step=True), HOUR, 10.0) == 10
    assert interval_of(Saving("store", 0.1, 110, 100), HOUR, 10.0) == 110
    assert interval_of(Saving("disk", 0.1, 3, 1), HOUR, 10.0) == 30
