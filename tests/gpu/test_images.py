"""Vision-language models on a GPU: the losses of the CPU, with samples that are padded, and packed."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu import DEVICE, needs_gpu
from tests.support.runs import plain
from tests.support.servers.command_server import CommandServer
from tools.support import ROOT

RECIPE = ROOT / "examples" / "vlm_finetune" / "tiny_digits.yaml"
CASES: dict[str, list[str]] = {
    "padded": [],
    "packed": ["--packed_sequence.size", "128", "--step_scheduler.local_batch_size", "4"],
    "frozen vision tower": ["--model.freeze", "[vision_tower]"],
    "activation checkpointing": ["--model.activation_checkpointing", "true"],
}


def losses(
    commands: CommandServer,
    directory: Path,
    device: str,
    overrides: list[str],
    recipe: Path = RECIPE,
) -> list[float]:
    """The losses of three steps in float32 on *device*, without validations."""
    environment: dict[str, Any] = dict(os.environ)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = commands.run(
        "ckpt-train", str(recipe), *_flat(plain.exact()),
        "--checkpoint.checkpoint_dir", str(directory), "--step_scheduler.max_steps", "3",
        "--step_scheduler.global_batch_size", "8", "--step_scheduler.local_batch_size", "8",
        "--validation_dataset", "null", *overrides, env=environment, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return plain.logged_losses(directory)


def _flat(sections: dict[str, Any]) -> list[str]:
    """Sections as overrides on the command line."""
    words = []
    for section, values in sections.items():
        if not isinstance(values, dict):
            words += [f"--{section}", str(values)]
            continue
        for key, value in values.items():
            words += [f"--{section}.{key}", str(value)]
    return words


@pytest.mark.timeout(300)
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_images_train_on_the_gpu_as_on_the_cpu(
    tmp_path: Path, commands: CommandServer, name: str
) -> None:
    pytest.importorskip("sklearn")
    found = {}
    for place, device in (("cpu", "cpu"), ("gpu", DEVICE)):
        found[place] = losses(commands, tmp_path / place, device, CASES[name])
    assert len(found["cpu"]) == 3
    assert plain.difference(found["gpu"], found["cpu"]) < 2e-5
