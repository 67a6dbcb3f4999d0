"""The totals of a validation set: sums of metrics over batches and ranks, and the measures made of them."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.training.measure.evaluation import EvaluationSums, EvaluationTotals, sum_by_name
from automodel_ckpt.training.measure.validation_metrics import measures_of, rising_measure
from automodel_ckpt.training.parts.objective import Objective
from tests.support import ranks


def test_metrics_of_any_shape_are_added_up_by_name() -> None:
    sums = EvaluationSums(torch.device("cpu"))
    sums.add("hit", torch.tensor(1))
    sums.add("hit", 2.5)
    sums.add("by_class", torch.tensor([1.0, 0.0]))
    sums.add("by_class", torch.tensor([1.0, 3.0]))
    assert sums.read() == {"hits": [0.0], "hit": [3.5], "by_class": [2.0, 3.0]}


def sums_of_a_rank(directory: Path) -> None:
    rank = torch.distributed.get_rank()
    here: dict[str, Any] = {"both": [1.0, float(rank)]}
    if rank == 1:
        here["one"] = [4.0]
    found = sum_by_name(torch.distributed.group.WORLD, here)
    (directory / f"{rank}").write_text(repr(sorted(found.items())))


def test_a_rank_may_lack_a_metric_that_another_has(tmp_path: Path) -> None:
    ranks.run(partial(sums_of_a_rank, tmp_path), 2)
    expected = repr([("both", [2.0, 1.0]), ("one", [4.0])])
    assert [(tmp_path / rank).read_text() for rank in "01"] == [expected, expected]


class Recall(Objective):
    terms = "samples"
    measures = ("recall", "margin")

    def summarize(self, totals: EvaluationTotals) -> dict[str, float]:
        found, wanted = totals.sums["found"]
        return {"recall": found / wanted, "margin": totals.mean("margin")}


def test_an_objective_computes_its_measures_from_the_totals() -> None:
    objective = object.__new__(Recall)
    sums = {"found": [3.0, 4.0], "margin": [5.0]}
    measured = objective.summarize(EvaluationTotals(1.0, 10, 70, sums))
    assert measured == {"recall": 0.75, "margin": 0.5}
    assert measures_of(Recall, None) == ("loss", "recall", "margin")
    empty = EvaluationTotals(0.0, 0, 0, sums)
    assert math.isnan(empty.mean("margin")) and math.isnan(empty.mean_loss)


@pytest.mark.parametrize(
    ("metric", "rises"),
    [("val_accuracy", True), ("val_accuracy_few", True), ("val_loss_accuracy", False)],
)
def test_a_named_set_has_the_direction_of_its_measure(metric: str, rises: bool) -> None:
    assert (rising_measure(metric) is not None) == rises
