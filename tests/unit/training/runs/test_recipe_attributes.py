"""What a recipe of one's own may do with its attributes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from automodel_ckpt.config.keys.checkpoint import CheckpointConfig
from automodel_ckpt.config.keys.optimizer import OptimizerConfig
from automodel_ckpt.config.keys.ranks_and_steps import StepSchedulerConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.training import recipe as recipe_module
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.resume import RecipeOptions


class Recipe(recipe_module.Recipe):
    untracked = frozenset({"cache"})


def recipe(**checkpoint: Any) -> Recipe:
    config = SimpleNamespace(checkpoint=CheckpointConfig(**checkpoint), optimizer=OptimizerConfig())
    return Recipe(cast(RecipeConfig, config), config_yaml="")


def test_an_attribute_that_hides_a_method_is_refused_before_training() -> None:
    hiding = recipe()
    vars(hiding)["build_assets"] = {"state": 1}
    with pytest.raises(RecipeError, match=r"hides a method of the recipe[\s\S]*build_assets"):
        hiding.resume()


def made(
    lr: float, gamma: float, size: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, size, gamma)


def at_step(step: int) -> StepScheduler:
    scheduler = StepScheduler(StepSchedulerConfig(max_steps=20), planned_steps=20)
    scheduler.step = scheduler.planned_before = step
    return scheduler


def steps_of(
    optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, num: int
) -> list[float]:
    rates = []
    for _ in range(num):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_with_on_resume_recipe_a_schedule_of_factors_is_where_the_recipes_would_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The rates of StepLR and OneCycleLR are computed from those before, which are of other settings."""
    expected = steps_of(*made(0.3, 0.5, 3), 10)
    saved, saved_schedule = made(0.1, 0.1, 2)
    steps_of(saved, saved_schedule, 5)
    optimizer, schedule = made(0.3, 0.5, 3)
    options = RecipeOptions(optimizer, schedule, OptimizerConfig(on_resume="recipe"))
    optimizer.load_state_dict(saved.state_dict())
    schedule.load_state_dict(saved_schedule.state_dict())
    with caplog.at_level("WARNING", "automodel_ckpt"):
        options.compare(at_step(5), {"optimizer", "lr_scheduler"}, Path("x"))
    assert steps_of(optimizer, schedule, 5) == pytest.approx(expected[5:])
    peak, changed = caplog.messages
    assert peak == "the peak learning rate is the recipe's from here on, 0.3; it was 0.1"
    assert changed == (
        "the schedule changed: the learning rate of step 6 is 0.15, it would have been 0.001"
    )


@pytest.mark.parametrize(
    ("key", "has_schedule"), [("optimizer.lr", False), ("optimizer.groups.0.lr", True)]
)
def test_an_override_that_the_loaded_state_shows_to_have_no_effect_is_rejected(
    key: str, has_schedule: bool
) -> None:
    saved, saved_schedule = made(0.1, 0.5, 20)
    optimizer, schedule = made(0.3, 0.5, 20)
    options = RecipeOptions(optimizer, schedule if has_schedule else None, OptimizerConfig(), [key])
    optimizer.load_state_dict(saved.state_dict())
    schedule.load_state_dict(saved_schedule.state_dict())
    names = {"optimizer", "lr_scheduler"} if has_schedule else {"optimizer"}
    with pytest.raises(
        RecipeError, match=rf"--{key}\s[\s\S]*0.3; here was saved with 0.1[\s\S]*on_resume recipe"
    ):
        options.compare(at_step(0), names, Path("here"))
