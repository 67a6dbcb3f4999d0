"""What a recipe of one's own may do with its attributes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from automodel_ckpt.config.schema import CheckpointConfig, RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.recipes.kept import RecipeOptions
from automodel_ckpt.recipes.lifecycle import Lifecycle
from automodel_ckpt.training.step_scheduler import Cadence, StepScheduler


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
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5, betas=(0.8, 0.99))
    options = RecipeOptions(optimizer, None)
    optimizer.load_state_dict(torch.optim.AdamW([weight], lr=0.2, weight_decay=0.01).state_dict())
    with caplog.at_level("WARNING", "automodel_ckpt"):
        options.compare(StepScheduler(Cadence(max_steps=1), planned_steps=1))
    assert [record.getMessage() for record in caplog.records] == [
        f"the optimizer's {name} goes on as saved, {kept}; the recipe's {new} is for new runs"
        for name, kept, new in (("lr", 0.2, 0.1), ("betas", [0.9, 0.999], [0.8, 0.99]), ("weight_decay", 0.01, 0.5))
    ]


def test_settings_that_changed_since_the_checkpoint_are_logged_with_both_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\nclip_grad_norm: 1.0\nstep_scheduler: {global_batch_size: 8}\n")
    resumed = recipe()
    resumed.config_yaml = "seed: 1\nclip_grad_norm: 0.5\nstep_scheduler: {global_batch_size: 16}\nnew_default: 1\n"
    resumed._compare_recipes(tmp_path, cast(Any, None))
    (record,) = caplog.records
    assert record.getMessage().splitlines()[1:] == [
        "    clip_grad_norm: 1.0 -> 0.5",
        "    step_scheduler.global_batch_size: 8 -> 16",
    ]


def falling(lr: float, num_steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """A rate that falls from *lr* to 0 in so many steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)


def test_a_schedule_that_the_recipe_changed_is_followed_from_the_saved_peak_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved, saved_schedule = falling(0.1, num_steps=10)
    for _ in range(4):
        saved.step()
        saved_schedule.step()
    optimizer, schedule = falling(0.3, num_steps=20)
    options = RecipeOptions(optimizer, schedule)
    optimizer.load_state_dict(saved.state_dict())
    schedule.load_state_dict(saved_schedule.state_dict())
    scheduler = StepScheduler(Cadence(max_steps=20), planned_steps=20)
    scheduler.step, scheduler.planned_before = 4, 10
    with caplog.at_level("WARNING", "automodel_ckpt"):
        options.compare(scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (1 - 4 / 20))
    peak, changed = (record.getMessage() for record in caplog.records)
    assert peak == "the peak learning rate goes on as saved, [0.1]; the recipe's [0.3] is for new runs"
    assert changed == (
        "the schedule changed (the run was planned for 10 steps, now for 20): the learning rate of step 5 is 0.08, "
        "it would have been 0.06"
    )
