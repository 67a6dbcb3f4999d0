"""CheckpointCallback resumes transformers' Trainer on two ranks, with DistributedDataParallel and FSDP2.

It was killed with SIGKILL during a save.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    directory: Path, settings: dict[str, Any]
) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    if settings:
        # accelerate shards on GPUs only; its code is the same on a CPU.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer, record = run(directory, **settings)
    found = {}
    parameters = trainer.model.state_dict()
    assert any(isinstance(each, DTensor) for each in parameters.values()) == bool(settings)
    for name, parameter in parameters.items():
        found[name] = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return record.losses, found


def killed_in_a_save(directory: Path, settings: dict[str, Any], killed: set[int]) -> None:
    """Train until the save of step 6 flushes a file on one of the *killed* ranks."""
    fsync = os.fsync

    def kill(descriptor: int) -> None:
        if "step_6" in os.readlink(f"/proc/self/fd/{descriptor}") and dist.get_rank() in killed:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", kill)
        trained(directory, settings)


@pytest.mark.parametrize(
    ("settings", "killed"), [({}, {1}), (SHARDED, {0, 1})], ids=["ddp", "fsdp2"]
)
def test_a_run_on_two_ranks_is_resumed_exactly(
    tmp_path: Path, settings: dict[str, Any], killed: set[int]
) -> None:
    whole, weights = ranks.run(trained, 2, tmp_path / "whole", settings)[0]
    ended = ranks.outcomes(killed_in_a_save, 2, tmp_path / "run", settings, killed)
    for rank, outcome in enumerate(ended):
        assert (outcome.exitcode == -signal.SIGKILL) == (rank in killed), outcome
    assert os.readlink(tmp_path / "run/LATEST") == "epoch_0_step_3"
    # A rank 0 that lives on removes what was written.
    assert bool(list((tmp_path / "run").glob(".epoch_1_step_6.staging*"))) == (0 in killed)
    after, resumed = ranks.run(trained, 2, tmp_path / "run", settings)[0]
    assert after == {step: loss for step, loss in whole.items() if step > 3}
    for name, expected in weights.items():
        assert torch.equal(expected, resumed[name]), name
    assert not list((tmp_path / "run").glob(".epoch*"))
