"""Tiny runs of the recipe ``reranker`` on pairs of words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fixtures.embedding import tiny_pairs as tiny

RECIPE = """
recipe: reranker
seed: 7
model:
  from_pretrained: {base}
reranker:
  temperature: 0.5
dataset:
  _target_: automodel_ckpt.data.text_pairs.text_pairs
  path: {rows}
  seq_length: 16
validation_dataset:
  _target_: automodel_ckpt.data.text_pairs.text_pairs
  path: {rows}
  seq_length: 16
  max_samples: 17
optimizer:
  lr: 1e-3
clip_grad_norm: null
step_scheduler:
  global_batch_size: 6
  local_batch_size: 6
  max_steps: 4
checkpoint:
  checkpoint_dir: {run}
  save_consolidated: false
"""


def write(directory: Path, kind: str = "bert", num_negatives: int = 3, **options: Any) -> Path:
    """Write a base, rows with negatives, and a recipe that trains it on them; returns the recipe file."""
    tiny.write_model(directory / "base", kind, **options)
    tiny.write_rows(directory / "rows.jsonl", num_negatives)
    recipe = directory / "recipe.yaml"
    recipe.write_text(
        RECIPE.format(base=directory / "base", rows=directory / "rows.jsonl", run=directory / "run")
    )
    return recipe
