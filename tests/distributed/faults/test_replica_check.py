"""Replicas of a model are compared bit by bit, and the ranks that differ are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from automodel_ckpt.checkpoint.run.resume import checkpoint_names
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.errors import AutomodelError
from automodel_ckpt.parallel.mesh import build_mesh, init_distributed
from automodel_ckpt.training.counters.cadence import Due
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.values.records import Control
from automodel_ckpt.training.watch.replica_check import ReplicaCheck, checksum, outliers
from tests.support import ranks
from tests.support.runs import training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_every_single_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    before = int(checksum(tensor))
    raw = tensor.view(torch.uint8).flatten()
    for byte in range(raw.numel()):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            assert int(checksum(tensor)) != before
            raw[byte] ^= 1 << bit
    assert int(checksum(tensor)) == before


def test_the_majority_is_right_and_without_one_all_are_named() -> None:
    assert outliers({0: 5, 1: 5}) == set()
    assert outliers({0: 5, 2: 6, 4: 5}) == {2}
    assert outliers({0: 5, 1: 6}) == {0, 1}
    assert outliers({0: 5, 1: 5, 2: 6, 3: 6, 4: 7}) == {0, 1, 2, 3, 4}


def test_the_rank_with_a_flipped_bit_is_named_on_all_ranks() -> None:
    found = ranks.run(flipped, 4, init=False)
    assert len(set(found)) == 1
    ddp, hsdp = found[0]
    assert "differ after step 2: rank 3 has other values" in ddp and "weight" in ddp
    # Ranks 1 and 3 have the same shard.
    assert "rank 1, 3 has other values" in hsdp


def flipped() -> tuple[str, str]:
    """Checks DDP's and HSDP's replicas before and after a bit of a parameter of rank 3 is flipped."""
    rank = int(os.environ["RANK"])
    layout = init_distributed(backend="gloo", timeout_minutes=1, dp_replicate_size=2)
    messages = []
    for is_replicated in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        if not is_replicated:
            fully_shard(model, mesh=build_mesh(layout))
        check = ReplicaCheck(model, layout, is_replicated=is_replicated)
        check.check(1)
        with torch.no_grad():
            local = model.weight.data if is_replicated else model.weight.to_local()
            if rank == 3:
                local.view(torch.int32).flatten()[0] ^= 1
        with pytest.raises(AutomodelError) as caught:
            check.check(2)
        messages.append(str(caught.value))
    return messages[0], messages[1]


def test_a_run_ends_before_it_saves_replicas_that_differ(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    recipe = training.write_recipe(tmp_path)
    options = (
        f"--checkpoint.memory.directory={memory}",
        "--checkpoint.verify_replicas=true",
        "--step_scheduler.ckpt_every_steps=3",
    )
    message, other = ranks.run(corrupted, 2, recipe, tmp_path / "run", *options, init=False)
    assert message == other and "replicas of the model differ after step 3: rank 0, 1" in message
    (directory,) = memory.iterdir()
    assert [name.step for name in checkpoint_names(directory)] == [2]
    assert checkpoint_names(tmp_path / "run") == []


def corrupted(recipe: Path, directory: Path, *options: str) -> str:
    """Trains on two replicas, of which one gets a flipped bit in the third step; how the run ends."""
    with pytest.raises(AutomodelError) as caught:
        training.train(
            recipe,
            "--distributed.strategy=ddp",
            f"--checkpoint.checkpoint_dir={directory}",
            *options,
            recipe_class=Corrupted,
        )
    return str(caught.value)


class CorruptedLoop(TrainingLoop):
    def step(self, batch: GlobalBatch, control: Control) -> Due:
        due = super().step(batch, control)
        if self.step_scheduler.step == 3 and self.layout.rank == 1:
            with torch.no_grad():
                next(iter(self.model.parameters())).view(torch.int32).flatten()[0] ^= 1
        return due


class Corrupted(training.Recipe):
    loop_class = CorruptedLoop
