"""8-bit moments of sharded parameters: the same update on any number of ranks, saved and resumed exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.optim.adam8bit import AdamW8bit
from tests.distributed.kinds.test_training import lines_of_steps, run
from tests.distributed.parallel.test_optim import FOUR, PLAIN
from tests.support import ranks

EIGHT_BITS = (
    "--optimizer={_target_: automodel_ckpt.optim.adam8bit.AdamW8bit, lr: 1e-2, block_size: 32, "
    "min_elements: 1024, float32_weights: true}"
)


def after_steps(dimension: int | None) -> list[torch.Tensor]:
    """A matrix and its state after three steps; *dimension* is sharded among all ranks, None: none is."""
    generator = torch.Generator().manual_seed(3)
    shape = (65, 256)  # shards of rows differ in size
    matrix = torch.randn(shape, generator=generator).bfloat16()
    mesh = None if dimension is None else init_device_mesh("cpu", (dist.get_world_size(),))
    if mesh is not None:
        matrix = distribute_tensor(matrix, mesh, [Shard(dimension)])
    parameter = torch.nn.Parameter(matrix)
    optimizer = AdamW8bit([parameter], lr=0.1, block_size=64, float32_weights=True)
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator).bfloat16()
        if mesh is not None:
            gradient = distribute_tensor(gradient, mesh, [Shard(dimension)])
        parameter.grad = gradient
        optimizer.step()
    found = [parameter.detach(), *optimizer.state[parameter].values()]
    state = optimizer.state[parameter]
    assert state["exp_avg_scales"].shape == (65, 4) and state["further_bits"].shape == shape
    # Neither gloo nor NCCL gathers int16.
    found = [each.int() if each.dtype == torch.int16 else each for each in found]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


def test_codes_and_scales_do_not_depend_on_how_a_matrix_is_sharded() -> None:
    expected = after_steps(None)

    def on_two_ranks() -> None:
        for dimension in (0, 1):
            for ours, whole in zip(after_steps(dimension), expected, strict=True):
                assert torch.equal(ours, whole)
        mesh = init_device_mesh("cpu", (2,))
        # The second rank has none of its elements.
        row = torch.nn.Parameter(distribute_tensor(torch.ones(1, 4096), mesh, [Shard(0)]))
        row.grad = torch.ones_like(row)
        AdamW8bit([row], lr=0.25).step()
        assert (row.detach().full_tensor() < 0.8).all()
        odd = distribute_tensor(torch.randn(64, 64), mesh, [Shard(1)])
        parameter = torch.nn.Parameter(odd)
        parameter.grad = odd.clone()
        with pytest.raises(RecipeError, match="begin within a block"):
            AdamW8bit([parameter]).step()

    ranks.run(on_two_ranks, 2)


def test_a_run_continues_exactly_and_on_other_ranks(tmp_path: Path) -> None:
    options = (*FOUR, EIGHT_BITS, "--model.dtype=bfloat16")
    sharded = "--distributed.strategy=fsdp2"
    whole = run(tmp_path, *options, sharded, name="whole", text=PLAIN, num_ranks=2)
    back = f"--checkpoint.restore_from={tmp_path / 'whole' / 'epoch_0_step_2'}"
    again = run(tmp_path, *options, sharded, back, name="resumed", text=PLAIN, num_ranks=2)
    assert again == whole
    run(tmp_path, *options, back, name="on one", text=PLAIN)
    expected = lines_of_steps(tmp_path / "whole/training.jsonl")[2:]
    found = lines_of_steps(tmp_path / "on one/training.jsonl")
    assert [line["loss"] for line in found] == pytest.approx(
        [line["loss"] for line in expected], rel=1e-4
    )
