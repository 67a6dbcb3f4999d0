"""Checkpoints in memory: a killed rank costs at most the step in progress, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch.distributed as dist

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.files.layout import DataParallelRanks
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig, MemoryConfig
from automodel_ckpt.training.saves import memory_saves
from automodel_ckpt.training.saves.memory_saves import MemorySaves
from tests.distributed.faults.test_signals import STEPS, wait_for
from tests.support import ranks
from tools.crash import endurance, signals


def test_a_killed_rank_continues_from_memory_and_a_failed_run_from_its_copy_on_disk(
    tmp_path: Path,
) -> None:
    signals.import_what_ranks_need()
    memory = tmp_path / "memory"
    memory.mkdir()
    whole, killed = signals.Chain(tmp_path, "whole"), signals.Chain(tmp_path, "killed")
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
    assert endurance.differences(killed.root, endurance.result_of(whole.root, STEPS), STEPS) == []
    assert os.listdir(memory) == []


def test_with_auto_all_ranks_save_at_the_same_steps(tmp_path: Path) -> None:
    (tmp_path / "tmpfs").mkdir()
    steps, other = ranks.run(saved_steps, 2, tmp_path)
    # On rank 0, a save takes 2.5 % of the time of a step, and may take 1 % of the time.
    assert steps == other == [*range(1, 41, 3)]


def saved_steps(base: Path) -> list[int]:
    """The steps that are saved to memory with ``auto``. A save takes longer on rank 1."""
    clock = SimpleNamespace(now=0.0)
    vars(memory_saves)["time"] = SimpleNamespace(monotonic=lambda: clock.now)
    layout = DataParallelRanks(dist.get_rank(), 2)
    disk = Checkpointer(base / "run", layout, dist.group.WORLD)
    disk.open()
    section = MemoryConfig(every_steps="auto", directory=str(base / "tmpfs"))
    memory = MemorySaves(section, CheckpointConfig(), disk, layout, dist.group.WORLD, 60.0)
    memory.start(None, 0)
    saved = []

    def save(checkpointer: Checkpointer) -> None:
        clock.now += 0.00025 + 0.002 * dist.get_rank()

    for step in range(1, 41):
        clock.now += 0.01
        if memory.is_due(cast(Any, SimpleNamespace(step=step))):
            memory.save(step, save)
            saved.append(step)
    memory.close()
    disk.close()
    return saved
