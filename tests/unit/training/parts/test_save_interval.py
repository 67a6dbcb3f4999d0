"""``ckpt_every_steps: auto``."""

import math

import pytest

from automodel_ckpt.config.keys.ranks_and_steps import StepSchedulerConfig
from automodel_ckpt.training.counters.rules import FIRST_STEPS, best_interval_seconds
from automodel_ckpt.training.counters.step_scheduler import StepScheduler

HOUR = 3600.0


def test_the_interval_loses_least_to_saves_and_to_work_done_again() -> None:
    def lost(interval: float, cost: float, mtbf: float) -> float:
        """Time that the job takes beside its work, per unit of work (Daly's model with exponential failures)."""
        return mtbf * math.expm1((interval + cost) / mtbf) / interval

    for cost, mtbf in ((1.0, HOUR), (60.0, 24 * HOUR), (100.0, HOUR)):
        best = best_interval_seconds(cost, mtbf)
        assert best == pytest.approx(math.sqrt(2 * cost * mtbf), rel=0.3)
        assert lost(best, cost, mtbf) <= min(
            lost(factor * best, cost, mtbf) for factor in (0.8, 0.9, 1.1, 1.25)
        )
    assert best_interval_seconds(3 * HOUR, HOUR) == HOUR


def test_the_leader_wants_a_save_after_its_own_number_of_steps_also_after_a_resume() -> None:
    now = [0.0]

    def step(scheduler: StepScheduler) -> bool:
        scheduler.start_step()
        now[0] += 1.0
        scheduler.finish_step(epoch=0, epochs_done=0, num_samples=1, num_tokens=1)
        return scheduler.apply_clock(scheduler.read_clock(), stop=False).save

    automatic = StepSchedulerConfig(
        max_steps=1000, ckpt_every_steps="auto", mtbf_hours=50 / HOUR, ckpt_every_epochs=None
    )
    scheduler = StepScheduler(automatic, clock=lambda: now[0])
    assert [step(scheduler) for _ in range(FIRST_STEPS)] == [False] * (FIRST_STEPS - 1) + [True]
    scheduler.note_save(1.0)
    assert scheduler.note_published(1.0, 1.0) is not None
    assert [step(scheduler) for _ in range(10)].index(True) + 1 == round(
        best_interval_seconds(1.0, 50.0)
    )
    resumed = StepScheduler(automatic, clock=lambda: now[0])
    resumed.load_state_dict(scheduler.state_dict())
    assert [step(resumed) for _ in range(FIRST_STEPS)].index(True) == FIRST_STEPS - 1
    assert not step(StepScheduler(StepSchedulerConfig(max_steps=100), clock=lambda: now[0]))
