"""Two runs compared step by step."""

from __future__ import annotations

from typing import Any

import pytest

from automodel_ckpt.cli.checks.compare_runs import compare_exactly, compare_loosely
from automodel_ckpt.cli.checks.selftest import check_selftest_options
from automodel_ckpt.config.overrides import parse
from automodel_ckpt.errors import RecipeError


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
    other = run(
        step(1), step(2, state=step(2)["state"] | {"model/w": "x"}), step(3, loss=(9.0).hex())
    )
    found = compare_exactly(one, other, 1)
    assert not found.is_good
    assert str(found.first_difference) == "step 2, rank 0, model/w: straight a, resumed x"
    assert [each.same for each in found.steps] == [True, False, False]


def test_the_last_bit_of_a_loss_counts_on_the_same_ranks_and_not_on_others() -> None:
    other = run(step(1, loss=(2.0000000000000004).hex()))
    exactly = compare_exactly(run(step(1)), other, 1)
    assert "resumed 2.0000000000000004" in str(exactly.first_difference)
    loosely = compare_loosely(run(step(1)), other * 2, 1, 1e-3)
    assert (loosely.is_good, loosely.verdict) == (True, "equal within tolerance")


def test_on_other_ranks_samples_are_exact_and_losses_within_the_tolerance_unless_there_is_dropout() -> (
    None
):
    assert not compare_loosely(run(step(1)), run(step(1, samples=[2, 1])), 1, 1e-3).is_good
    far = compare_loosely(run(step(1)), run(step(1, loss=(2.1).hex())), 1, 1e-3)
    assert not far.is_good
    assert far.largest["loss"] == pytest.approx(0.1 / 2.1)
    random = compare_loosely(
        run(step(1, has_dropout=True)), run(step(1, loss=(2.1).hex())) * 2, 1, 1e-3
    )
    assert (random.is_good, random.verdict) == (True, "same samples")


def test_a_run_that_ends_early_is_different_and_losses_that_are_no_numbers_are_equal() -> None:
    assert "number of steps" in str(
        compare_exactly(run(step(1), step(2)), run(step(1)), 1).first_difference
    )
    nan = run(step(1, loss="nan"))
    assert compare_loosely(nan, nan, 1, 1e-3).is_good
    assert not compare_loosely(nan, run(step(1)), 1, 1e-3).is_good


def test_the_selftests_options_mean_nothing_without_it() -> None:
    with pytest.raises(RecipeError, match="--selftest-steps requires --selftest-resume"):
        check_selftest_options(parse(["r.yaml", "--selftest-steps", "3"]))
    line = parse(["--selftest-steps=3", "r.yaml", "--selftest-resume"])
    check_selftest_options(line)
    assert (line.words, line.problems, line.modes["selftest_steps"]) == (["r.yaml"], [], ["3"])
    assert parse(["--selftest-steps"]).problems
