"""Several named validation sets: their losses in logs, checkpoints and charts, and the best checkpoint by one."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.report.charts import charts_of
from automodel_ckpt.report.follow import values_of
from automodel_ckpt.report.history import read_history
from tests.support import ranks
from tests.support.training import RECIPE, VALIDATION, build, killed_after, train, write_recipe

SETS = """
validation_datasets:
  few:
    _target_: automodel_ckpt.data.python_docs.language_modeling
    seq_length: 16
    max_samples: 3
    split: validation
  long:
    _target_: automodel_ckpt.data.python_docs.language_modeling
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
    history = read_history(tmp_path / "named")
    assert history.series["val_loss_long"].steps == (3, 5, 6)
    labels = [line.label for line in charts_of([history])[0].lines]
    assert labels[-2:] == ["named, validation, few", "named, validation, long"]
    assert values_of(named[0])["val/loss_long"] == named[0]["val_loss_long"]


def test_a_killed_run_and_two_ranks_have_the_same_losses(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole", RECIPE + SETS)
    arguments = (f"--checkpoint.checkpoint_dir={tmp_path / 'killed'}", *OVERRIDES)
    recipe = write_recipe(tmp_path, RECIPE + SETS)
    training = partial(train, recipe, *arguments, recipe_class=killed_after(5))
    ranks.outcomes(training, 1, init=False)
    assert run(tmp_path, "killed", RECIPE + SETS) == whole
    fields = ("step", "val_loss", "val_loss_few", "val_loss_long")
    one, again = (
        [[record[field] for field in fields] for record in validations(tmp_path / name)]
        for name in ("whole", "killed")
    )
    assert one == again
    # Dropout draws other numbers on two ranks, so the weights of this comparison do not change.
    unchanged = ("--optimizer.lr=0.0", "--step_scheduler.max_steps=3")
    run(tmp_path, "still", RECIPE + SETS, *unchanged)
    run(tmp_path, "two", RECIPE + SETS, *unchanged, num_ranks=2)
    (expected,), (found,) = (validations(tmp_path / name) for name in ("still", "two"))
    for field in fields:
        assert found[field] == pytest.approx(expected[field], rel=1e-6)


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ("{a.b: {_target_: automodel_ckpt.data.mock.random_tokens}}", "letters, digits, _ and -"),
        ("{a: {_target_: torch.save}}", "torch.save"),
        ("{a: {path: x}}", "validation_datasets.a must be a section with _target_"),
        (
            "{a: {_target_: automodel_ckpt.data.mock.random_tokens, sed: 1}}",
            r"unknown key validation_datasets.a.sed[\s\S]*did you mean validation_datasets.a.seed",
        ),
        (
            "{_target_: automodel_ckpt.data.mock.random_tokens}",
            "validation_datasets._target_ must be a section with _target_",
        ),
        ("[1]", "validation_datasets must be"),
    ],
)
def test_mistakes_in_a_set_are_errors_with_its_key(tmp_path: Path, section: str, what: str) -> None:
    recipe = write_recipe(tmp_path, f"{RECIPE}validation_datasets: {section}\n")
    with pytest.raises(RecipeError, match=what):
        build(recipe)
