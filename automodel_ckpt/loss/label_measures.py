"""Measures of predicted labels and numbers, computed from sums that ranks and micro-batches add up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Sums = Mapping[str, Sequence[float]]


def f1_scores(sums: Sums) -> list[float | None]:
    """Compute the F1 score of each label: the harmonic mean of precision and recall.

    *sums* has ``num_correct``, ``num_predicted`` and ``num_labeled`` by label. A label that is neither predicted nor in
    the data has no score (None).
    """
    scores: list[float | None] = []
    counts = zip(
        sums.get("num_correct", ()),
        sums.get("num_predicted", ()),
        sums.get("num_labeled", ()),
        strict=True,
    )
    for correct, predicted, labeled in counts:
        total = predicted + labeled
        scores.append(2 * correct / total if total else None)
    return scores


def pearson(count: float, sums: Sums) -> float:
    """Compute Pearson's correlation of x and y, averaged over their columns; NaN if one of them does not vary.

    *sums* has by column the sums of x, y and their products over *count* samples: ``x``, ``y``, ``xx``, ``yy``, ``xy``.
    """
    if not count or "x" not in sums:
        return math.nan
    values = []
    names = ("x", "y", "xx", "yy", "xy")
    for x, y, xx, yy, xy in zip(*(sums[name] for name in names), strict=True):
        # The variances and the covariance, all times count.
        variance_x = xx - x * x / count
        variance_y = yy - y * y / count
        covariance = xy - x * y / count
        spread = variance_x * variance_y
        values.append(covariance / math.sqrt(spread) if spread > 0 else math.nan)
    return sum(values) / len(values)
