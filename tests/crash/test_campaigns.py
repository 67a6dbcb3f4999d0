"""A short sample of every campaign of tools/crash; `make crash` runs them for long (docs/guarantees.md)."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import pytest

from tests.support.servers.command_server import CommandServer, Starting
from tools.crash import (
    endurance,
    faults,
    flips,
    jobs,
    kill,
    power,
    syscalls,
)
from tools.crash.subjects import BASELINES, OURS, OURS_ASYNC, OURS_INCREMENTAL, Ours

SEED = 1
"""The same points in each run of the suite: `make crash` has the others."""
SECONDS = 120
"""More than the points of a test take where other processes keep the machine busy."""


@pytest.fixture(autouse=True)
def _warm() -> None:
    jobs.warm_up()


@functools.cache
def no_calls() -> str | None:
    return syscalls.unsupported()


def needs_calls() -> None:
    if reason := no_calls():
        pytest.skip(reason)


@pytest.fixture
def sweep() -> Iterator[kill.Sweep]:
    needs_calls()
    made = kill.Sweep(seed=0)
    yield made
    made.close()


def scenario(name: str) -> kill.Scenario:
    return next(one for one in kill.SCENARIOS if one.name == name)


def last_calls(sweep: kill.Sweep, name: str, subject: Ours) -> list[int]:
    """The numbers, in rank 0, of the calls that are no writes, from the last."""
    names = sweep.calls(subject, scenario(name), "rank0")
    return [at for at in range(len(names), 0, -1) if names[at - 1] != "write"]


def test_no_kill_of_a_sample_loses_a_checkpoint() -> None:
    needs_calls()
    chosen = tuple(scenario(name) for name in ("prune", "recover"))
    done = kill.run(OURS[2:], points=6, seed=SEED, seconds=SECONDS, scenarios=chosen)
    assert done.failures == [] and done.points == 6


def test_no_kill_of_a_sample_loses_a_checkpoint_that_is_written_in_the_background(
    sweep: kill.Sweep,
) -> None:
    subject, chosen = OURS_ASYNC[1], scenario("save")
    for mode, at in (("rank1", 9), ("rank0", 25), ("both", 60)):
        _, wrong, call = kill.judge(sweep, kill.Point(subject, chosen, mode, at))
        assert wrong == [], call


def test_no_kill_of_a_sample_loses_or_changes_a_file_that_checkpoints_share() -> None:
    needs_calls()
    chosen = tuple(scenario(name) for name in ("save", "prune", "back"))
    subject = OURS_INCREMENTAL[0]
    done = kill.run((subject,), points=6, seed=SEED, seconds=SECONDS, scenarios=chosen)
    assert done.failures == [] and done.points == 6


@pytest.mark.parametrize("name", [pytest.param("save", marks=pytest.mark.further), "back"])
def test_a_kill_at_the_last_calls_of_a_save_leaves_both_pointers_right_after_the_next_start(
    sweep: kill.Sweep, name: str
) -> None:
    for at in random.Random(SEED).sample(last_calls(sweep, name, Ours())[:14], 5):
        _, wrong, call = kill.judge(sweep, kill.Point(Ours(), scenario(name), "rank0", at))
        assert wrong == [], call


@pytest.mark.parametrize("file_system", power.FILE_SYSTEMS)
def test_what_had_returned_is_there_after_a_power_cut(file_system: str) -> None:
    if reason := power.unsupported(file_system):
        pytest.skip(reason)
    done = power.run(OURS[:1], (file_system,), points=4, seed=SEED, seconds=SECONDS)
    assert done.failures == [] and done.points == 4


@pytest.mark.parametrize("file_system", power.FILE_SYSTEMS)
def test_a_power_cut_loses_no_file_that_checkpoints_share(file_system: str) -> None:
    if reason := power.unsupported(file_system):
        pytest.skip(reason)
    done = power.run(OURS_INCREMENTAL[1:2], (file_system,), points=4, seed=SEED, seconds=SECONDS)
    assert done.failures == [] and done.points == 4


def test_no_failing_call_of_a_sample_does_more_than_fail_the_save() -> None:
    needs_calls()
    done = faults.run(OURS, points=6, seed=SEED, seconds=SECONDS)
    assert done.failures == [] and done.points == 6


def test_every_flipped_bit_of_a_sample_is_found_and_named() -> None:
    done = flips.run(OURS, points=200, seed=SEED, seconds=SECONDS)
    assert done.failures == [] and done.points > 300


@pytest.mark.further
def test_plain_ways_of_saving_are_measured_by_the_same_sweeps() -> None:
    needs_calls()
    swept = kill.run_baseline(BASELINES[0], points=4, seed=1, seconds=10)
    assert swept.points and set(swept.outcomes) <= {
        "old",
        "new",
        "no start",
        "a mixture, unnoticed",
        "ranks differ",
    }
    flipped = flips.run_baseline(BASELINES[1], points=8, seed=1, seconds=10)
    assert flipped.outcomes["wrong values, unnoticed"] > 5


def test_a_killed_trainer_ends_where_an_undisturbed_one_ends(
    commands: CommandServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endurance, "subprocess", Starting(commands))
    monkeypatch.setattr(endurance, "LONGEST_SECONDS", 4.0)
    long = endurance.command
    monkeypatch.setattr(
        endurance, "command", lambda *run: [*long(*run), "--validation_dataset.max_samples=16"]
    )
    done = endurance.run(points=1, seed=SEED, seconds=SECONDS, steps=8)
    assert done.failures == [] and done.outcomes["finished as if undisturbed"]
