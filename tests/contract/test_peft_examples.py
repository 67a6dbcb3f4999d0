"""The recipe with adapters that comes with the package runs on two processes, offline, and makes its base."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "llm_finetune"


def ckpt_train(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "automodel_ckpt.cli.train", *arguments]
    return subprocess.run(command, cwd=directory, env=dict(os.environ), capture_output=True, text=True, check=False)


@pytest.mark.timeout(180)
def test_the_tiny_recipe_makes_its_base_and_trains_adapters_on_two_processes(tmp_path: Path) -> None:
    short = ("--step_scheduler.max_steps=3", "--lr_scheduler=null", "--validation_dataset.max_samples=4")
    done = ckpt_train(tmp_path, "--nproc-per-node=2", str(EXAMPLES / "tiny_llama_lora.yaml"), *short)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "bases" / "tiny_llama" / "model.safetensors").is_file()
    assert (tmp_path / "checkpoints" / "LATEST" / "model" / "adapter_model.safetensors").is_file()
