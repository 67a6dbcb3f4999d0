"""Each kind of training on a GPU: the losses of the CPU in float32, from the examples that need no downloaded model."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.gpu import DEVICE, needs_gpu
from tests.support.runs import plain
from tests.support.servers.command_server import CommandServer
from tools.support import ROOT

EXAMPLES = ROOT / "examples"
CASES: dict[str, Path] = {
    "pretrain": EXAMPLES / "pretrain" / "tiny_mixture.yaml",
    "classification": EXAMPLES / "classification" / "tiny_topics.yaml",
    "embedding": EXAMPLES / "embedding" / "tiny_pairs.yaml",
    "dpo": EXAMPLES / "preference" / "tiny_dpo.yaml",
    "orpo": EXAMPLES / "preference" / "tiny_orpo.yaml",
    "kto": EXAMPLES / "preference" / "tiny_kto.yaml",
    "reward": EXAMPLES / "preference" / "tiny_reward.yaml",
    "distill": EXAMPLES / "distill" / "tiny_distill.yaml",
    "seq2seq": EXAMPLES / "seq2seq" / "tiny_summaries.yaml",
}
DROPOUTS = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "bart": ("dropout", "attention_dropout", "activation_dropout"),
}
"""The keys of models whose default is to train with dropout."""
IMAGES: dict[str, list[str]] = {
    "padded": [],
    "packed": ["--packed_sequence.size", "128", "--step_scheduler.local_batch_size", "4"],
    "frozen vision tower": ["--model.freeze", "[vision_tower]"],
    "activation checkpointing": ["--model.activation_checkpointing", "true"],
}
"""Changes of the recipe for images."""
AUDIO = """\
recipe: vlm_finetune
model:
  from_config:
    model_type: qwen2_audio
    audio_config:
      {model_type: qwen2_audio_encoder, num_mel_bins: 16, d_model: 64, encoder_layers: 2, encoder_attention_heads: 4,
       encoder_ffn_dim: 128, max_source_positions: 50}
    text_config:
      {model_type: qwen2, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
       num_key_value_heads: 2, max_position_embeddings: 128}
processor:
  _target_: automodel_ckpt.examples.data.tones.processor
dataset:
  _target_: automodel_ckpt.data.vlm.transcripts
  path: {tones}/train.jsonl
  prompt: Name the tones.
optimizer:
  lr: 3e-3
"""


@pytest.mark.timeout(300)
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_training_has_the_losses_of_the_cpu(
    tmp_path: Path, commands: CommandServer, name: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(for_comparison(CASES[name])))
    check(tmp_path, commands, recipe)


def for_comparison(recipe: Path) -> dict[str, Any]:
    """The sections of a recipe, without what needs a validation, and without dropout."""
    sections: dict[str, Any] = yaml.safe_load(recipe.read_text())
    for name in ("validation_dataset", "validation_datasets"):
        sections.pop(name, None)
    for section, keys in (
        ("step_scheduler", ("val_every_steps", "ckpt_on_best", "early_stop_patience")),
        ("checkpoint", ("best_metric_key", "best_mode")),
    ):
        for key in keys:
            sections.get(section, {}).pop(key, None)
    model = sections["model"]["from_config"]
    model |= dict.fromkeys(DROPOUTS.get(model["model_type"], ()), 0.0)
    return sections


@pytest.mark.timeout(300)
@needs_gpu
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_the_reference_is_the_model_that_training_starts_from(
    tmp_path: Path, commands: CommandServer, name: str
) -> None:
    """In the precision of a GPU, where the trained model has weights in float32 and the reference in bfloat16."""
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump(for_comparison(CASES[name])))
    done = commands.run(
        "ckpt-train", str(recipe), "--checkpoint.checkpoint_dir", str(run),
        "--step_scheduler.max_steps", "1", "--step_scheduler.global_batch_size", "4",
        "--step_scheduler.local_batch_size", "4", timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert plain.logged_losses(run) == [pytest.approx({"dpo": math.log(2), "kto": 0.5}[name])]


@pytest.mark.timeout(300)
@needs_gpu
def test_audio_has_the_losses_of_the_cpu(tmp_path: Path, commands: CommandServer) -> None:
    tones, recipe = tmp_path / "tones", tmp_path / "audio.yaml"
    subprocess.run(
        [sys.executable, "-m", "automodel_ckpt.examples.data.tones", str(tones)],
        cwd=ROOT,
        check=True,
    )
    recipe.write_text(AUDIO.replace("{tones}", str(tones)))
    check(tmp_path, commands, recipe)


def check(directory: Path, commands: CommandServer, recipe: Path, *overrides: str) -> None:
    found = {}
    for place, device in (("cpu", "cpu"), ("gpu", DEVICE)):
        found[place] = losses(commands, directory / place, device, recipe, overrides)
    assert len(found["cpu"]) == 3
    assert plain.difference(found["gpu"], found["cpu"]) < 2e-5


@pytest.mark.timeout(300)
@needs_gpu
@pytest.mark.parametrize("name", IMAGES)
def test_images_train_on_the_gpu_as_on_the_cpu(
    tmp_path: Path, commands: CommandServer, name: str
) -> None:
    pytest.importorskip("sklearn")
    recipe = EXAMPLES / "vlm_finetune" / "tiny_digits.yaml"
    check(tmp_path, commands, recipe, *IMAGES[name])


def losses(
    commands: CommandServer,
    directory: Path,
    device: str,
    recipe: Path,
    overrides: Sequence[str],
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
    words = []
    for section, values in sections.items():
        if not isinstance(values, dict):
            words += [f"--{section}", str(values)]
            continue
        for key, value in values.items():
            words += [f"--{section}.{key}", str(value)]
    return words
