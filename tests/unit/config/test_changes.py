"""Which settings changed between two recipes."""

from pathlib import Path

import pytest

from automodel_ckpt.config.changes import (
    changed_keys,
    check_overrides,
    ignored_by_resume,
    recipe_of,
)
from automodel_ckpt.errors import RecipeError

SAVED = """
seed: 1
optimizer: {lr: 0.1, betas: [0.9, 0.99]}
lr_scheduler: null
dataset: {_target_: a.b, path: [x, y], seq_length: 16}
checkpoint: {checkpoint_dir: here}
"""
NOW = """
seed: 2
optimizer: {lr: 0.1, betas: [0.9, 0.95], younger: 1, given: 2}
lr_scheduler: {name: cosine}
dataset: {_target_: a.b, path: [x]}
checkpoint: {checkpoint_dir: there}
"""


def test_changed_settings_are_named_with_both_values_and_defaults_of_younger_keys_are_not() -> None:
    given = {"optimizer.given", "lr_scheduler.name"}
    assert [str(change) for change in changed_keys(recipe_of(SAVED), recipe_of(NOW), given)] == [
        "dataset.path: [x, y] -> [x]",
        "dataset.seq_length: 16 -> not set",
        "lr_scheduler: null -> a section",
        "lr_scheduler.name: not set -> cosine",
        "optimizer.betas: [0.9, 0.99] -> [0.9, 0.95]",
        "optimizer.given: not set -> 2",
        "seed: 1 -> 2",
    ]


def test_a_removed_section_is_one_change() -> None:
    saved, now = recipe_of("peft: {r: 8, alpha: 16}\nema: {decay: 1}\n"), recipe_of("peft: null\n")
    changes = [str(change) for change in changed_keys(saved, now, {"peft"})]
    assert changes == ["ema.decay: 1 -> not set", "peft: a section -> null"]
    assert [str(change) for change in changed_keys(saved, now, set())] == changes


@pytest.mark.parametrize("key", ["peft.init", "model.mtp.weights"])
def test_where_initial_values_come_from_is_ignored_but_not_a_section_that_was_removed(
    key: str,
) -> None:
    saved = {key: "default"}
    for now, expected in (({key: "other"}, [key]), ({}, [])):
        changes = changed_keys(saved, now, {key})
        found = ignored_by_resume(changes, {"model"}, "checkpoint")
        assert [change.key for change in found] == expected


@pytest.mark.parametrize("flag", ["optimizer.betas", "optimizer.betas.1", "optimizer"])
def test_an_override_that_a_resume_would_ignore_is_rejected_with_the_ways_to_proceed(
    flag: str,
) -> None:
    changes = changed_keys(recipe_of(SAVED), recipe_of(NOW), {"optimizer.given"})
    ignored = ignored_by_resume(changes, {"optimizer"}, "checkpoint")
    check_overrides(
        ignored, ["optimizer.bet", "seed_of_something", "lr_scheduler.name"], Path("epoch_0_step_4")
    )
    with pytest.raises(RecipeError) as rejected:
        check_overrides(ignored, [flag], Path("runs/epoch_0_step_4"))
    text = str(rejected.value)
    assert (
        f"--{flag}\n" in text and "[0.9, 0.95]; epoch_0_step_4 was saved with [0.9, 0.99]" in text
    )
    for way in (
        "remove the override",
        "--init_from.path runs/epoch_0_step_4",
        "--optimizer.on_resume recipe",
    ):
        assert way in text
