"""Optimizers of sharded parameters: the default one, and several in one run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from automodel_ckpt.optim.build import FusedAdamW
from automodel_ckpt.optim.muon import Muon
from automodel_ckpt.parallel.gradient_norm import clip_gradients
from automodel_ckpt.parallel.parallelize import Parallelism, parallelize
from tests.distributed.kinds.test_training import lines_of_steps, run
from tests.support import ranks
from tests.support.runs.parallel import VOCABULARY, layout_here, model_of
from tests.support.runs.training import RECIPE

LIMIT = 0.01


def values_after_steps(
    optimizer_class: Any, sizes: dict[str, int]
) -> tuple[list[float], list[torch.Tensor]]:
    """The gradient norms of three clipped steps, and this rank's parts of the parameters and averages after them."""
    model = parallelize(model_of(), layout_here(**sizes), Parallelism(strategy="fsdp2"))
    optimizer = optimizer_class(model.parameters(), lr=0.01, fused=True)
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    norms = []
    for _ in range(3):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        parameters = list(model.parameters())
        norms.append(
            clip_gradients(parameters, LIMIT, in_step=getattr(optimizer, "divide_in_step", None))
        )
        optimizer.step()
        optimizer.zero_grad()
    states = [optimizer.state[parameter]["exp_avg"] for parameter in parameters]
    assert any(isinstance(state, DTensor) for state in states)
    return norms, [
        value.to_local() if isinstance(value, DTensor) else value
        for value in [*parameters, *states]
    ]


def test_it_does_with_shards_what_torchs_does() -> None:
    def on_two_ranks() -> None:
        for sizes in ({}, {"tp_size": 2}):
            (our_norms, ours), (norms, theirs) = (
                values_after_steps(each, sizes) for each in (FusedAdamW, torch.optim.AdamW)
            )
            assert min(norms) > 2 * LIMIT
            torch.testing.assert_close(our_norms, norms, rtol=1e-4, atol=0)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)

    ranks.run(on_two_ranks, 2)


def matrices_after_steps(optimizer_class: Any, *, is_sharded: bool) -> list[torch.Tensor]:
    """Matrices of several shapes after three steps with the same gradients."""
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(shape, generator=generator) for shape in ((6, 4), (4, 9), (3, 3))]
    matrices = [matrix.clone() for matrix in whole]
    mesh = init_device_mesh("cpu", (2,)) if is_sharded else None
    if mesh is not None:
        # Three rows on two ranks are shards of different sizes.
        matrices = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in whole]
    parameters = [torch.nn.Parameter(matrix) for matrix in matrices]
    groups = [
        {"params": parameters[:1], "nesterov": False},
        {"params": parameters[1:], "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
    ]
    optimizer = optimizer_class(groups, lr=0.1)
    for _ in range(3):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            if mesh is not None:
                gradient = distribute_tensor(gradient, mesh, [Shard(0)])
            parameter.grad = gradient
        optimizer.step()
    return [
        each.full_tensor().detach() if isinstance(each, DTensor) else each.detach()
        for each in parameters
    ]


def test_muon_does_with_shards_what_torchs_does_with_complete_matrices() -> None:
    expected = matrices_after_steps(torch.optim.Muon, is_sharded=False)
    plain = matrices_after_steps(Muon, is_sharded=False)
    for found in (plain, *ranks.run(partial(matrices_after_steps, Muon, is_sharded=True), 2)):
        for matrix, of_torch in zip(found, expected, strict=True):
            torch.testing.assert_close(matrix, of_torch, rtol=1e-6, atol=1e-7)


MUON = "--optimizer.groups=[{params: [hidden_matrices], _target_: torch.optim.Muon, lr: 2e-2}]"
PLAIN = RECIPE.replace("attention_dropout: 0.2", "attention_dropout: 0.0")
FOUR = (
    "--step_scheduler.max_steps=4",
    "--lr_scheduler.decay_steps=4",
    "--step_scheduler.ckpt_every_steps=2",
)


def test_a_run_with_two_optimizers_continues_exactly_and_on_other_ranks(tmp_path: Path) -> None:
    sharded = "--distributed.strategy=fsdp2"
    whole = run(tmp_path, *FOUR, MUON, sharded, name="whole", text=PLAIN, num_ranks=2)
    back = f"--checkpoint.restore_from={tmp_path / 'whole' / 'epoch_0_step_2'}"
    assert (
        run(tmp_path, *FOUR, MUON, sharded, back, name="resumed", text=PLAIN, num_ranks=2) == whole
    )
    run(tmp_path, *FOUR, MUON, back, name="on one", text=PLAIN)
    expected = lines_of_steps(tmp_path / "whole/training.jsonl")[2:]
    found = lines_of_steps(tmp_path / "on one/training.jsonl")
    assert [line["loss"] for line in found] == pytest.approx(
        [line["loss"] for line in expected], rel=1e-5
    )
    assert [line["lr"] for line in found] == [line["lr"] for line in expected]


def test_a_run_that_had_one_group_keeps_its_weight_decay_on_every_parameter(tmp_path: Path) -> None:
    decay = "--optimizer.weight_decay=0.5"
    (whole,) = run(tmp_path, *FOUR, decay, "--optimizer.no_decay=none", name="whole")
    back = f"--checkpoint.restore_from={tmp_path / 'whole' / 'epoch_0_step_2'}"
    (resumed,) = run(tmp_path, *FOUR, decay, back, name="resumed")
    assert resumed["weights"] == whole["weights"]
