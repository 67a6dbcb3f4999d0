"""Distillation of vision-language models: losses of plain PyTorch, several ranks, and packs."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from tests.distributed.kinds.test_vlm import micro_batches
from tests.support.models.vision import FAMILIES, make_base, write_conversations
from tests.support.runs.training import train as run_recipe

NUM_SAMPLES, NUM_STEPS, BATCH, LR = 20, 4, 4, 1e-3
KD_RATIO, TEMPERATURE = 0.6, 2.0
RECIPE = """
recipe: vlm_distill
seed: 5
model: {{from_pretrained: {directory}/student, freeze: [vision_tower]}}
distill:
  teacher: {{from_pretrained: {directory}/teacher}}
  kd_ratio: {ratio}
  temperature: {temperature}
dataset: {{_target_: automodel_ckpt.data.vlm.conversations, path: {data}, seq_length: 100}}
dataloader: {{shuffle: false}}
optimizer: {{lr: {lr}, weight_decay: 0.0}}
clip_grad_norm: null
step_scheduler:
  global_batch_size: {batch}
  local_batch_size: 2
  max_steps: {steps}
  ckpt_every_steps: 2
  ckpt_every_epochs: null
"""
EXACT = ("--model.dtype=float64", "--distill.teacher.dtype=float64")


def make_teacher(directory: Path, family: str) -> Path:
    """A larger model of *family* with large random weights, so that its predictions are far from uniform."""
    config, processor = FAMILIES[family]()
    text = config.get_text_config()
    text.vocab_size, text.intermediate_size = len(processor.tokenizer), 96
    torch.manual_seed(8)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "vis" not in name:
                parameter.mul_(15)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def prepare(directory: Path, family: str = "llava") -> Path:
    """Write student, teacher, data and recipe into *directory*; returns the recipe's file."""
    make_base(directory / "student", family)
    make_teacher(directory / "teacher", family)
    text = RECIPE.format(
        directory=directory,
        data=write_conversations(directory, NUM_SAMPLES),
        ratio=KD_RATIO,
        temperature=TEMPERATURE,
        lr=LR,
        batch=BATCH,
        steps=NUM_STEPS,
    )
    path = directory / "recipe.yaml"
    path.write_text(text)
    return path


def run(path: Path, name: str, *overrides: str) -> dict[str, str]:
    return run_recipe(path, f"--checkpoint.checkpoint_dir={path.parent / name}", *overrides)


def logged(directory: Path) -> list[dict[str, float]]:
    names = ("loss", "ce_loss", "kd_loss")
    records = [json.loads(line) for line in (directory / "training.jsonl").read_text().splitlines()]
    return [{name: record[name] for name in names} for record in records if "event" not in record]


def plain_losses(path: Path, num_steps: int = NUM_STEPS) -> list[dict[str, float]]:
    """Train as the recipe at *path* in plain PyTorch: each sample alone, with full logits, in float64."""
    directory = path.parent
    student, teacher = (
        AutoModelForImageTextToText.from_pretrained(directory / name, dtype=torch.float64)
        for name in ("student", "teacher")
    )
    samples = micro_batches(path, 1, f"--step_scheduler.global_batch_size={num_steps * BATCH}")
    parameters = []
    for name, parameter in student.named_parameters():
        if "merger" in name or not re.search("vision_tower|visual|vision_model", name):
            parameters.append(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    records = []
    for step in range(num_steps):
        cross_entropy = divergence = torch.zeros((), dtype=torch.float64)
        count = 0
        for index in range(step * BATCH, (step + 1) * BATCH):
            inputs = dict(samples[index])
            labels = inputs.pop("labels")[:, 1:]
            is_label = labels != -100
            logits = student.train()(**inputs).logits[:, :-1][is_label]
            with torch.no_grad():
                of_teacher = teacher.eval()(**inputs).logits[:, :-1][is_label]
            cross_entropy = cross_entropy + F.cross_entropy(
                logits, labels[is_label], reduction="sum"
            )
            expected = F.log_softmax(of_teacher / TEMPERATURE, -1)
            predicted = F.log_softmax(logits / TEMPERATURE, -1)
            kl = F.kl_div(predicted, expected, reduction="sum", log_target=True)
            divergence = divergence + kl * TEMPERATURE**2
            count += int(is_label.sum())
        loss = ((1 - KD_RATIO) * cross_entropy + KD_RATIO * divergence) / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums = {"loss": loss, "ce_loss": cross_entropy / count, "kd_loss": divergence / count}
        records.append({name: float(value.detach()) for name, value in sums.items()})
    return records


@pytest.mark.parametrize("family", ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.further)])
def test_the_losses_are_those_of_plain_pytorch(family: str, tmp_path: Path) -> None:
    path = prepare(tmp_path, family)
    run(path, "run", *EXACT)
    found, expected = logged(tmp_path / "run"), plain_losses(path)
    assert len(found) == NUM_STEPS
    for record, other in zip(found, expected, strict=True):
        assert record == pytest.approx(other, abs=1e-9)
    assert found[0]["kd_loss"] > 0.5


PACKED = (
    "--packed_sequence.size=180",
    "--step_scheduler.local_batch_size=1",
    "--step_scheduler.global_batch_size=2",
)
