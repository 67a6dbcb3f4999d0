"""The charts of a report, and the curves of a run as lines of text.

A new curve is a line in :data:`_FIELDS`; metrics of a run have charts without one. ``chart.svg.jinja`` draws a chart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from automodel_ckpt.checkpoint.files.type_aliases import TextDict
from automodel_ckpt.logs.history import BENCHMARK, VALIDATED, History, Series

_VALIDATION = "validation"
# Points per line, more than the pixels of its width.
_MAX_POINTS = 1000
NUM_COLORS = 6
"""The number of colors in the style sheet, which further runs repeat."""
# Steps of a moving average: at least so many, and this fraction of the longest run.
_LEAST_WINDOW, _WINDOWS = 5, 50
# The margin at each end of an axis, as a fraction of its range.
_MARGIN = 0.04
_MAX_PANELS = 96
# Fields that have no moving average.
_EXACT = frozenset({"lr", "mem"})
MARKS = {
    "best": ("◯", "LOWEST_VAL"),
    "saved": ("▲", "checkpoint"),
    "removed": ("△", "removed checkpoint"),
    "resumed": ("┆", "resumed"),
    "not_finite": ("▬", "loss not finite"),
}
"""Symbol and text of each kind of marks in the legend."""
_BARS = "▁▂▃▄▅▆▇█"
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Panel(NamedTuple):
    """A chart of the report: title, fields of :attr:`History.series` by label, and unit.

    With *from_zero*, the y axis contains 0.
    """

    title: str
    fields: TextDict
    unit: str = ""
    from_zero: bool = False


# Titles and units of the charts below the loss and the metrics, in their order.
_FIELDS = {
    "grad_norm": ("Gradient norm", ""),
    "lr": ("Learning rate", ""),
    "tps": ("Tokens/s", ""),
    "tps_per_gpu": ("Tokens/s per rank", ""),
    "mfu": ("MFU", "%"),
    "mem": ("Peak memory", " B"),
    "stall_seconds": ("Waited for saves", " s"),
}


class Line(NamedTuple):
    """A series to draw. *style* is ``line``, ``faint`` or ``dots``.

    *color* is the number of the run, or if there is only one, of the curve in its chart.
    """

    label: str
    color: int
    series: Series
    style: str

    def points(self) -> Iterator[tuple[int, float]]:
        """Yield the steps with their values."""
        return zip(self.series.steps, self.series.values, strict=True)


class Mark(NamedTuple):
    """An event of the run with the number *run*, from *step* to the step *last*. *value* is its y position, if any."""

    kind: str
    run: int
    step: int
    last: int
    value: float | None = None


class Chart(NamedTuple):
    """A chart with values: its lines, marks and axes."""

    panel: Panel
    lines: Sequence[Line]
    marks: Sequence[Mark]
    x: Scale
    y: Scale


def charts_of(runs: Sequence[History]) -> list[Chart]:
    """Return the charts of *runs* that contain values; the first one has the marks.

    All have the same range of steps, except for marks beyond it.
    """
    last = max((each.steps[-1] for run in runs for each in run.series.values() if each), default=1)
    window = max(_LEAST_WINDOW, last // _WINDOWS)
    charts: list[Chart] = []
    for panel in _panels_of(runs):
        lines = list(_lines_of(panel, runs, window))
        if lines:
            marks = [] if charts else list(_marks_of(runs))
            values = [value for line in lines for value in line.series.values]
            values += [mark.value for mark in marks if mark.value is not None]
            values += [0.0] * panel.from_zero
            x = Scale.of([1, last, *(mark.step for mark in marks), *(mark.last for mark in marks)])
            charts.append(Chart(panel, lines, marks, x, Scale.of(values)))
    return charts


def _panels_of(runs: Sequence[History]) -> list[Panel]:
    """Return all charts of *runs* in their order, the loss first, also charts without values."""
    fields = list(dict.fromkeys(field for run in runs for field in run.series))
    prefix = f"{VALIDATED}loss_"
    sets = [field.removeprefix(prefix) for field in fields if field.startswith(prefix)]
    suffixes = tuple(f"_{name}" for name in sets)
    measures = ["loss"]
    benchmarks = []
    for field in fields:
        if field.startswith(BENCHMARK):
            benchmarks.append(Panel(f"Benchmark {field.removeprefix(BENCHMARK)}", {"": field}))
        elif field not in _FIELDS:
            name = field.removeprefix(VALIDATED)
            is_of_set = name != field and name.endswith(suffixes)
            measures += [] if is_of_set or name in measures else [name]
    panels = []
    for measure in measures:
        title, field = measure.replace("_", " "), f"{VALIDATED}{measure}"
        of_sets = {f"{_VALIDATION}, {name}": f"{field}_{name}" for name in sets}
        curves = {"training": measure, _VALIDATION: field, **of_sets}
        panels.append(Panel(title[:1].upper() + title[1:], curves))
    # A file may come from anywhere: thousands of charts help no one.
    shown = [*panels, *benchmarks][:_MAX_PANELS]
    return shown + [
        Panel(title, {"": field}, unit, True) for field, (title, unit) in _FIELDS.items()
    ]


def _lines_of(panel: Panel, runs: Sequence[History], window: int) -> Iterator[Line]:
    for number, run in enumerate(runs):
        for curve, (label, field) in enumerate(panel.fields.items()):
            series = run.series.get(field)
            if not series:
                continue
            color = number if len(runs) > 1 else curve
            drawn = series.at_most(_MAX_POINTS)
            if label.startswith(_VALIDATION):
                yield Line(label, color, drawn, "dots")
            elif field in _EXACT or len(series) < 4 * window:
                yield Line(label or panel.title, color, drawn, "line")
            else:
                label = label or panel.title
                yield Line(f"{label}, each step", color, drawn, "faint")
                means = series.means(window, _MAX_POINTS)
                yield Line(f"{label}, mean of {window} steps", color, means, "line")


def _marks_of(runs: Sequence[History]) -> Iterator[Mark]:
    for number, run in enumerate(runs):
        for step in run.resumed_at:
            yield Mark("resumed", number, step, step)
        steps = enumerate(run.not_finite)
        for _, group in itertools.groupby(steps, lambda each: each[1] - each[0]):
            consecutive = [step for _, step in group]
            yield Mark("not_finite", number, consecutive[0], consecutive[-1])
        saved = {each.summary.step: each for each in run.checkpoints}
        for step in sorted(saved.keys() | run.series["stall_seconds"].steps):
            yield Mark("saved" if step in saved else "removed", number, step, step)
        for step, each in saved.items():
            if "LOWEST_VAL" in each.pointers and each.val_loss is not None:
                yield Mark("best", number, step, step, each.val_loss)


class Scale(NamedTuple):
    """Maps the values [low, high] to fractions of an axis."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Scale:
        """Return the scale of an axis that contains all *values* with a margin, but none below 0.

        Its range is never empty.
        """
        low, high = min(values), max(values)
        largest = max(abs(low), abs(high))
        margin = _MARGIN * (high - low)
        if high - low <= 1e-12 * largest:
            # All values are equal.
            margin = 0.05 * largest or 0.5
        return cls(low - margin if low else low, high + margin)

    def at(self, value: float) -> float:
        """Return the position of *value* as a fraction of the axis."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return round values within the range, 1, 2 or 5 times a power of ten apart."""
        least_distance = (self.high - self.low) / 7
        magnitude = 10.0 ** math.floor(math.log10(least_distance))
        # 0.999: rounding errors must not select the next larger distance
        factors = [each for each in (1, 2, 5) if each * magnitude >= 0.999 * least_distance]
        distance = (factors or [10])[0] * magnitude
        first = math.ceil(self.low / distance - 1e-9)
        last = math.floor(self.high / distance + 1e-9)
        return [number * distance for number in range(first, last + 1)]


