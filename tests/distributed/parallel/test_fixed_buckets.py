"""Replicas on three real ranks, which sum gradients in buckets: in the same order after a resume."""

from pathlib import Path

from tests.distributed.kinds.test_training import run_each

OPTIONS = (
    "--distributed.strategy=ddp",
    "--step_scheduler={global_batch_size: 6, local_batch_size: 1, max_steps: 4, ckpt_every_steps: 2}",
)


def test_three_replicas_continue_exactly(tmp_path: Path) -> None:
    back = f"--checkpoint.restore_from={tmp_path / 'whole' / 'epoch_0_step_2'}"
    runs = {"whole": OPTIONS, "resumed": (*OPTIONS, back)}
    whole, resumed = run_each(tmp_path, runs, num_ranks=3)
    assert resumed == whole
