"""Continue another program's run with an imported checkpoint, and return the losses."""

from functools import partial
from pathlib import Path

from automodel_ckpt.cli.ckpt import main
from tests.support import ranks
from tests.support.runs.training import train, write_recipe
from tools.support import step_lines

CONTINUED = """
seed: 7
model:
  from_config: CONFIG
dataset:
  _target_: tests.fixtures.tiny_training.Rows
  num_samples: 22
dataloader:
  shuffle: false
optimizer:
  lr: 1e-2
  weight_decay: 0.1
lr_scheduler:
  name: cosine
  warmup_steps: 2
step_scheduler:
  global_batch_size: 8
  local_batch_size: 2
  max_steps: 10
  ckpt_every_epochs: null
checkpoint:
  checkpoint_dir: RUN
"""
"""The recipe for the runs of tests/fixtures/trainer/make.py, which other programs' fixtures can use, too."""
ADAPTER = """
tokenizer: null
peft:
  r: 2
  alpha: 4
  target_modules: [q_proj, v_proj]
  modules_to_save: [model.norm]
"""
"""The section for the adapter of tests/fixtures/trainer/make.py."""
SHARDED = (
    "--dataset.num_samples=40",
    "--step_scheduler.global_batch_size=4",
    "--lr_scheduler.name=linear",
    "--lr_scheduler.warmup_steps=0",
)
"""The overrides for the runs of tests/fixtures/fsdp/make.py."""


def continued_losses(
    source: Path,
    directory: Path,
    *overrides: str,
    config: Path | None = None,
    base: Path | None = None,
    num_ranks: int = 1,
) -> dict[int, float]:
    """Import *source* with its training state into a run in *directory*, train to step 10, and return {step: loss}.

    *config* is the directory of the model's config.json, by default *source*, and *base* that of an adapter's base.
    """
    directory.mkdir(exist_ok=True)
    run = directory / "run"
    command = ["import", str(source), str(run), "--training-state", "--json"]
    if base is not None:
        command += ["--base", str(base)]
    assert main(command) == 0
    text = CONTINUED.replace("CONFIG", str(config or source)).replace("RUN", str(run))
    if base is not None:
        text = text.replace("from_config:", "from_pretrained:").replace(str(source), str(base))
        text += ADAPTER
    recipe = write_recipe(directory, text)
    ranks.run(partial(train, recipe, *overrides), num_ranks, init=False)
    return losses_of(run)


def losses_of(run: Path) -> dict[int, float]:
    """Return the losses in a run's training.jsonl by step."""
    return {line["step"]: line["loss"] for line in step_lines(run / "training.jsonl")}
