"""A recipe in NeMo AutoModel's format, with a local model and local data, trains unmodified and resumes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.models.sizes import model_sizes
from tests.support.servers.command_server import CommandServer

_COLUMNS = (
    "nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset."
    "ColumnMappedTextInstructionDataset"
)
RECIPE = f"""\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler:
  global_batch_size: 4
  local_batch_size: 2
  ckpt_every_steps: 2
  val_every_steps: 2
  max_steps: 4
  num_epochs: 4
dist_env:
  backend: gloo
  timeout_minutes: 5
rng:
  _target_: nemo_automodel.components.training.rng.StatefulRNG
  seed: 11
  ranked: true
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: model
  torch_dtype: torch.float32
checkpoint:
  enabled: true
  checkpoint_dir: run/
  model_save_format: safetensors
  save_consolidated: final
distributed:
  strategy: fsdp2
  dp_size: none
  mp_policy:
    _target_: torch.distributed.fsdp.MixedPrecisionPolicy
    param_dtype: float32
loss_fn:
  _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy
dataset:
  _target_: {_COLUMNS}
  path_or_dataset_id: rows.jsonl
  column_mapping:
    question: asked
    answer: said
validation_dataset:
  _target_: {_COLUMNS}
  path_or_dataset_id: rows.jsonl
  limit_dataset_samples: 4
  column_mapping:
    question: asked
    answer: said
dataloader:
  _target_: torchdata.stateful_dataloader.StatefulDataLoader
  collate_fn: nemo_automodel.components.datasets.utils.default_collater
  shuffle: true
optimizer:
  _target_: torch.optim.Adam
  lr: 1.0e-3
  betas: [0.9, 0.999]
  weight_decay: 0
lr_scheduler:
  lr_decay_style: cosine
  lr_warmup_steps: 1
ci:
  recipe_owner: someone
"""


def write_model(directory: Path) -> None:
    """Write a tiny random Llama with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.support.models.small_tokenizer import small_tokenizer

    tokenizer = small_tokenizer(vocab_size=300)
    config = LlamaConfig(
        **model_sizes(vocab=len(tokenizer), hidden=16, inner=24, layers=2, heads=2, positions=64)
    )
    torch.manual_seed(5)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_rows(path: Path) -> None:
    """Write 16 questions and answers. One is longer than the model's context."""
    rows = []
    for number in range(16):
        words = 40 if number == 3 else 3 + number % 4
        rows.append({"asked": f"What is {number}?", "said": " the number" * words})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step."""
    records = [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, commands: CommandServer) -> Path:
    """A directory in which the recipe was trained on one rank."""
    made = tmp_path_factory.mktemp("theirs")
    write_model(made / "model")
    write_rows(made / "rows.jsonl")
    (made / "theirs.yaml").write_text(RECIPE)
    done = commands.run("ckpt-train", "theirs.yaml", cwd=made)
    assert done.returncode == 0, done.stdout + done.stderr
    output = done.stdout + done.stderr
    assert "note: theirs.yaml:14: rng.seed: used as seed" in output
    assert "keys of NeMo AutoModel have no meaning here: " in output
    return made


@pytest.mark.timeout(180)
def test_an_automodel_recipe_trains_unmodified(directory: Path) -> None:
    run = directory / "run"
    found = losses(run)
    assert sorted(found) == [1, 2, 3, 4]
    export = run / "LATEST" / "model" / "consolidated"
    assert list(export.glob("*.safetensors"))
    # Our form of the recipe is saved: a checkpoint needs no translation.
    saved = yaml.safe_load((run / "LATEST" / "config.yaml").read_text())
    assert saved["recipe"] == "llm_finetune"
    assert saved["seed"] == 11


@pytest.mark.timeout(180)
def test_an_automodel_recipe_resumes_exactly_on_two_ranks(
    directory: Path, commands: CommandServer
) -> None:
    undisturbed = losses(directory / "run")
    again = directory / "again"
    shutil.copytree(directory / "run", again, symlinks=True)
    for checkpoint in [*again.glob("epoch_*_step_4")]:
        shutil.rmtree(checkpoint)
    words = ("--checkpoint.checkpoint_dir", "again/", "--dist_env.timeout_minutes", "2")
    done = commands.run("ckpt-train", "--nproc-per-node=2", "theirs.yaml", *words, cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    resumed = losses(again)
    assert resumed.keys() == undisturbed.keys()
    for step, loss in undisturbed.items():
        assert abs(resumed[step] - loss) <= 1e-5 * abs(loss)


def test_the_dry_run_and_the_printed_recipe_are_those_of_the_translation(
    directory: Path, commands: CommandServer
) -> None:
    printed = commands.run("ckpt-train", "--print-config", "theirs.yaml", cwd=directory)
    assert printed.returncode == 0, printed.stderr
    assert yaml.safe_load(printed.stdout)["model"]["from_pretrained"] == "model"
    converted = commands.run("ckpt-train", "--convert-recipe", "theirs.yaml", cwd=directory)
    assert converted.returncode == 0, converted.stderr
    (directory / "ours.yaml").write_text(converted.stdout)
    again = commands.run("ckpt-train", "--print-config", "ours.yaml", cwd=directory)
    assert yaml.safe_load(again.stdout) == yaml.safe_load(printed.stdout)
    dry = commands.run("ckpt-train", "--dry-run", "theirs.yaml", cwd=directory)
    assert dry.returncode == 0, dry.stdout + dry.stderr
