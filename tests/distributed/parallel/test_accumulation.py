"""Gradient accumulation reduces gradients over the ranks after each micro-batch, or once per step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.kinds.test_training import lines_of_steps, run_each
from tests.support.runs.counted_reductions import CountsReductions
from tests.support.runs.training import Recipe, with_loop

Counted = with_loop(Recipe, CountsReductions)


@pytest.mark.further
def test_gradients_are_reduced_as_often_as_the_recipe_asks(tmp_path: Path) -> None:
    fsdp2, ddp = "--distributed.strategy=fsdp2", "--distributed.strategy=ddp"
    reduces = {
        "fsdp2 by default": (fsdp2,),
        "fsdp2 deferring": (fsdp2, "--distributed.defer_gradient_sync=true"),
        "ddp": (ddp,),
    }
    steps = (
        "--step_scheduler.max_steps=2",
        "--checkpoint.save_consolidated=false",
        "--model.from_config.attention_dropout=0",
    )
    names = {(how, local): f"{how}_{local}" for how in reduces for local in (4, 1)}
    runs = {}
    for (how, local), name in names.items():
        runs[name] = (*reduces[how], *steps, f"--step_scheduler.local_batch_size={local}")
    run_each(tmp_path, runs, num_ranks=2, recipe_class=Counted)
    counts, losses = {}, {}
    for case, name in names.items():
        found = [json.loads(path.read_text()) for path in (tmp_path / name).glob("counts_*")]
        assert len(found) == 2
        assert found[0] == found[1] >= 1
        counts[case] = found[0]
        losses[case] = [line["loss"] for line in lines_of_steps(tmp_path / name / "training.jsonl")]

    # Each rank has four samples in a step: one micro-batch, or four.
    assert counts["fsdp2 by default", 1] == 4 * counts["fsdp2 by default", 4]
    assert counts["fsdp2 deferring", 1] == counts["fsdp2 deferring", 4]
    assert counts["ddp", 1] == counts["ddp", 4]
    for found_losses in losses.values():
        assert found_losses == pytest.approx(losses["ddp", 4], rel=1e-6)
