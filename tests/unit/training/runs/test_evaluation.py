"""The totals of a validation set: sums of metrics over batches and ranks, and the measures made of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.training.measure.evaluation import sum_by_name
from automodel_ckpt.training.measure.validation_metrics import rising_measure
from tests.support import ranks


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


@pytest.mark.parametrize(
    ("metric", "rises"),
    [("val_accuracy", True), ("val_accuracy_few", True), ("val_loss_accuracy", False)],
)
def test_a_named_set_has_the_direction_of_its_measure(metric: str, rises: bool) -> None:
    assert (rising_measure(metric) is not None) == rises
