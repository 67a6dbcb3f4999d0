"""What a recipe of one's own may do with its attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from automodel_ckpt.config.schema import CheckpointConfig, RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.recipes.lifecycle import Lifecycle


class Recipe(Lifecycle):
    untracked = frozenset({"cache"})


def recipe(**checkpoint: Any) -> Recipe:
    config = SimpleNamespace(checkpoint=CheckpointConfig(**checkpoint))
    return Recipe(cast(RecipeConfig, config), config_yaml="")


def test_a_class_may_say_what_is_untracked_and_an_object_add_to_it() -> None:
    one, other = recipe(), recipe()
    one.untracked.add("more")
    assert (one.untracked, other.untracked) == ({"cache", "more"}, {"cache"})


def test_an_attribute_that_hides_a_method_is_refused_before_training() -> None:
    hiding = recipe()
    vars(hiding)["losses"] = {"state": 1}
    with pytest.raises(RecipeError, match=r"hides a method of the recipe[\s\S]*losses"):
        hiding.resume()


def test_a_metric_that_nothing_measures_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = recipe(best_metric_key="f1")
    for _ in range(2):
        asked._warn_of_unknown_metric({"step": 1, "val_loss": 2.0})
    (record,) = caplog.records
    assert (
        record.getMessage() == "no best checkpoint: checkpoint.best_metric_key is f1, and there are only step, val_loss"
    )


def test_options_of_the_optimizer_that_go_on_as_saved_are_said(caplog: pytest.LogCaptureFixture) -> None:
    recipe = object.__new__(Lifecycle)
    weight = torch.nn.Parameter(torch.zeros(1))
    recipe.lr_scheduler = None
    recipe.optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5, betas=(0.8, 0.99))
    wanted = recipe._optimizer_options()
    recipe.optimizer.load_state_dict(torch.optim.AdamW([weight], lr=0.2, weight_decay=0.01).state_dict())
    with caplog.at_level("WARNING", "automodel_ckpt"):
        recipe._say_kept_options(wanted)
    assert [record.getMessage() for record in caplog.records] == [
        f"the optimizer's {name} goes on as saved, {kept}; the recipe's {new} is for new runs"
        for name, kept, new in (("lr", 0.2, 0.1), ("betas", [0.9, 0.999], [0.8, 0.99]), ("weight_decay", 0.01, 0.5))
    ]
