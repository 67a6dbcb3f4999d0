"""Preference runs of a tiny policy on rows of words, which TRL trained too (tests/fixtures/preference)."""

import json
from pathlib import Path
from typing import Any

from tests.fixtures.preference import tiny_policy
from tools.support import step_lines

FIXTURES = Path(__file__).parents[1].parent / "fixtures" / "preference"

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


def write_run(directory: Path, recipe: str, *, rows: list[dict[str, Any]] | None = None) -> Path:
    """Write the policy, the rows (default: those of TRL) and a recipe file to *directory*; return the recipe's path."""
    from transformers import AutoModelForCausalLM

    known = recorded()
    model, data = directory / "model", directory / "pairs.jsonl"
    if not model.exists():
        tiny_policy.save(model, AutoModelForCausalLM)
    lines = [json.dumps(row) + "\n" for row in (known["rows"] if rows is None else rows)]
    data.write_text("".join(lines))
    path = directory / f"{recipe}.yaml"
    lr = known["optimizer"]["learning_rate"]
    path.write_text(
        RECIPE.format(recipe=recipe, model=model, data=data, lr=lr, run=directory / "run")
    )
    return path


def write_recorded(
    directory: Path, template: str, recorded_runs: dict[str, Any], rows: list[dict[str, Any]]
) -> Path:
    """Write the policy, *rows* and the recipe of TRL's runs to *directory*; return the recipe's path.

    *template* takes the paths ``base``, ``rows`` and ``run``, and the options of TRL's optimizer.
    """
    from transformers import AutoModelForCausalLM

    tiny_policy.save(directory / "base", AutoModelForCausalLM)
    write_rows(directory, rows)
    values = {name: directory / name for name in ("base", "run")}
    values |= {"rows": directory / "rows.jsonl", **recorded_runs["optimizer"]}
    path = directory / "recipe.yaml"
    path.write_text(template % values)
    return path


def write_rows(directory: Path, rows: list[dict[str, Any]]) -> None:
    (directory / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


TENSOR_PARALLEL = ("--distributed.tp_size=2", "--dataloader.pad_to_multiple_of=32")
"""Rows of one length: for each length, DTensor derives the sharding of every operation, most of the time of a run."""


def step_records(run: Path, log: str = "training") -> list[dict[str, Any]]:
    """The records of the steps in training.jsonl, or in the log of this name."""
    return step_lines(run / f"{log}.jsonl")
