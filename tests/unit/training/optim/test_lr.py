"""Schedules over the planned steps, and what they refuse."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.optim.build import build_schedule, current_rate


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def rates(name: str, steps: int, **settings: Any) -> list[float]:
    sgd = optimizer()
    schedule = build_schedule(sgd, name, **settings)
    found = []
    for _ in range(steps):
        found.append(current_rate(sgd))
        sgd.step()
        schedule.step()
    return found


def test_a_warmup_may_begin_above_zero() -> None:
    found = rates("cosine", 11, total_steps=10, warmup_steps=4, warmup_from=0.2)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[5:] == rates("cosine", 11, total_steps=10, warmup_steps=4)[5:]


@pytest.mark.parametrize(
    ("total_steps", "decay_steps", "warmup"),
    [(9, None, 0), (28, None, 2), (28, 20, 2), (20_000, None, 1000)],
)
def test_an_automatic_warmup_is_a_tenth_of_the_run_and_at_most_1000_steps(
    total_steps: int, decay_steps: int | None, warmup: int
) -> None:
    settings: dict[str, Any] = {"total_steps": total_steps, "decay_steps": decay_steps}
    found = rates("linear", 4, warmup_steps="auto", **settings)
    assert found == rates("linear", 4, warmup_steps=warmup, **settings)
    with pytest.raises(RecipeError, match="requires the number of steps"):
        build_schedule(optimizer(), "constant_with_warmup", total_steps=None, warmup_steps="auto")


def test_a_warm_up_that_the_run_does_not_complete_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rates("linear", 1, total_steps=6, warmup_steps=5)
    assert not caplog.messages
    rates("linear", 1, total_steps=6, warmup_steps=6)
    assert "it warms up for 6 steps, and the run has 6" in caplog.messages[0]


def test_the_warm_up_may_be_a_part_of_all_steps_and_the_decay_shorter_than_the_run() -> None:
    found = rates("linear", 7, total_steps=100, warmup_ratio=0.5, decay_steps=4)
    assert found == [0, 0.5, 1, 0.5, 0, 0, 0]


@pytest.mark.parametrize("ratio", [0.03, 0.05, 0.1, 0.29, 0.3, 1 / 3])
def test_the_warm_up_of_a_ratio_has_the_steps_of_transformers(ratio: float) -> None:
    for total in (10, 29, 100, 1001):
        given: Any = SimpleNamespace(warmup_steps=ratio)
        count = TrainingArguments.get_warmup_steps(given, total)
        expected = rates("linear", count + 1, total_steps=total, warmup_steps=count)
        assert rates("linear", count + 1, total_steps=total, warmup_ratio=ratio) == expected
        assert expected[count] == 1 > expected[count - 1]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("cosine_with_restarts", None),
        ("polynomial", None),
        ("inverse_sqrt", None),
        ("cosine_with_min_lr", {"min_lr": 0.1}),
        ("cosine_warmup_with_min_lr", {"min_lr": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 3}),
    ],
)
def test_every_other_schedule_can_be_built(name: str, kwargs: dict[str, Any] | None) -> None:
    assert len(rates(name, 3, total_steps=10, warmup_steps=1, kwargs=kwargs)) == 3


@pytest.mark.parametrize(
    ("name", "settings", "what"),
    [
        ("cosine", {"total_steps": None}, "requires the number of steps"),
        ("constant", {"total_steps": None, "warmup_steps": 3}, "does not use warmup_steps"),
        ("constant", {"total_steps": 3, "warmup_from": 0.2}, "does not use warmup_from"),
        ("constant_with_warmup", {"total_steps": 9, "decay_steps": 3}, "does not use decay_steps"),
        ("cosine", {"total_steps": 9, "kwargs": {"cycles": 1}}, "cannot be computed"),
        ("constant_with_warmup", {"total_steps": 9, "kwargs": {"cycles": 1}}, "no argument cycles"),
        ("cosine", {"total_steps": 9, "kwargs": {"last_epoch": 3}}, "no argument last_epoch"),
        (
            "cosine",
            {"total_steps": 9, "warmup_steps": 3, "kwargs": {"num_cycles": "abc"}},
            "with these values",
        ),
        ("warmup_stable_decay", {"total_steps": 9}, "num_decay_steps"),
    ],
)
def test_what_a_schedule_cannot_use_is_refused(
    name: str, settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(RecipeError, match=what):
        build_schedule(optimizer(), name, **settings)
