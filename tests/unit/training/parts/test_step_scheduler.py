"""Cadence: what is validated and saved when, and that the last step is saved exactly once."""

from hypothesis import given
from hypothesis import strategies as st

from automodel_ckpt.config.keys.ranks_and_steps import StepSchedulerConfig as Settings
from automodel_ckpt.training.counters.step_scheduler import StepScheduler

counts = st.none() | st.integers(1, 12)


@st.composite
def sections(draw: st.DrawFn) -> Settings:
    """Any section, each of which ends by itself."""
    return Settings(
        max_steps=draw(st.none() | st.integers(1, 40)),
        num_epochs=draw(st.none() | st.integers(1, 5)),
        ckpt_every_steps=draw(counts),
        ckpt_every_epochs=draw(counts),
        ckpt_every_minutes=draw(st.none() | st.floats(0.01, 1.0)),
        ckpt_on_best=draw(st.booleans()),
        val_every_steps=draw(counts),
        max_time=draw(st.none() | st.integers(1, 200).map(str)),
    )


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


@given(sections(), st.integers(1, 15), st.booleans())
def test_all_intervals_are_kept_and_every_step_is_saved_once_and_validated(
    settings: Settings, steps_per_epoch: int, has_validation: bool
) -> None:
    clock = Clock()
    scheduler = StepScheduler(settings, has_validation=has_validation, clock=clock)
    done = drive(scheduler, clock, steps_per_epoch)
    assert done["saved"][-1] == scheduler.step
    assert done["saved"] == sorted(set(done["saved"]))
    assert not scheduler.unsaved
    steps = range(1, scheduler.step + 1)
    every_epoch = settings.ckpt_every_epochs and settings.ckpt_every_epochs * steps_per_epoch
    wanted = [(settings.ckpt_every_steps, "saved"), (every_epoch, "saved")]
    if has_validation:
        wanted.append((settings.val_every_steps, "validated"))
    for every, kind in wanted:
        assert not isinstance(every, str)
        assert every is None or set(steps[every - 1 :: every]) <= set(done[kind])
    assert set(done["validated"]) >= set(done["saved"]) if has_validation else not done["validated"]
    if (settings.ckpt_every_steps, every_epoch, settings.ckpt_every_minutes) == (None,) * 3:
        assert done["saved"] == [scheduler.step]


def test_max_time_reserves_one_step_and_two_saves() -> None:
    """The step that is about to be counted may have to be saved, and so may the next one."""
    clock = Clock()
    scheduler = StepScheduler(Settings(max_time="100"), clock=clock)
    scheduler.start_step()
    clock.now = 5.0
    scheduler.finish_step(epoch=0, epochs_done=0, num_samples=1, num_tokens=1)
    scheduler.note_save(10.0)
    clock.now = 74.9
    assert not scheduler.read_clock().time_is_up
    clock.now = 75.0
    assert scheduler.read_clock().time_is_up
