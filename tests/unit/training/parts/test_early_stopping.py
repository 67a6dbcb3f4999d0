"""When a metric counts as improved, and what a saved state of early stopping may contain."""

from __future__ import annotations

import math
from typing import Any

import pytest

from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.training.counters.cadence import Cadence
from automodel_ckpt.training.counters.early_stopping import EarlyStopping, StoppingRule
from automodel_ckpt.training.counters.step_scheduler import StepScheduler


def ends_at(values: list[float | None], **rule: Any) -> int | None:
    """The number of the validation that ends the run; None if it goes on."""
    stopping = EarlyStopping(StoppingRule(**{"metric": "m", "mode": "min", "patience": 2} | rule))
    for number, value in enumerate(values, 1):
        stopping.note(number, {"m": value, "other": 0.0})
        restored = EarlyStopping(stopping.rule)
        restored.load_state_dict(stopping.state_dict())
        assert restored.state_dict() == stopping.state_dict()
        if stopping.is_over:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "rule", "expected"),
    [
        ([3, 2, 1, 0.5], {}, None),
        ([3, 3, 3], {}, 3),
        ([3, 4, 2, 3, 2], {}, 5),
        ([3, 2.95, 2.85, 2.8], {"min_delta": 0.1}, None),
        ([3, 2.95, 2.91, 2.0], {"min_delta": 0.1}, 3),
        ([1, 2, 3], {"mode": "max"}, None),
        ([3, 2, 1], {"mode": "max"}, 3),
        ([3, 3], {"patience": 1}, 2),
        ([math.nan, math.nan, 1], {}, 2),
        ([math.inf, math.inf, 1], {"mode": "max"}, 2),
        ([1, None, None, None, 2, 2], {}, 6),
    ],
)
def test_it_ends_after_validations_that_did_not_improve_the_metric(
    values: list[float | None], rule: dict[str, Any], expected: int | None
) -> None:
    assert ends_at(values, **{"min_delta": 0.0} | rule) == expected


def test_another_metric_begins_to_count_again() -> None:
    stopping = EarlyStopping(StoppingRule("m", "min", 1, 0.0))
    stopping.note(1, {"m": 1.0})
    stopping.note(2, {"m": 1.0})
    for rule in (StoppingRule("n", "min", 1, 0.0), StoppingRule("m", "max", 1, 0.0)):
        other = EarlyStopping(rule)
        other.load_state_dict(stopping.state_dict())
        assert other.best is None and not other.is_over


def test_it_states_why_the_run_ended() -> None:
    stopping = EarlyStopping(StoppingRule("val_loss", "min", 1, 0.5))
    stopping.note(4, {"val_loss": 2.0})
    stopping.note(6, {"val_loss": 1.75})
    expected = "early stopping: val_loss did not improve by more than 0.5 on 2 of step 4 in the last validation"
    assert stopping.reason() == expected


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
    scheduler = StepScheduler(Cadence(early_stopping=rule))
    saved = scheduler.state_dict() | {"early_stopping": state}
    with pytest.raises(CheckpointUnusable, match="step counters are invalid"):
        scheduler.load_state_dict(saved)
