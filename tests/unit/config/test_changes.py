"""Which settings changed between two recipes."""

from __future__ import annotations

from automodel_ckpt.config.changes import changed_keys, recipe_of

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
        "lr_scheduler: null -> not set",
        "lr_scheduler.name: not set -> cosine",
        "optimizer.betas: [0.9, 0.99] -> [0.9, 0.95]",
        "optimizer.given: not set -> 2",
        "seed: 1 -> 2",
    ]
