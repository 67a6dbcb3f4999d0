"""Several named validation sets: their losses in logs, checkpoints and charts, and the best checkpoint by one."""

import json
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.support import ranks
from tests.support.runs.training import EXPORT, RECIPE, VALIDATION, build, train, write_recipe

SETS = """
validation_datasets:
  few:
    _target_: automodel_ckpt.examples.data.python_docs.language_modeling
    seq_length: 16
    max_samples: 3
    split: validation
  long:
    _target_: automodel_ckpt.examples.data.python_docs.language_modeling
    seq_length: 8
    max_samples: 5
    split: validation
"""
OVERRIDES = ("--step_scheduler.max_steps=6", "--step_scheduler.val_every_steps=3")


def run(directory: Path, name: str, text: str, *overrides: str, num_ranks: int = 1) -> Any:
    """Train in ``directory/name``; returns the digests of the state at the end of each rank."""
    arguments = (f"--checkpoint.checkpoint_dir={directory / name}", *OVERRIDES, *overrides)
    recipe = write_recipe(directory, text)
    return ranks.run(partial(train, recipe, *arguments), num_ranks, init=False)


def validations(run_directory: Path) -> list[dict[str, Any]]:
    text = (run_directory / "validation.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_each_set_has_its_loss_and_the_first_is_the_main_one(tmp_path: Path) -> None:
    best = ("--checkpoint.best_metric_key=val_loss_long", "--checkpoint.best_mode=max")
    run(tmp_path, "named", RECIPE + SETS, *best)
    run(tmp_path, "both", RECIPE + VALIDATION + SETS)
    run(tmp_path, "one", RECIPE + VALIDATION)
    named, both, one = (validations(tmp_path / name) for name in ("named", "both", "one"))
    assert [record["step"] for record in named] == [3, 5, 6]
    log = (tmp_path / "both/log.txt").read_text()
    names = re.findall(r"reading the data of (\S+)\n.*language_modeling", log)
    assert names == [
        "dataset",
        "validation_dataset",
        "validation_datasets.few",
        "validation_datasets.long",
    ]
    for record, of_both, alone in zip(named, both, one, strict=True):
        assert record["val_loss"] == record["val_loss_few"] == of_both["val_loss_few"]
        assert record["val_loss_long"] == of_both["val_loss_long"] != record["val_loss_few"]
        assert record["label_tokens"] == 3 * 15
        assert of_both["val_loss"] == alone["val_loss"] and "val_loss_few" not in alone
    losses = json.loads((tmp_path / "named/epoch_0_step_5/losses.json").read_text())
    assert losses["val_loss_long"] == named[1]["val_loss_long"]
    saved = [record for record in named if record["step"] in (5, 6)]
    highest = max(saved, key=lambda record: float(record["val_loss_long"]))
    assert os.readlink(tmp_path / "named/LOWEST_VAL") == f"epoch_0_step_{highest['step']}"


def accuracies_of_the_export(run_directory: Path, recipe_file: Path) -> dict[str, float]:
    """Fractions of the labels that plain transformers predicts with the newest export, for each set of the recipe."""
    model = AutoModelForCausalLM.from_pretrained(run_directory / "LATEST/model/consolidated").eval()
    recipe = build(recipe_file, f"--checkpoint.checkpoint_dir={run_directory / 'other'}")
    recipe.setup()
    found = {}
    for name, batches in recipe.validation_sets.items():
        num_hits = num_labels = 0
        for batch in batches():
            for micro_batch in batch.micro_batches:
                labels = micro_batch["labels"][:, 1:]
                logits = model(micro_batch["input_ids"], micro_batch["attention_mask"]).logits
                num_hits += int((logits.argmax(-1)[:, :-1] == labels).sum())
                num_labels += int((labels != -100).sum())
        found[name] = num_hits / num_labels
    recipe.close()
    return found


def test_accuracy_and_perplexity_are_those_of_plain_transformers(tmp_path: Path) -> None:
    best = ("--checkpoint.best_metric_key=val_accuracy_long", "--checkpoint.best_mode=max")
    # With the large weights of the others, no prediction is right after so few steps.
    small = "--model.from_config.initializer_range=0.02"
    run(tmp_path, "run", RECIPE + SETS, *best, small, EXPORT)
    records = validations(tmp_path / "run")
    last = records[-1]
    reference = partial(accuracies_of_the_export, tmp_path / "run", tmp_path / "recipe.yaml")
    (expected,) = ranks.run(reference, 1, init=False)
    assert last["val_accuracy"] == last["val_accuracy_few"] == expected["few"] > 0
    assert last["val_accuracy_long"] == expected["long"] > 0
    for name in ("", "_few", "_long"):
        perplexity = math.exp(last[f"val_loss{name}"])
        assert last[f"val_perplexity{name}"] == pytest.approx(perplexity)
    saved = [record for record in records if record["step"] in (5, 6)]
    highest = max(saved, key=lambda record: float(record["val_accuracy_long"]))
    assert os.readlink(tmp_path / "run/LOWEST_VAL") == f"epoch_0_step_{highest['step']}"
