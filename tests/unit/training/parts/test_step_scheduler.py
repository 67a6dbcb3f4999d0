"""Cadence: what is validated and saved when, and that the last step is saved exactly once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automodel_ckpt.training.counters.step_scheduler import (
    Cadence,
    StepScheduler,
)

counts = st.none() | st.integers(1, 12)


@st.composite
def cadences(draw: st.DrawFn) -> Cadence:
    """Any cadence that ends by itself."""
    cadence = Cadence(
        max_steps=draw(st.none() | st.integers(1, 40)),
        num_epochs=draw(st.none() | st.integers(1, 5)),
        ckpt_every_steps=draw(counts),
        ckpt_every_epochs=draw(counts),
        ckpt_every_minutes=draw(st.none() | st.floats(0.01, 1.0)),
        ckpt_on_best=draw(st.booleans()),
        val_every_steps=draw(counts),
        max_time_seconds=draw(st.none() | st.floats(1.0, 200.0)),
        has_validation=draw(st.booleans()),
    )
    if (cadence.max_steps, cadence.num_epochs, cadence.max_time_seconds) == (None, None, None):
        return replace(cadence, max_steps=7)
    return cadence


class Clock:
    """Seconds that pass only when a test advances them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drive(
    scheduler: StepScheduler, clock: Clock, steps_per_epoch: int, *, step_seconds: float = 5.0
) -> dict[str, list[int]]:
    """Run to the end as a recipe does; the steps that were validated and saved."""
    done: dict[str, list[int]] = {"validated": [], "saved": []}
    while not scheduler.is_finished():
        scheduler.start_step()
        clock.now += step_seconds
        epoch, index = divmod(scheduler.step, steps_per_epoch)
        scheduler.finish_step(
            epoch=epoch,
            epochs_done=epoch + (index == steps_per_epoch - 1),
            num_samples=4,
            num_tokens=100,
        )
        due = scheduler.apply_clock(scheduler.read_clock(), stop=False)
        if due.validate:
            done["validated"].append(scheduler.step)
        if due.save:
            clock.now += 1.0
            scheduler.note_save(1.0)
            done["saved"].append(scheduler.step)
        assert due.last == scheduler.is_finished()
    return done


@given(cadences(), st.integers(1, 15))
def test_the_last_step_is_saved_exactly_once_and_no_step_twice(
    cadence: Cadence, steps_per_epoch: int
) -> None:
    clock = Clock()
    scheduler = StepScheduler(cadence, clock=clock)
    saved = drive(scheduler, clock, steps_per_epoch)["saved"]
    assert saved[-1] == scheduler.step
    assert saved == sorted(set(saved))
    assert not scheduler.unsaved


@given(cadences(), st.integers(1, 15))
def test_every_cadence_is_honoured_and_every_save_is_validated(
    cadence: Cadence, steps_per_epoch: int
) -> None:
    clock = Clock()
    scheduler = StepScheduler(cadence, clock=clock)
    done = drive(scheduler, clock, steps_per_epoch)
    steps = range(1, scheduler.step + 1)
    if cadence.ckpt_every_steps:
        assert set(steps[cadence.ckpt_every_steps - 1 :: cadence.ckpt_every_steps]) <= set(
            done["saved"]
        )
    if cadence.ckpt_every_epochs:
        every = cadence.ckpt_every_epochs * steps_per_epoch
        assert set(steps[every - 1 :: every]) <= set(done["saved"])
    if cadence.val_every_steps and cadence.has_validation:
        assert set(steps[cadence.val_every_steps - 1 :: cadence.val_every_steps]) <= set(
            done["validated"]
        )
    assert (
        set(done["validated"]) >= set(done["saved"])
        if cadence.has_validation
        else not done["validated"]
    )
    by_minutes_only = (
        cadence.ckpt_every_steps,
        cadence.ckpt_every_epochs,
        cadence.ckpt_every_minutes,
    ) == (None,) * 3
    if by_minutes_only:
        assert done["saved"] == [scheduler.step]


def test_max_time_reserves_one_step_and_two_saves() -> None:
    """The step that is about to be counted may have to be saved, and so may the next one."""
    clock = Clock()
    scheduler = StepScheduler(Cadence(max_time_seconds=100.0), clock=clock)
    scheduler.start_step()
    clock.now = 5.0
    scheduler.finish_step(epoch=0, epochs_done=0, num_samples=1, num_tokens=1)
    scheduler.note_save(10.0)
    clock.now = 74.9
    assert not scheduler.read_clock().time_is_up
    clock.now = 75.0
    assert scheduler.read_clock().time_is_up


@pytest.mark.parametrize(
    ("cadence", "sentence"),
    [
        (
            Cadence(max_steps=100, num_epochs=2),
            "num_epochs 2 ended the run at step 16 of max_steps 100",
        ),
        (Cadence(max_steps=10, num_epochs=2), "max_steps 10 ended the run"),
        (
            Cadence(max_steps=100, max_time_seconds=32.0),
            "max_time (32 s) ended the run at step 6 of max_steps 100; the same command continues it",
        ),
    ],
)
def test_what_ended_a_run_is_reported(cadence: Cadence, sentence: str) -> None:
    clock = Clock()
    scheduler = StepScheduler(cadence, clock=clock)
    drive(scheduler, clock, 8)
    assert scheduler.reason_of_end() == sentence
