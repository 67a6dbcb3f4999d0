"""Ranks that were started with different recipes or data are refused before training."""

import os
from pathlib import Path

import pytest

from automodel_ckpt.errors import RecipeError
from tests.support import ranks
from tests.support.runs.training import train, write_recipe


def rows(number: int, here: str) -> list[dict[str, list[int]]]:
    """A number of samples; on rank 1, one sample less where *here* says so."""
    if here == "fewer" and os.environ["RANK"] == "1":
        number -= 1
    return [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]}] * number


CASES = {
    "recipe": [
        "rank 1: this rank has another recipe, or other software, than rank 0",
        "optimizer.lr: 0.005, not 0.01",
        "seed: 8, not 7",
    ],
    "data": [
        "the ranks do not have the same data: their data sets are not equally long",
        "44 samples on rank 0, 43 on rank 1",
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_with_another_recipe_or_data_are_refused_on_all(tmp_path: Path, name: str) -> None:
    recipe = write_recipe(tmp_path)
    here = "fewer" if name == "data" else "same"
    data = f"--dataset={{_target_: {__name__}.rows, number: 44, here: {here}}}"

    def training() -> None:
        is_other = name == "recipe" and os.environ["RANK"] == "1"
        words = ["--optimizer.lr=5e-3", "--seed=8"] if is_other else []
        train(recipe, data, "--checkpoint.enabled=false", *words)

    first, second = ranks.outcomes(training, 2, init=False)
    assert isinstance(first.error, RecipeError) and str(first.error) == str(second.error)
    for piece in CASES[name]:
        assert piece in str(first.error)
