"""The recipe sequence_classification: losses as transformers' Trainer, exact resumes on any ranks, and its exports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

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


def topics(directory: Path, dropout: float = 0.0) -> Path:
    return write_recipe(directory, tiny_llama(attention_dropout=dropout) + TOPICS)


def run(recipe: Path, name: str, num_ranks: int = 1, *overrides: str, die_after: int = 0) -> Any:
    """Train on ranks, in the directory *name*; the digests of rank 0. With *die_after*, a step that kills all ranks."""
    place = f"--checkpoint.checkpoint_dir={recipe.parent / name}"
    outcomes = ranks.outcomes(
        lambda: train(recipe, place, *overrides, dies_after=die_after),
        num_ranks,
        init=False,
    )
    if die_after:
        # The ranks were killed, and did not end by an error before.
        assert not any(outcome.traceback for outcome in outcomes), outcomes[0].traceback
    else:
        assert all(outcome.ok for outcome in outcomes), outcomes[0].traceback
    return outcomes[0].value


def metrics_of(directory: Path) -> dict[str, float]:
    lines = (directory / "validation.jsonl").read_text().splitlines()
    return dict(json.loads(lines[-1]))


@pytest.mark.further
def test_a_killed_run_resumes_exactly_and_its_export_names_the_labels(tmp_path: Path) -> None:
    recipe = topics(tmp_path, dropout=0.2)
    whole = run(recipe, "whole", 1, EXPORT)
    run(recipe, "killed", die_after=5)
    assert run(recipe, "killed") == whole
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")

    newest = tmp_path / "whole" / "LATEST"
    classify = pipeline("text-classification", model=str(newest / "model" / "consolidated"))
    one, other = classify(["Open an archive.", "The mean of data, as a number."], batch_size=2)
    assert {one["label"], other["label"]} <= {"json", "statistics", "tarfile"}
    # Rows of different lengths are padded on the right, and do not change each other.
    alone = classify("Open an archive.")[0]
    assert one["label"] == alone["label"]
    assert one["score"] == pytest.approx(alone["score"], abs=1e-5)

    with pytest.raises(AssertionError, match="trained with other labels"):
        run(recipe, "whole", 1, "--classification.labels=[statistics, json, tarfile]")


@pytest.mark.further
def test_two_ranks_train_as_one_and_one_rank_continues_their_run(tmp_path: Path) -> None:
    recipe = topics(tmp_path)
    run(recipe, "whole")
    # 45 samples: the last global batch of the epoch has 5, of which one rank gets a filler.
    run(recipe, "resharded", 2, "--distributed.strategy=ddp", die_after=4)
    run(recipe, "resharded", 1)
    losses = [
        [float.fromhex(step["loss"]) for step in steps_of(tmp_path / name)]
        for name in ("whole", "resharded")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    one, other = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "resharded")
    for name in ("val_loss", "val_accuracy", "val_f1"):
        assert other[name] == pytest.approx(one[name], rel=1e-5), name
        assert math.isfinite(one[name])
    assert one["samples"] == 11
