"""8-bit moments of sharded parameters: the same update on any number of ranks, saved and resumed exactly."""

from pathlib import Path

import pytest

from tests.distributed.kinds.test_training import lines_of_steps, run, run_each
from tests.distributed.parallel.test_optim import FOUR, PLAIN

EIGHT_BITS = (
    "--optimizer={_target_: automodel_ckpt.optim.adam8bit.AdamW8bit, lr: 1e-2, block_size: 32, "
    "min_elements: 1024, float32_weights: true}"
)


def test_a_run_continues_exactly_and_on_other_ranks(tmp_path: Path) -> None:
    options = (*FOUR, EIGHT_BITS, "--model.dtype=bfloat16")
    sharded = "--distributed.strategy=fsdp2"
    back = f"--checkpoint.restore_from={tmp_path / 'whole' / 'epoch_0_step_2'}"
    runs = {"whole": (*options, sharded), "resumed": (*options, sharded, back)}
    whole, again = run_each(tmp_path, runs, num_ranks=2, text=PLAIN)
    assert again == whole
    run(tmp_path, *options, back, name="on one", text=PLAIN)
    expected = lines_of_steps(tmp_path / "whole/training.jsonl")[2:]
    found = lines_of_steps(tmp_path / "on one/training.jsonl")
    assert [line["loss"] for line in found] == pytest.approx(
        [line["loss"] for line in expected], rel=1e-4
    )
