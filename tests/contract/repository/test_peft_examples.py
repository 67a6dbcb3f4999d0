"""The recipe with adapters that comes with the package runs on two processes, offline, and makes its base."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.servers.command_server import CommandServer

EXAMPLES = Path(__file__).parents[3] / "examples" / "llm_finetune"


@pytest.mark.timeout(180)
def test_the_tiny_recipe_makes_its_base_and_trains_adapters_on_two_processes(
    tmp_path: Path, commands: CommandServer
) -> None:
    short = (
        "--step_scheduler.max_steps=3",
        "--lr_scheduler=null",
        "--validation_dataset.max_samples=4",
    )
    recipe = str(EXAMPLES / "tiny_llama_lora.yaml")
    done = commands.run("ckpt-train", "--nproc-per-node=2", recipe, *short, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "bases" / "tiny_llama" / "model.safetensors").is_file()
    assert (tmp_path / "checkpoints" / "LATEST" / "model" / "adapter_model.safetensors").is_file()
    model = tmp_path / "checkpoints" / "epoch_0_step_3" / "model"
    assert f'try it: ckpt generate {model} -p "Once upon a time"' in done.stdout + done.stderr
