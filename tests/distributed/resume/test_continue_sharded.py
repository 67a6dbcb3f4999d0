"""Runs that FSDP or DeepSpeed sharded elsewhere continue here with the losses that they would have had there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs.continued import SHARDED, continued_losses

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize(
    ("name", "num_ranks", "strategy", "clip"),
    [
        ("fsdp/fsdp2-full", 1, "ddp", "null"),
        ("fsdp/fsdp2-sharded", 2, "fsdp2", "null"),
        ("fsdp/fsdp1-sharded", 1, "ddp", "null"),
        ("deepspeed/continued-stage3", 2, "fsdp2", "1.0"),
    ],
)
def test_a_sharded_run_continues_with_the_same_losses(
    tmp_path: Path, name: str, num_ranks: int, strategy: str, clip: str
) -> None:
    source = FIXTURES / name
    options = (*SHARDED, f"--distributed.strategy={strategy}", f"--clip_grad_norm={clip}")
    losses = continued_losses(source, tmp_path, *options, num_ranks=num_ranks)
    expected = json.loads((source / "losses.json").read_text())
    assert list(losses) == [6, 7, 8, 9, 10]
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step - 1], rel=1e-5), step
