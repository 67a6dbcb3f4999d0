"""Preference runs of a tiny policy on rows of words, which TRL trained too (tests/fixtures/preference)."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent.parent / "fixtures" / "preference"

RECIPE = """
recipe: {recipe}
seed: 7
model:
  from_pretrained: {model}
dataset:
  _target_: automodel_ckpt.data.preference.pairs
  path: {data}
optimizer:
  lr: {lr}
  weight_decay: 0.0
clip_grad_norm: null
step_scheduler:
  global_batch_size: 4
  local_batch_size: 4
  max_steps: 10
  ckpt_every_steps: 4
dataloader:
  shuffle: false
checkpoint:
  checkpoint_dir: {run}
"""


def recorded() -> dict[str, Any]:
    """What TRL did: the rows, and the losses of each run."""
    found: dict[str, Any] = json.loads((FIXTURES / "trl_losses.json").read_text())
    return found


def tiny_policy() -> Any:
    """The module that makes the policy, which is not part of a package."""
    if str(FIXTURES) not in sys.path:
        sys.path.insert(0, str(FIXTURES))
    return importlib.import_module("tiny_policy")


def write_run(directory: Path, recipe: str, *, rows: list[dict[str, Any]] | None = None) -> Path:
    """Write the policy, the rows (default: those of TRL) and a recipe file to *directory*; return the recipe's path."""
    from transformers import AutoModelForCausalLM

    known = recorded()
    model, data = directory / "model", directory / "pairs.jsonl"
    if not model.exists():
        tiny_policy().save(model, AutoModelForCausalLM)
    lines = [json.dumps(row) + "\n" for row in (known["rows"] if rows is None else rows)]
    data.write_text("".join(lines))
    path = directory / f"{recipe}.yaml"
    lr = known["optimizer"]["learning_rate"]
    path.write_text(
        RECIPE.format(recipe=recipe, model=model, data=data, lr=lr, run=directory / "run")
    )
    return path


def step_records(run: Path) -> list[dict[str, Any]]:
    """The records of the steps in training.jsonl."""
    records = [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]
    return [record for record in records if "event" not in record]
