"""Signals to a real training on two ranks: a sample of the campaign `signals`, and ranks that are lost."""

import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.marked_trainer import Trainer
from tests.support.servers.command_server import CommandServer
from tools.crash import signals

STEPS = 8
PATIENCE = 120
"""Seconds that a run on a busy machine may take for anything. Without a timeout it would take twenty minutes."""


def wait_for(
    trainer: Trainer, rank: int, name: str, times: int = 1, seconds: float = PATIENCE
) -> None:
    end = time.monotonic() + seconds
    while sum(mark.name == name for mark in trainer.marks(rank)) < times:
        assert not trainer.wait(0.005), trainer.log
        assert time.monotonic() < end, f"no {name} in time\n{trainer.log}"


@pytest.mark.slow
def test_signals_at_random_instants_stop_all_ranks_in_order(commands: CommandServer) -> None:
    # `python -m tools.crash signals` has hundreds of points.
    done = signals.run(commands, points=2, seed=1, seconds=150, compares=False)
    assert done.failures == []
    assert done.points == 2


def test_a_stop_exports_nothing_and_says_how_to(tmp_path: Path, commands: CommandServer) -> None:
    chain = signals.Chain(tmp_path, "run", commands)
    with chain.start(is_async="true", save_consolidated="every") as trainer:
        wait_for(trainer, 0, "accumulation")
        trainer.send("launcher", signal.SIGUSR1)
        assert trainer.wait(PATIENCE) and trainer.code == 75, trainer.log
    (notice,) = (line for line in trainer.log.splitlines() if "stopping after step" in line)
    again = "send it again to stop now without saving"
    assert notice.endswith(
        f" SIGUSR1: stopping after step 1 at the latest: saving, then exit 75; {again}"
    )
    (checkpoint,) = chain.root.glob("epoch_*")
    assert not (checkpoint / "model" / "consolidated").exists()
    assert f"to export it: ckpt consolidate {checkpoint}" in trainer.log
    assert trainer.log.count("to export it: ") == 1
    # The text log has what the start said, the save and why the run ended.
    text = (chain.root / "log.txt").read_text()
    assert "saved epoch_" in text
    assert text.endswith("the same command continues from there\n")


def undisturbed(base: Path, commands: CommandServer, **keys: Any) -> signals.Chain:
    """A run of STEPS steps that nothing disturbs."""
    chain = signals.Chain(base, "whole", commands)
    with chain.start(steps=STEPS, keys=keys) as trainer:
        assert trainer.wait(PATIENCE) and trainer.code == 0, trainer.log
    return chain


def test_a_rank_that_is_killed_is_started_again_and_the_run_ends_as_if_it_had_not_been(
    tmp_path: Path, commands: CommandServer
) -> None:
    expected = undisturbed(tmp_path, commands)
    killed = signals.Chain(tmp_path, "killed", commands)
    with killed.start(steps=STEPS, max_restarts=1) as trainer:
        wait_for(trainer, 1, "step", 6)
        trainer.send("rank1", signal.SIGKILL)
        assert trainer.wait(PATIENCE) and trainer.code == 0, trainer.log
        batches = [mark for mark in trainer.marks(0) if mark.name == "data"]
    # The rank that is not killed may read another batch before it is ended.
    again = next(after for before, after in pairwise(batches) if after.step < before.step)
    assert "restart 1 of 1" in trainer.log
    assert again.step == 4, "the newest checkpoint's"
    assert killed.differences(expected) == []


def test_a_killed_rank_continues_from_memory_and_a_failed_run_from_its_copy_on_disk(
    tmp_path: Path, commands: CommandServer
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    killed = signals.Chain(tmp_path, "killed", commands)
    # No save on disk is due before the end.
    keys: dict[str, Any] = {"step_scheduler.ckpt_every_steps": "null"}
    expected = undisturbed(tmp_path, commands, **keys)
    keys |= {"checkpoint.memory.every_steps": 1, "checkpoint.memory.directory": memory}
    with killed.start(steps=STEPS, max_restarts=1, keys=keys) as trainer:
        wait_for(trainer, 1, "step", 4)
        trainer.send("rank1", signal.SIGKILL)
        wait_for(trainer, 0, "data", 8)
        assert "was loaded from memory, where every rank's state was" in trainer.log, trainer.log
        wait_for(trainer, 1, "step", 6)
        trainer.send("rank1", signal.SIGKILL)
        assert trainer.wait(PATIENCE) and trainer.code == 1, trainer.log
    assert "the newest checkpoint in memory was copied to" in trainer.log, trainer.log
    assert os.listdir(memory) == [] and killed.newest() >= 4
    with killed.start(steps=STEPS, keys=keys) as trainer:
        assert trainer.wait(PATIENCE) and trainer.code == 0, trainer.log
    assert killed.differences(expected) == []
    assert os.listdir(memory) == []


def test_a_save_that_waits_for_a_stopped_rank_fails_in_time_and_names_it(
    tmp_path: Path, commands: CommandServer
) -> None:
    chain = signals.Chain(tmp_path, "run", commands)
    with chain.start(keys={"distributed.timeout_minutes": 0.1}) as trainer:
        wait_for(trainer, 1, "save")
        trainer.send("rank1", signal.SIGSTOP)
        assert trainer.wait(PATIENCE) and trainer.code == 1, trainer.log
        assert trainer.orphans(PATIENCE) == []
    assert (
        "error: rank 1 did not respond in time\n  where:  distributed.timeout_minutes"
        in trainer.log
    )
    assert "Traceback" not in trainer.log and chain.newest() == 0


@pytest.mark.further
def test_a_rank_that_hangs_in_its_data_set_is_named_when_the_others_have_waited_in_vain(
    tmp_path: Path, commands: CommandServer
) -> None:
    chain = signals.Chain(tmp_path, "run", commands)
    with chain.start(hang="data 1 1", keys={"distributed.timeout_minutes": 0.1}) as trainer:
        wait_for(trainer, 1, "hang")
        assert trainer.wait(PATIENCE) and trainer.code == 1, trainer.log
        assert trainer.orphans(PATIENCE) == []
    assert (
        "error: rank 1 did not respond in time\n  where:  distributed.timeout_minutes"
        in trainer.log
    )
    assert "Traceback" not in trainer.log


def test_a_rank_in_the_models_collectives_ends_soon_after_its_peer_was_killed(
    tmp_path: Path, commands: CommandServer
) -> None:
    chain = signals.Chain(tmp_path, "run", commands)
    with chain.start(hang="step 3 1") as trainer:
        wait_for(trainer, 1, "hang")
        time.sleep(0.3)  # rank 0 waits for it in the forward pass
        trainer.send("rank1", signal.SIGKILL)
        assert trainer.wait(PATIENCE) and trainer.code == 1, trainer.log
        assert trainer.orphans(PATIENCE) == []
    assert trainer.log.endswith("error: rank 1 was killed by SIGKILL (out of memory?)\n")
