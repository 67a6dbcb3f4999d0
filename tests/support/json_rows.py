"""Token ids that a fixture of another program was trained with, as a data set, and a recipe for them."""

import json
from pathlib import Path

RECIPE = """
seed: 3
model:
  from_config: CONFIG
dataset:
  _target_: tests.support.json_rows.Rows
  path: CONFIG/rows.json
dataloader:
  shuffle: false
optimizer:
  lr: 1e-2
lr_scheduler:
  name: linear
  warmup_steps: 2
step_scheduler:
  global_batch_size: 4
  local_batch_size: 2
  max_steps: 10
  num_epochs: 2
  ckpt_every_steps: 1
checkpoint:
  checkpoint_dir: RUN
"""
"""10 steps of 4 rows in their order. CONFIG is the directory of config.json and rows.json, RUN that of the run."""


class Rows:
    """The rows in a JSON file, with labels on all tokens."""

    def __init__(self, path: str) -> None:
        self.rows: list[list[int]] = json.loads(Path(path).read_text())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def recipe(config: Path, run: Path) -> str:
    """Return the text of a recipe for the rows and the model in *config*."""
    return RECIPE.replace("CONFIG", str(config)).replace("RUN", str(run))