def short(value: float, unit: str = "", digits: int = 4) -> str:
    """Format a value with at most *digits* digits: ``12k``, ``0.05``, ``2e-5``, with the unit `` B`` as ``12 kB``."""
    prefix = ""
    for divisor, letter in _UNITS:
        if divisor <= abs(value) < 1e15:
            value, prefix = value / divisor, letter
            break
    text = f"{value:.{digits}g}"
    if 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        text = f"{float(mantissa):g}e{int(exponent)}"
    return f"{text}{unit[:-1]}{prefix}{unit[-1:]}"


# ---------------------------------------------------------------- as text


def curve_lines(run: History, width: int) -> Iterator[str]:
    """Yield a line for each curve that has values: title, sparkline, first and last value."""
    shown = []
    for panel in _panels_of([run]):
        for label, field in panel.fields.items():
            if series := run.series.get(field):
                ends = [short(series.values[end], panel.unit) for end in (0, -1)]
                title = ", ".join(filter(None, (panel.title, label)))
                shown.append((title, _sparkline(series.values, width), " .. ".join(ends)))
    title_width = max((len(title) for title, _, _ in shown), default=0)
    for title, curve, text in shown:
        yield f"  {title:<{title_width}}  {curve}  {text}"


def _sparkline(values: Sequence[float], width: int) -> str:
    """Draw *values* with at most *width* characters; each one is the mean of an interval of steps."""
    count = min(width, len(values))
    bounds = [number * len(values) // count for number in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    bars_per_unit = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * bars_per_unit)] for mean in means)
