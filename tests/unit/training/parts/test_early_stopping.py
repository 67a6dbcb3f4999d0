"""When a metric counts as improved, and what a saved state of early stopping may contain."""

import math
from typing import Any

import pytest

from automodel_ckpt.config.keys.ranks_and_steps import EarlyStoppingConfig, StepSchedulerConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.training.counters.rules import EarlyStopping, StoppingRule
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.measure.measurements import stopping_rule


@pytest.mark.parametrize(
    ("metric", "mode"),
    [("val_perplexity", "min"), ("val_accuracy_a", "max"), ("eval_a", "max"), ("eval_loss", "min")],
)
def test_another_metric_than_the_best_one_has_a_known_direction(metric: str, mode: str) -> None:
    section = StepSchedulerConfig(early_stopping=EarlyStoppingConfig(metric=metric))
    rule = stopping_rule(RecipeConfig(step_scheduler=section))
    assert rule is not None and rule.mode == mode


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"best": "low"},
        {"best": math.inf},
        {"best_step": True},
        {"num_without_improvement": -1},
        {"num_without_improvement": 2**60},
        {"metric": None},
    ],
)
def test_impossible_values_make_a_checkpoint_unusable(wrong: Any) -> None:
    rule = StoppingRule("m", "min", 1, 0.0)
    state = EarlyStopping(rule).state_dict() | wrong if isinstance(wrong, dict) else wrong
    scheduler = StepScheduler(StepSchedulerConfig(), stopping_rule=rule)
    saved = scheduler.state_dict() | {"early_stopping": state}
    with pytest.raises(CheckpointUnusable, match="step counters are invalid"):
        scheduler.load_state_dict(saved)
