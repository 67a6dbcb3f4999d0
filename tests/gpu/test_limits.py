"""The memory of a GPU: how close its forecast is, and what a run reports when it is used up."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.errors import DeviceMemoryError
from tests.support.gpu import DEVICE, HAS_GPU, needs_gpu, only_gpu
from tests.support.models.sizes import model_sizes
from tests.support.runs import plain
from tests.support.servers.command_server import CommandServer
from tools.gpu import ours
from tools.gpu.shapes import LLAMA_1B, Work, write_base
from tools.support import log_lines


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


MIDDLE = {**LLAMA_1B, **model_sizes(hidden=1024, inner=4096, layers=8, heads=16)}
"""About 260 million parameters, half of them in the embedding."""
FORECASTS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"peft": {"r": 16}},
    "full checkpointing": {"model": {"activation_checkpointing": "full"}},
    "selective checkpointing": {"model": {"activation_checkpointing": "selective"}},
    "packed": {"packed_sequence": {"size": 4096}, "step_scheduler": {"local_batch_size": 1}},
    "bfloat16 weights": {"model": {"dtype": "bfloat16"}},
}


@needs_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FORECASTS)
def test_the_forecast_of_the_memory_is_within_a_tenth_of_the_peak(
    tmp_path: Path, commands: CommandServer, name: str
) -> None:
    # On a CPU, this only shows that the test runs.
    config = (
        MIDDLE if HAS_GPU else {"model_type": "llama", **plain.SMALL, "tie_word_embeddings": True}
    )
    length = 1024 if HAS_GPU else 64
    base = tmp_path / "base"
    list(write_base(config, base, DEVICE))
    work = Work(config, batch=8, length=length, accumulation=1, warm_up=0, steps=4)
    directory = tmp_path / "run"
    recipe = ours.merged(
        ours.recipe_of(work, base, directory),
        {"recipe": "llm_finetune", "checkpoint": {"enabled": True, "save_consolidated": False}},
    )
    path = directory / "recipe.yaml"
    directory.mkdir()
    path.write_text(json.dumps(ours.merged(recipe, FORECASTS[name])))
    done = commands.run("ckpt-train", str(path), timeout=170)
    assert done.returncode == 0, done.stderr
    peak = max(line["mem"] for line in log_lines(directory / "training.jsonl") if "mem" in line)
    forecast = ours.forecast_bytes(directory)
    assert forecast > 0
    if HAS_GPU:
        # The forecast includes CUDA's context, about half a gigabyte, which is not in tensors.
        assert peak * 0.9 < forecast < peak * 1.1 + 700 * 2**20
