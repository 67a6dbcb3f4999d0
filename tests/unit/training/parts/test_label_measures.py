"""Measures of predictions, as scikit-learn and scipy compute them (tests/fixtures/classification)."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.loss.causal import cross_entropy_sum
from automodel_ckpt.parallel.mesh_sizes import RankLayout, Sizes
from automodel_ckpt.recipes.sequence_classification import OBJECTIVES, SampleObjective
from automodel_ckpt.training.model.trainable import Trainable
from automodel_ckpt.training.values.records import EvaluationTotals

RECORDED = json.loads(
    (Path(__file__).parents[3] / "fixtures/classification/measures.json").read_text()
)
NUM_LABELS = 6


def objective_of(problem: str) -> SampleObjective:
    layout = RankLayout(0, Sizes(), 0, torch.device("cpu"), None)  # type: ignore[arg-type]
    trainable = Trainable(torch.nn.Linear(1, 1))
    return OBJECTIVES[problem](trainable, layout, cross_entropy_sum)


def logits_of(problem: str, predicted: list[Any]) -> torch.Tensor:
    if problem == "single_label":
        return torch.nn.functional.one_hot(torch.tensor(predicted), NUM_LABELS).float()
    if problem == "multi_label":
        return torch.tensor(predicted).float() - 0.5
    return torch.tensor(predicted).float()[:, None]


def summary(problem: str, recorded: dict[str, Any], size: int = 2) -> dict[str, float]:
    """The measures of predictions that come in micro-batches of *size* samples."""
    objective = objective_of(problem)
    logits = logits_of(problem, recorded["predicted"])
    targets = torch.tensor(recorded["wanted"]).float().reshape(len(logits), -1)
    with objective.evaluating() as sums:
        for start in range(0, len(logits), size):
            part = slice(start, start + size)
            for name, value in objective.measured(logits[part], targets[part]).items():
                sums.add(name, value)
    totals = EvaluationTotals(0.0, len(logits), 0, sums.read())
    return objective.summarize(totals)


@pytest.mark.parametrize("problem", list(RECORDED))
def test_measures_are_those_of_scikit_learn(problem: str) -> None:
    recorded = RECORDED[problem]
    found = summary(problem, recorded)
    expected = {name: value for name, value in recorded.items() if name in found}
    assert set(expected) == set(OBJECTIVES[problem].measures or ())
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("problem", list(RECORDED))
def test_an_empty_set_has_no_measures(problem: str) -> None:
    values = objective_of(problem).summarize(EvaluationTotals(0.0, 0, 0, {}))
    assert all(math.isnan(value) for value in values.values())


def test_a_constant_prediction_has_no_correlation() -> None:
    recorded = {"predicted": [2.0, 2.0, 2.0], "wanted": [1.0, 2.0, 3.0]}
    found = summary("regression", recorded)
    assert math.isnan(found["pearson"])
    assert found["mse"] == pytest.approx(2 / 3)
