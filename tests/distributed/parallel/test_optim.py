"""Optimizers of sharded parameters: the default one, and several in one run."""

from pathlib import Path

import pytest

from tests.distributed.kinds.test_training import lines_of_steps, run
from tests.support.runs.training import RECIPE

MUON = "--optimizer.groups=[{params: [hidden_matrices], _target_: torch.optim.Muon, lr: 2e-2}]"
PLAIN = RECIPE.replace("attention_dropout: 0.2", "attention_dropout: 0.0")
FOUR = (
    "--step_scheduler.max_steps=4",
    "--lr_scheduler.decay_steps=4",
    "--step_scheduler.ckpt_every_steps=2",
)


@pytest.mark.further
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
