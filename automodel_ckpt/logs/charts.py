"""The charts of a report, and the curves of a run as lines of text.

A new curve is a line in :data:`_FIELDS`; metrics of a run have charts without one. ``chart.svg.jinja`` draws a chart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from automodel_ckpt.logs.history import BENCHMARK, VALIDATED, History, Series

# In units of the view box. page.js contains the left and right edges, too.
WIDTH, HEIGHT = 860, 250
LEFT, RIGHT, TOP, BOTTOM = 62, WIDTH - 14, 14, HEIGHT - 30
_MAX_POINTS = 1600
"""Points per line: about two for each unit of the width."""
NUM_COLORS = 6
"""The number of colors in the style sheet, which further runs repeat."""
_SMOOTHED_POINTS = 200
"""Series with at least so many points are drawn faint, with their moving average."""
_MARGIN = 0.04
"""The margin at each end of an axis, as a fraction of its range."""
_MAX_PANELS = 96
LEGEND = ("┄ validation", "▲ checkpoint", "◯ LOWEST_VAL", "┆ resumed")
"""The legend. Faint lines need no entry: the pointer shows their labels."""
_BARS = "▁▂▃▄▅▆▇█"
_UNITS = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))


class Curve(NamedTuple):
    """A field of :attr:`History.series` to draw. *label* follows the name of the run; *dots* is a dashed line.

    *text_title* is its title on a terminal; curves without one are not shown there. A *smoothed* curve shows its moving
    average if it is long.
    """

    field: str
    text_title: str = ""
    label: str = ""
    dots: bool = False
    smoothed: bool = False


class Panel(NamedTuple):
    """A chart of the report: its *title* and *curves*; with *from_zero*, the y axis contains 0."""

    title: str
    curves: Sequence[Curve]
    from_zero: bool = True


_FIELDS = (
    Panel("Gradient norm", [Curve("grad_norm", "grad norm", smoothed=True)], from_zero=False),
    Panel("Learning rate", [Curve("lr", "lr")]),
    Panel("Throughput, tokens per second", [Curve("tps", "tok/s", smoothed=True)]),
    Panel("Throughput of each rank, tokens per second", [Curve("tps_per_gpu", smoothed=True)]),
    Panel("MFU, percent", [Curve("mfu", "MFU %", smoothed=True)]),
    Panel("Peak memory of rank 0, bytes", [Curve("mem", "memory")]),
    Panel("Training waited for saves, seconds", [Curve("stall_seconds")]),
)
"""The charts below the loss and the metrics, in their order."""


class Line(NamedTuple):
    """A series to draw. *run* is the number of its color; *style* is ``line``, ``faint`` or ``dots``."""

    label: str
    run: int
    series: Series
    style: str


class Mark(NamedTuple):
    """An event at a step. *kind* is ``saved``, ``best`` or ``resumed``; *value* is its y position, if any."""

    kind: str
    run: int
    step: int
    text: str
    value: float | None = None


class Chart(NamedTuple):
    """A chart with values: its lines, marks and axes."""

    title: str
    lines: Sequence[Line]
    marks: Sequence[Mark]
    x: Scale
    y: Scale

    def points(self, line: Line) -> list[tuple[str, str]]:
        """Return the positions of the points of a line."""
        series = line.series
        return [
            (self.x.at(step), self.y.at(value))
            for step, value in zip(series.steps, series.values, strict=True)
        ]


def charts_of(runs: Sequence[History]) -> list[Chart]:
    """Return the charts of *runs* that contain values. All have the same range of steps, except for marks beyond it."""
    last = max((each.steps[-1] for run in runs for each in run.series.values() if each), default=1)
    charts = []
    for number, panel in enumerate(_panels_of(runs)):
        lines = list(_lines_of(panel, runs))
        if not lines:
            continue
        # The first panel has the loss.
        marks = list(_marks_of(runs)) if number == 0 else []
        values = [value for line in lines for value in line.series.values]
        values += [mark.value for mark in marks if mark.value is not None]
        x = Scale.of([1, last, *(mark.step for mark in marks)], LEFT, RIGHT)
        y = Scale.of(values, BOTTOM, TOP, from_zero=panel.from_zero)
        charts.append(Chart(panel.title, lines, marks, x, y))
    return charts


def _panels_of(runs: Sequence[History]) -> list[Panel]:
    """Return all charts of *runs* in their order, the loss first, also charts without values."""
    fields = list(dict.fromkeys(field for run in runs for field in run.series))
    prefix = f"{VALIDATED}loss_"
    sets = [field.removeprefix(prefix) for field in fields if field.startswith(prefix)]
    known = {curve.field for panel in _FIELDS for curve in panel.curves}
    suffixes = tuple(f"_{name}" for name in sets)
    measures = ["loss"]
    benchmarks = []
    for field in fields:
        if field.startswith(BENCHMARK):
            title = field.removeprefix(BENCHMARK)
            benchmarks.append(Panel(f"Benchmark {title}", [Curve(field, title, dots=True)], False))
        elif field not in known:
            name = field.removeprefix(VALIDATED)
            is_of_set = name != field and name.endswith(suffixes)
            measures += [] if is_of_set or name in measures else [name]
    panels = []
    for measure in measures:
        title, field = measure.replace("_", " "), f"{VALIDATED}{measure}"
        curves = [
            Curve(measure, title, smoothed=True),
            Curve(field, f"val {title}", "validation", dots=True),
            *(Curve(f"{field}_{name}", name, f"validation, {name}", dots=True) for name in sets),
        ]
        panels.append(Panel(title[:1].upper() + title[1:], curves, False))
    # A file may come from anywhere: thousands of charts help no one.
    return [*[*panels, *benchmarks][:_MAX_PANELS], *_FIELDS]


def _lines_of(panel: Panel, runs: Sequence[History]) -> Iterator[Line]:
    for number, run in enumerate(runs):
        for curve in panel.curves:
            series = run.series.get(curve.field)
            if not series:
                continue
            label = f"{run.name}, {curve.label}" if curve.label else run.name
            drawn = series.at_most(_MAX_POINTS)
            if curve.smoothed and len(series) >= _SMOOTHED_POINTS:
                yield Line(f"{label}, each step", number, drawn, "faint")
                smoothed = series.smoothed().at_most(_MAX_POINTS)
                yield Line(f"{label}, smoothed", number, smoothed, "line")
            else:
                yield Line(label, number, drawn, "dots" if curve.dots else "line")


def _marks_of(runs: Sequence[History]) -> Iterator[Mark]:
    for number, run in enumerate(runs):
        for step in run.resumed_at:
            yield Mark("resumed", number, step, f"{run.name}: resumed from step {step}")
        for each in run.checkpoints:
            step = each.summary.step
            yield Mark("saved", number, step, f"{run.name}: checkpoint {each.name}")
            if "LOWEST_VAL" in each.pointers and each.val_loss is not None:
                yield Mark(
                    "best", number, step, f"{run.name}: LOWEST_VAL, {each.name}", each.val_loss
                )


class Scale(NamedTuple):
    """Maps the values [low, high] to the positions [start, stop]; positions may descend."""

    low: float
    high: float
    start: float
    stop: float

    @classmethod
    def of(
        cls, values: Sequence[float], start: float, stop: float, *, from_zero: bool = False
    ) -> Scale:
        """Return the scale of an axis that contains all *values* with a margin; its range is never empty.

        With *from_zero*, it contains 0, without a margin below.
        """
        low, high = min(values), max(values)
        if from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        largest = max(abs(low), abs(high))
        margin = _MARGIN * (high - low)
        if high - low <= 1e-12 * largest:
            # All values are equal.
            margin = 0.05 * largest or 0.5
        starts_at_zero = from_zero and low == 0.0 < high
        return cls(low if starts_at_zero else low - margin, high + margin, start, stop)

    def at(self, value: float) -> str:
        """Return the position of *value*, for an attribute of an element."""
        fraction = (value - self.low) / (self.high - self.low)
        return f"{self.start + fraction * (self.stop - self.start):.1f}"

    def ticks(self, about: int = 5) -> list[float]:
        """Return round values within the range, 1, 2 or 5 times a power of ten apart."""
        least_distance = (self.high - self.low) / about
        magnitude = 10.0 ** math.floor(math.log10(least_distance))
        # 0.999: rounding errors must not select the next larger distance
        factors = [each for each in (1, 2, 5) if each * magnitude >= 0.999 * least_distance]
        distance = (factors or [10])[0] * magnitude
        first = math.ceil(self.low / distance - 1e-9)
        last = math.floor(self.high / distance + 1e-9)
        return [number * distance for number in range(first, last + 1)]


def short(value: float) -> str:
    """Format the label of a tick: ``12k``, ``0.05``, ``2e-05``."""
    for limit, divisor, unit in _UNITS:
        if limit <= abs(value) < 1e15:
            return f"{value / divisor:.4g}{unit}"
    return f"{value:.4g}"


# ---------------------------------------------------------------- as text


def curve_lines(run: History, width: int) -> Iterator[str]:
    """Yield a line for each curve that has a text title and values: title, sparkline, first and last value."""
    curves = [curve for panel in _panels_of([run]) for curve in panel.curves if curve.text_title]
    shown = [
        (curve.text_title, run.series[curve.field])
        for curve in curves
        if run.series.get(curve.field)
    ]
    title_width = max([10, *(len(title) for title, _ in shown)])
    for title, series in shown:
        ends = f"{short(series.values[0])} .. {short(series.values[-1])}"
        yield f"  {title:<{title_width}}  {_sparkline(series.values, width)}  {ends}"


def _sparkline(values: Sequence[float], width: int) -> str:
    """Draw *values* with at most *width* characters; each one is the mean of an interval of steps."""
    count = min(width, len(values))
    bounds = [number * len(values) // count for number in range(count + 1)]
    means = []
    for start, end in itertools.pairwise(bounds):
        means.append(sum(values[start:end]) / (end - start))
    low, high = min(means), max(means)
    bars_per_unit = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * bars_per_unit)] for mean in means)
