"""Runs that FSDP sharded elsewhere continue here with the losses that they would have had there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.continued import continued_losses

FIXTURES = Path(__file__).parents[1] / "fixtures" / "fsdp"
# What tests/fixtures/fsdp/make.py trained with.
RECIPE = (
    "--dataset.num_samples=40",
    "--step_scheduler.global_batch_size=4",
    "--lr_scheduler.name=linear",
    "--lr_scheduler.warmup_steps=0",
    "--clip_grad_norm=null",
)


@pytest.mark.parametrize(
    ("name", "num_ranks", "strategy"),
    [("fsdp2-full", 1, "ddp"), ("fsdp2-sharded", 2, "fsdp2"), ("fsdp1-sharded", 1, "ddp")],
)
def test_a_run_of_accelerate_continues_with_the_same_losses(
    tmp_path: Path, name: str, num_ranks: int, strategy: str
) -> None:
    source = FIXTURES / name
    override = f"--distributed.strategy={strategy}"
    losses = continued_losses(source, tmp_path, *RECIPE, override, num_ranks=num_ranks)
    expected = json.loads((source / "losses.json").read_text())
    assert list(losses) == [6, 7, 8, 9, 10]
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step - 1], rel=1e-5), step
