"""on_incompatible: another model's checkpoints stay, and the run goes on beside them."""

from pathlib import Path

import pytest

from automodel_ckpt.errors import CheckpointUnusable
from tests.distributed.kinds.test_training import failure, run, saved
from tests.support.runs.training import steps_of

WIDER = "--model.from_config.intermediate_size=52"
SIBLING = "--checkpoint.on_incompatible=sibling"
STEPS = ("--lr_scheduler.decay_steps=4", "--step_scheduler.max_steps=2")


@pytest.mark.further
def test_another_models_run_starts_beside_and_goes_on_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, *STEPS)
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    assert isinstance(failure(tmp_path, WIDER, *STEPS), CheckpointUnusable)
    capfd.readouterr()
    run(tmp_path, SIBLING, WIDER, *STEPS, num_ranks=2)
    said = capfd.readouterr().err
    assert f"THE CHECKPOINTS IN {tmp_path}/run BELONG TO A DIFFERENT MODEL" in said
    assert "~ model.layers.0.mlp.up_proj.weight: saved as F32 [48, 32], here F32 [52, 32]" in said
    assert sorted(path for path in (tmp_path / "run").rglob("*")) == before
    sibling = tmp_path / "run.sibling-1"
    assert saved(sibling) == ["epoch_0_step_2"]
    whole = run(tmp_path, WIDER, *STEPS, "--step_scheduler.max_steps=4", name="whole", num_ranks=2)
    assert (
        run(tmp_path, SIBLING, WIDER, *STEPS, "--step_scheduler.max_steps=4", num_ranks=2) == whole
    )
    assert "Loading checkpoint from" in capfd.readouterr().err
    assert [record["step"] for record in steps_of(sibling)] == [1, 2, 3, 4]
