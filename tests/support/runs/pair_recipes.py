"""Tiny runs of the recipes ``embedding`` and ``reranker`` on pairs of words."""

from pathlib import Path
from typing import Any

from tests.fixtures.embedding import tiny_pairs as tiny
from tests.support.runs.training import build

RECIPE = """
recipe: {name}
seed: 7
model:
  from_pretrained: {base}
{section}
dataset:
  _target_: automodel_ckpt.data.text_pairs.text_pairs
  path: {rows}
  seq_length: {length}
validation_dataset:
  _target_: automodel_ckpt.data.text_pairs.text_pairs
  path: {rows}
  seq_length: {length}
  max_samples: 17
optimizer:
  lr: 1e-3
clip_grad_norm: null
step_scheduler:
  global_batch_size: 6
  local_batch_size: 6
  max_steps: {steps}
checkpoint:
  checkpoint_dir: {run}
  save_consolidated: false
"""
_EMBEDDING = {
    "name": "embedding",
    "section": 'embedding:\n  query_prompt: "find "',
    "length": 12,
    "steps": 10,
}
_RERANKER = {
    "name": "reranker",
    "section": "reranker:\n  temperature: 0.5",
    "length": 16,
    "steps": 4,
}


def write_embedding(
    directory: Path, kind: str = "bert", num_negatives: int = 0, **options: Any
) -> Path:
    """Write a base, the pairs of 10 steps, and a recipe that trains it on them; returns the recipe file."""
    return _write(directory, _EMBEDDING, kind, num_negatives, options)


def write_reranker(
    directory: Path, kind: str = "bert", num_negatives: int = 3, **options: Any
) -> Path:
    """Write a base, rows with negatives, and a recipe that trains it on them; returns the recipe file."""
    return _write(directory, _RERANKER, kind, num_negatives, options)


def _write(
    directory: Path, values: dict[str, Any], kind: str, num_negatives: int, options: dict[str, Any]
) -> Path:
    base, rows = directory / "base", directory / "rows.jsonl"
    tiny.write_model(base, kind, **options)
    tiny.write_rows(rows, num_negatives)
    recipe = directory / "recipe.yaml"
    recipe.write_text(RECIPE.format(base=base, rows=rows, run=directory / "run", **values))
    return recipe


def trained(recipe_file: Path, *overrides: str, recipe_class: Any = None) -> Any:
    recipe = build(recipe_file, *overrides, recipe_class=recipe_class)
    try:
        recipe.setup()
        recipe.run()
    except BaseException:
        recipe.close()
        raise
    return recipe
