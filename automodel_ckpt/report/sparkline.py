"""A series as a few characters: enough to see on a terminal whether a loss falls."""

from __future__ import annotations

from itertools import pairwise

from automodel_ckpt.report.history import Series

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*%#"


def sparkline(series: Series, width: int = 60, bars: str = BARS) -> str:
    """At most *width* characters, the lowest of *bars* first, each the mean of an interval of steps; empty for an empty
    series."""
    means = _means(series.values, width)
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    heights = [round((mean - low) * scale) for mean in means]
    return "".join(bars[height] for height in heights)


def _means(values: tuple[float, ...], width: int) -> list[float]:
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)] if count else [0]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
