"""The recipe sequence_classification: losses as transformers' Trainer, and its exports."""

import json
from pathlib import Path

import pytest
from transformers import pipeline

from automodel_ckpt.errors import RecipeError
from tests.support import ranks
from tests.support.models.tiny_model import tiny_llama
from tests.support.runs.training import EXPORT, steps_of, train, write_recipe

FIXTURES = Path(__file__).parents[2] / "fixtures" / "classification"

TRAINER = """
recipe: sequence_classification
model: {{from_pretrained: {model}}}
classification: {{problem: {problem}}}
tokenizer: null
dataset: {{_target_: tests.fixtures.classification.rows.LabeledTokens, problem: {problem}}}
dataloader: {{shuffle: false}}
optimizer: {{lr: 0.01, weight_decay: 0.0}}
step_scheduler: {{global_batch_size: 4, local_batch_size: 2, max_steps: 10}}
checkpoint: {{checkpoint_dir: {run}}}
"""

TOPICS = """
recipe: sequence_classification
seed: 7
classification: {labels: [json, statistics, tarfile]}
tokenizer: {_target_: automodel_ckpt.examples.data.python_docs.train_tokenizer, vocab_size: 300}
dataset: &data
  _target_: automodel_ckpt.examples.data.library_topics.library_topics
  seq_length: 24
  max_samples: 45
validation_dataset: {<<: *data, split: validation, max_samples: 11}
optimizer: {lr: 1e-2}
step_scheduler:
  global_batch_size: 8
  local_batch_size: 4
  max_steps: 6
  ckpt_every_steps: 2
  ckpt_every_epochs: null
checkpoint: {is_async: true, best_metric_key: val_f1, best_mode: max}
"""


@pytest.mark.parametrize("problem", ["single_label", "multi_label", "regression"])
def test_losses_are_those_of_transformers_trainer(tmp_path: Path, problem: str) -> None:
    expected = json.loads((FIXTURES / "losses.json").read_text())[problem]
    text = TRAINER.format(model=FIXTURES / problem, problem=problem, run=tmp_path / "run")
    recipe = write_recipe(tmp_path, text)
    ranks.run(lambda: train(recipe), 1, init=False)
    steps = steps_of(tmp_path / "run")
    losses = [float.fromhex(step["loss"]) for step in steps]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert {step["samples"] for step in steps} == {4}


def topics(directory: Path) -> Path:
    return write_recipe(directory, tiny_llama(attention_dropout=0.0) + TOPICS)


@pytest.mark.further
def test_an_export_names_the_labels_and_a_run_with_others_is_refused(tmp_path: Path) -> None:
    recipe = topics(tmp_path)
    place = f"--checkpoint.checkpoint_dir={tmp_path / 'run'}"
    train(recipe, place, "--step_scheduler.max_steps=2", EXPORT)
    export = tmp_path / "run" / "LATEST" / "model" / "consolidated"
    classify = pipeline("text-classification", model=str(export))
    one, other = classify(["Open an archive.", "The mean of data, as a number."], batch_size=2)
    assert {one["label"], other["label"]} <= {"json", "statistics", "tarfile"}
    # Rows of different lengths are padded on the right, and do not change each other.
    alone = classify("Open an archive.")[0]
    assert one["label"] == alone["label"]
    assert one["score"] == pytest.approx(alone["score"], abs=1e-5)
    with pytest.raises(RecipeError, match="trained with other labels"):
        train(recipe, place, "--classification.labels=[statistics, json, tarfile]")
