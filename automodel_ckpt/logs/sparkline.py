"""Draw the curves of a run as lines of text, which show on a terminal whether a loss falls."""

from __future__ import annotations

from collections.abc import Iterator

from automodel_ckpt.logs.charts import panels_of, short
from automodel_ckpt.logs.history import History, Series

_BARS = "▁▂▃▄▅▆▇█"


def curve_lines(run: History, width: int) -> Iterator[str]:
    """Yield a line for each curve that has a text title and values: title, sparkline, first and last value."""
    shown = []
    for panel in panels_of([run]):
        for curve in panel.curves:
            series = run.series.get(curve.field, Series())
            if curve.text_title and len(series):
                shown.append((curve.text_title, series))
    title_width = max([10, *(len(title) for title, _ in shown)])
    for title, series in shown:
        line = sparkline(series, width)
        first, last = series.values[0], series.values[-1]
        yield f"  {title:<{title_width}}  {line}  {short(first)} .. {short(last)}"


def sparkline(series: Series, width: int = 60) -> str:
    """Draw a series with at most *width* characters, from the lowest to the highest.

    Each character is the mean of an interval of steps. Returns an empty text for an empty series.
    """
    means = _means(series.values, width)
    if not means:
        return ""
    low, high = min(means), max(means)
    bars_per_unit = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    characters = []
    for mean in means:
        height = round((mean - low) * bars_per_unit)
        characters.append(_BARS[height])
    return "".join(characters)


def _means(values: tuple[float, ...], width: int) -> list[float]:
    """Divide *values* into at most *width* intervals of almost equal length, and return their means."""
    num_intervals = min(width, len(values))
    if num_intervals == 0:
        return []
    means = []
    end = 0
    for number in range(1, num_intervals + 1):
        start, end = end, number * len(values) // num_intervals
        interval = values[start:end]
        means.append(sum(interval) / len(interval))
    return means
