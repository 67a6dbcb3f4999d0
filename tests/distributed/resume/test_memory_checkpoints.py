"""Checkpoints in memory: a killed rank costs at most the step in progress, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.distributed.faults.test_signals import STEPS, wait_for
from tests.support.servers.command_server import CommandServer
from tools.crash import signals


def test_a_killed_rank_continues_from_memory_and_a_failed_run_from_its_copy_on_disk(
    tmp_path: Path, commands: CommandServer
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    whole, killed = (
        signals.Chain(tmp_path, "whole", commands),
        signals.Chain(tmp_path, "killed", commands),
    )
    # No save on disk is due before the end.
    keys: dict[str, Any] = {"step_scheduler.ckpt_every_steps": "null"}
    with whole.start(steps=STEPS, keys=keys) as trainer:
        assert trainer.wait(150) and trainer.code == 0, trainer.log
    keys |= {"checkpoint.memory.every_steps": 1, "checkpoint.memory.directory": memory}
    with killed.start(steps=STEPS, max_restarts=1, keys=keys) as trainer:
        wait_for(trainer, 1, "step", 4)
        trainer.send("rank1", signal.SIGKILL)
        wait_for(trainer, 0, "data", 8)
        assert "was loaded from memory, where every rank's state was" in trainer.log, trainer.log
        wait_for(trainer, 1, "step", 6)
        trainer.send("rank1", signal.SIGKILL)
        assert trainer.wait(150) and trainer.code == 1, trainer.log
    assert "the newest checkpoint in memory was copied to" in trainer.log, trainer.log
    assert os.listdir(memory) == [] and killed.newest() >= 4
    with killed.start(steps=STEPS, keys=keys) as trainer:
        assert trainer.wait(150) and trainer.code == 0, trainer.log
    assert killed.differences(whole) == []
    assert os.listdir(memory) == []
