"""CheckpointCallback resumes transformers' Trainer on two ranks, with DistributedDataParallel and FSDP2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.tensor import DTensor

from tests.support import ranks
from tests.unit.integrations.test_trainer_callback import run

SHARDED = {
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2},
    # Otherwise, the arguments of the Trainer replace the state that trained() prepares.
    "accelerator_config": {"use_configured_state": True},
}


def trained(
    directory: Path, last: int | None, settings: dict[str, Any]
) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Train on this rank; the losses, and the weights."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    if settings:
        # accelerate shards on GPUs only; its code is the same on a CPU.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer, record = run(directory, last=last, **settings)
    found = {}
    parameters = trainer.model.state_dict()
    assert any(isinstance(each, DTensor) for each in parameters.values()) == bool(settings)
    for name, parameter in parameters.items():
        found[name] = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return record.losses, found


@pytest.mark.parametrize("settings", [{}, SHARDED], ids=["ddp", "fsdp2"])
def test_a_run_on_two_ranks_is_resumed_exactly(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole, weights = ranks.run(trained, 2, tmp_path / "whole", None, settings)[0]
    before, _ = ranks.run(trained, 2, tmp_path / "run", 8, settings)[0]
    after, resumed = ranks.run(trained, 2, tmp_path / "run", None, settings)[0]
    assert before | after == whole
    assert min(after) == 7
    for name, expected in weights.items():
        assert torch.equal(expected, resumed[name]), name
