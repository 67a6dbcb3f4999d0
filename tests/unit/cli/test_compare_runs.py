"""Two runs compared step by step."""

from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.cli.checks.selftest import compare
from automodel_ckpt.cli.train import main
from tests.support.runs.training import write_recipe


def step(number: int, **changes: Any) -> dict[str, Any]:
    state = {"model/w": "a", "optimizer/w.exp_avg": "b", "rng": "c"}
    made = {
        "step": number,
        "samples": [1, 2],
        "lr": (0.1).hex(),
        "loss": (2.0).hex(),
        "grad_norm": (1.0).hex(),
        "state": state,
        "has_dropout": False,
    }
    return made | changes


def run(*steps: dict[str, Any], num_ranks: int = 1) -> list[list[dict[str, Any]]]:
    return [list(steps) for _ in range(num_ranks)]


def test_the_first_difference_is_that_of_the_earliest_step_and_names_its_tensor() -> None:
    one = run(step(1), step(2), step(3))
    changed = step(2, state=step(2)["state"] | {"model/w": "x"})
    found = compare(one, run(step(1), changed, step(3, loss=(9.0).hex())), 1)
    assert found["verdict"] == "different"
    assert found["first_difference"] == {
        "step": 2,
        "rank": 0,
        "quantity": "model/w",
        "straight": "a",
        "resumed": "x",
    }


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        ({}, {"samples": [2, 1]}, "different"),
        ({}, {"loss": (2.0000000000000004).hex()}, "equal within tolerance"),
        ({}, {"loss": (2.1).hex()}, "different"),
        ({"has_dropout": True}, {"loss": (2.1).hex()}, "same samples"),
        ({"loss": "nan"}, {"loss": "nan"}, "equal within tolerance"),
        ({"loss": "nan"}, {}, "different"),
    ],
)
def test_on_other_ranks_samples_are_exact_and_losses_within_the_tolerance(
    one: dict[str, Any], other: dict[str, Any], verdict: str
) -> None:
    found = compare(run(step(1, **one)), run(step(1, **other), num_ranks=2), 1, 1e-3)
    assert found["verdict"] == verdict


def test_the_last_bit_and_the_number_of_steps_count_on_the_same_ranks() -> None:
    other = compare(run(step(1)), run(step(1, loss=(2.0000000000000004).hex())), 1)
    assert other["first_difference"]["resumed"] == "2.0000000000000004"
    shorter = compare(run(step(1), step(2)), run(step(1)), 1)
    assert shorter["first_difference"]["quantity"] == "number of steps"


def test_the_selftests_options_mean_nothing_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write_recipe(tmp_path)), "--selftest-steps", "3"]) == 2
    assert "--selftest-steps requires --selftest-resume" in capsys.readouterr().err
