"""The memory of a GPU: how close its forecast is, and what a run reports when it is used up."""

import json
import os
from pathlib import Path

from automodel_ckpt.errors import DeviceMemoryError
from tests.support.gpu import only_gpu
from tests.support.runs import plain
from tests.support.servers.command_server import CommandServer
from tools.gpu import ours


@only_gpu
def test_a_run_that_is_out_of_memory_says_in_which_step_and_what_to_change(
    tmp_path: Path, commands: CommandServer
) -> None:
    base = tmp_path / "base"
    plain.write_small("llama", {}, base)
    changes = {
        "dataset": {"num_samples": 2000, "seq_length": 128, "mean_length": 128},
        "dataloader": {"padding_free": False},
        "step_scheduler": {"global_batch_size": 2000, "local_batch_size": 1000},
    }
    recipe = ours.merged(plain.recipe(base, tmp_path / "run"), changes)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    # A share of the GPU's memory: 0.3 GB of 139 GiB. The micro-batch needs several gigabytes.
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.002"}
    done = commands.run("ckpt-train", str(path), env=environment, timeout=170)
    assert done.returncode == DeviceMemoryError.exit_code, done.stderr
    assert "the device ran out of memory in the forward pass" in done.stderr
    assert "of step 1" in done.stderr and "largest micro-batch 128,000 tokens" in done.stderr
    assert "--step_scheduler.local_batch_size=N" in done.stderr
    # Without a traceback: the message is all that a user needs.
    assert "Traceback" not in done.stderr
