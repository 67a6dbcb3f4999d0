"""A short sample of every campaign of tools/crash; `make crash` runs them for long (docs/guarantees.md)."""

import functools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.base.durable_io import fsync_directory
from automodel_ckpt.checkpoint.parts import commit
from tests.support.servers.command_server import CommandServer
from tools.crash import calls, flips, jobs, power, signals, syscalls
from tools.crash.place import Scenario
from tools.crash.record import Record
from tools.crash.subjects import OURS, OURS_ASYNC, OURS_INCREMENTAL, Subject

SEED = 1
"""The same points in each run of the suite: `make crash` has the others."""
FILE_SYSTEMS = ["ext4", pytest.param("xfs", marks=pytest.mark.further)]
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
def sweep() -> Iterator[calls.Sweep]:
    needs_calls()
    with calls.Sweep(seed=0) as made:
        yield made


def scenario(name: str) -> Scenario:
    return next(one for one in calls.SCENARIOS if one.name == name)


def kills(subject: Subject, *names: str) -> Record:
    """A sample of three kills."""
    chosen = tuple(map(scenario, names))
    limits: Any = {"points": 3, "seed": SEED, "seconds": SECONDS}
    return calls.run("sample", (subject,), calls.judge_kill, chosen, **limits)


def last_calls(sweep: calls.Sweep, name: str, subject: Subject) -> list[int]:
    """The numbers, in rank 0, of the calls that are no writes, from the last."""
    points = sweep.kills(subject, scenario(name))
    found = [p.at for call, p in points if p.ranks == "rank0" and call != "write"]
    return found[::-1]


def test_no_kill_of_a_sample_loses_a_checkpoint() -> None:
    needs_calls()
    done = kills(OURS[2], "prune", "recover")
    assert done.failures == [] and done.points == 3


def test_no_kill_of_a_sample_loses_a_checkpoint_that_is_written_in_the_background(
    sweep: calls.Sweep,
) -> None:
    subject, chosen = OURS_ASYNC[1], scenario("save")
    for mode, at in (("rank0", 25), ("both", 60)):
        _, wrong, call = calls.judge_kill(sweep, calls.Point(subject, chosen, mode, at))
        assert wrong == [], call


def test_no_kill_of_a_sample_loses_or_changes_a_file_that_checkpoints_share() -> None:
    needs_calls()
    done = kills(OURS_INCREMENTAL[0], "prune")
    assert done.failures == [] and done.points == 3


@pytest.mark.parametrize("name", [pytest.param("save", marks=pytest.mark.further), "back"])
def test_a_kill_at_the_last_calls_of_a_save_leaves_both_pointers_right_after_the_next_start(
    sweep: calls.Sweep, name: str
) -> None:
    for at in random.Random(SEED).sample(last_calls(sweep, name, OURS[0])[:14], 3):
        _, wrong, call = calls.judge_kill(sweep, calls.Point(OURS[0], scenario(name), "rank0", at))
        assert wrong == [], call


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_what_had_returned_is_there_after_a_power_cut(file_system: str) -> None:
    if reason := power.unsupported(file_system):
        pytest.skip(reason)
    done = power.run(OURS[:1], (file_system,), points=2, seed=SEED, seconds=SECONDS)
    assert done.failures == [] and done.points == 2


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_a_power_cut_loses_no_file_that_checkpoints_share(file_system: str) -> None:
    if reason := power.unsupported(file_system):
        pytest.skip(reason)
    done = power.run(OURS_INCREMENTAL[1:2], (file_system,), points=2, seed=SEED, seconds=SECONDS)
    assert done.failures == [] and done.points == 2


def test_no_failing_call_of_a_sample_does_more_than_fail_the_save() -> None:
    needs_calls()
    limits: Any = {"points": 3, "seed": SEED, "seconds": SECONDS}
    done = calls.run("faults", OURS[:1], calls.judge_fault, calls.FAULTS, **limits)
    assert done.failures == [] and done.points == 3


def test_every_flipped_bit_of_a_sample_is_found_and_named() -> None:
    done = flips.run(OURS[:1], points=50, seed=SEED, seconds=SECONDS)
    assert done.failures == [] and done.points > 100


@pytest.mark.further
def test_a_killed_trainer_ends_where_an_undisturbed_one_ends(
    commands: CommandServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "STEPS", 12)
    limits: Any = {"points": 1, "seed": SEED, "seconds": SECONDS}
    done = signals.run(commands, signals.KILL, **limits)
    assert done.failures == [] and done.outcomes["finished as if undisturbed"]


@pytest.mark.parametrize("file_system", power.FILE_SYSTEMS)
def test_a_directory_is_not_durable_if_its_file_system_shuts_down_before_the_fsync(
    file_system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync of XFS then reports success, although the directory's last change is discarded."""
    if reason := power.unsupported(file_system):
        pytest.skip(reason)
    fsync = os.fsync

    def fsync_after_cut(descriptor: int) -> None:
        disk.cut()
        fsync(descriptor)

    with power.Disk(file_system) as disk:
        os.mkdir(disk.mount_point / "new")
        monkeypatch.setattr(os, "fsync", fsync_after_cut)
        with pytest.raises(OSError, match="Input/output error"):
            fsync_directory(disk.mount_point)


def test_a_sweep_sees_a_checkpoint_that_got_its_name_before_it_was_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The campaign can fail: a publish that renames first and writes the manifest later is found out."""
    needs_calls()
    jobs.warm_up()

    def reserve_final(root: Path, name: str) -> Path:
        (root / name).mkdir(parents=True)
        (root / name / ".parts").mkdir()
        return root / name

    point = calls.Point(OURS[0], scenario("save"), "both", 45)
    # Both ranks: one that survives for some milliseconds may notice the other's death and remove what it wrote.
    with calls.Sweep(seed=0) as sweep:
        sweep.lay_out(OURS[0], scenario("save"))
        monkeypatch.setattr(commit, "reserve", reserve_final)
        monkeypatch.setattr(commit, "publish", lambda staging, name: staging)
        _, wrong, _ = calls.judge_kill(sweep, point)
    assert any("has its name but no manifest" in text for text in wrong)
