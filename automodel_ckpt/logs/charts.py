"""The charts of a report: which lines and marks each one contains, and their drawing as SVG text.

A new curve is a line in :data:`_FIELDS`; metrics of a run have charts without one. Colors are classes: the style sheet
of the page defines them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from automodel_ckpt.logs.history import BENCHMARK, VALIDATED, History, Series

# In units of the view box. page.js contains the left and right edges, too.
_WIDTH, _HEIGHT = 860, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, _WIDTH - 14, 14, _HEIGHT - 30
MAX_POINTS = 1600
"""Points per line: about two for each unit of the width."""
NUM_COLORS = 6
"""The number of colors in the style sheet, which further runs repeat."""
_SMOOTHED_POINTS = 200
"""Series with at least so many points are drawn faint, with their moving average."""
_MAX_MARK_ROWS = 12
_MAX_CIRCLES = 60
"""Lines with more points get no circles."""
_MARGIN = 0.04
"""The margin at each end of an axis, as a fraction of its range."""
_SYMBOLS = {
    "dots": "┄ validation",
    "saved": "▲ checkpoint",
    "best": "◯ LOWEST_VAL",
    "resumed": "┆ resumed",
}
"""The legend. Faint lines need no entry: the pointer shows their labels."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A field of :attr:`History.series` to draw. *label* follows the name of the run; *dots* is a dashed line.

    *text_title* is its title on a terminal; curves without one are not shown there. A *smoothed* curve shows its moving
    average if it is long.
    """

    field: str
    text_title: str = ""
    label: str = ""
    dots: bool = False
    smoothed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of the report: its *title* and *curves*; with *from_zero*, the y axis contains 0."""

    title: str
    curves: Sequence[Curve]
    from_zero: bool = True
    has_marks: bool = False


_FIELDS = (
    Panel("Gradient norm", [Curve("grad_norm", "grad norm", smoothed=True)], from_zero=False),
    Panel("Learning rate", [Curve("lr", "lr")]),
    Panel("Throughput, tokens per second", [Curve("tps", "tok/s", smoothed=True)]),
    Panel(
        "Throughput of each rank, tokens per second",
        [Curve("tps_per_gpu", smoothed=True)],
    ),
    Panel("MFU, percent", [Curve("mfu", "MFU %", smoothed=True)]),
    Panel("Peak memory of rank 0, bytes", [Curve("mem", "memory")]),
    Panel("Training waited for saves, seconds", [Curve("stall_seconds")]),
)
"""The charts below those of the loss and of the metrics, in their order."""


def panels_of(runs: Sequence[History]) -> list[Panel]:
    """Return all charts of *runs* in their order, also those without values."""
    set_names = dict.fromkeys(name for run in runs for name in run.set_names)
    measures = dict.fromkeys(name for run in runs for name in run.measures)
    benchmarks = dict.fromkeys(name for run in runs for name in run.benchmarks)
    panels = [_measure_panel(name, set_names) for name in ("loss", *measures)]
    for field in benchmarks:
        title = field.removeprefix(BENCHMARK)
        panels.append(Panel(f"Benchmark {title}", [Curve(field, title, dots=True)], False))
    return [*panels, *_FIELDS]


def _measure_panel(measure: str, set_names: Iterable[str]) -> Panel:
    """The chart of the loss or of a metric, in training and on each validation set."""
    title = measure.replace("_", " ")
    field = f"{VALIDATED}{measure}"
    curves = [
        Curve(measure, title, smoothed=True),
        Curve(field, f"val {title}", "validation", dots=True),
    ]
    for name in set_names:
        curves.append(Curve(f"{field}_{name}", name, f"validation, {name}", dots=True))
    has_marks = measure == "loss"
    return Panel(title[:1].upper() + title[1:], curves, False, has_marks)


@dataclass(frozen=True, slots=True)
class Line:
    """A series to draw. *run* is the number of its color; *style* is ``line``, ``faint`` or ``dots``."""

    label: str
    run: int
    series: Series
    style: str


@dataclass(frozen=True, slots=True)
class Mark:
    """An event at a step. *kind* is ``saved``, ``best`` or ``resumed``; *value* is its y position, if any."""

    kind: str
    run: int
    step: int
    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with values: its drawing, and what :func:`legend_of` explains."""

    title: str
    lines: Sequence[Line]
    marks: Sequence[Mark]
    svg: str


def charts_of(runs: Sequence[History]) -> list[Chart]:
    """Return the charts of *runs* that contain values. All have the same range of steps, except for marks beyond it."""
    last = max(
        (series.steps[-1] for run in runs for series in run.series.values() if len(series)),
        default=1,
    )
    charts = []
    for panel in panels_of(runs):
        lines = list(_lines_of(panel, runs))
        if lines:
            marks = list(_marks_of(runs)) if panel.has_marks else []
            charts.append(Chart(panel.title, lines, marks, _svg(panel, lines, marks, last)))
    return charts


def legend_of(charts: Sequence[Chart]) -> list[str]:
    """Describe the lines and marks that the *charts* contain."""
    found = {line.style for chart in charts for line in chart.lines}
    found |= {mark.kind for chart in charts for mark in chart.marks}
    return [text for kind, text in _SYMBOLS.items() if kind in found]


def _lines_of(panel: Panel, runs: Sequence[History]) -> Iterator[Line]:
    for number, run in enumerate(runs):
        for curve in panel.curves:
            series = run.series.get(curve.field, Series())
            if not len(series):
                continue
            label = f"{run.name}, {curve.label}" if curve.label else run.name
            if curve.smoothed and len(series) >= _SMOOTHED_POINTS:
                yield Line(f"{label}, each step", number, series, "faint")
                yield Line(f"{label}, smoothed", number, series.smoothed(), "line")
            else:
                yield Line(label, number, series, "dots" if curve.dots else "line")


def _marks_of(runs: Sequence[History]) -> Iterator[Mark]:
    for number, run in enumerate(runs):
        for step in run.resumed_at:
            yield Mark("resumed", number, step, f"{run.name}: resumed from step {step}")
        for checkpoint in run.checkpoints:
            text = f"{run.name}: checkpoint {checkpoint.name}"
            yield Mark("saved", number, checkpoint.step, text)
            if "LOWEST_VAL" in checkpoint.pointers and checkpoint.val_loss is not None:
                text = f"{run.name}: LOWEST_VAL, {checkpoint.name}"
                yield Mark("best", number, checkpoint.step, text, checkpoint.val_loss)


def _svg(panel: Panel, lines: Sequence[Line], marks: Sequence[Mark], last: int) -> str:
    """Draw a chart; its width follows the width of the page."""
    x_scale = Scale.of([1, last, *(mark.step for mark in marks)], _LEFT, _RIGHT)
    values = [value for line in lines for value in line.series.values]
    values += [mark.value for mark in marks if mark.value is not None]
    y_scale = Scale.of(values, _BOTTOM, _TOP, from_zero=panel.from_zero)
    opening = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" tabindex="0" aria-label="{escape(panel.title)}" '
        f'data-low="{x_scale.low!r}" data-high="{x_scale.high!r}">'
    )
    elements = [opening, *_grid(x_scale, y_scale)]
    for line in lines:
        elements += _line(line, x_scale, y_scale)
    elements += [_mark(mark, x_scale, y_scale) for mark in marks]
    elements.append(f'<line class="cursor" y1="{_TOP}" y2="{_BOTTOM}" x1="-9" x2="-9"/>')
    return "\n".join([*elements, "</svg>"])


def _grid(x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    for value in y_scale.ticks():
        y = y_scale(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick up" x="{_LEFT - 8}" y="{y + 4:.1f}">{short(value)}</text>'
    for step in x_scale.ticks(8):
        if step == int(step):
            x = f"{x_scale(step):.1f}"
            yield f'<text class="tick" x="{x}" y="{_HEIGHT - 10}" text-anchor="middle">{short(step)}</text>'


def _mark(mark: Mark, x_scale: Scale, y_scale: Scale) -> str:
    """Draw a resume as a vertical line, a checkpoint as a triangle on the x axis, the best one as a circle."""
    x = f"{x_scale(mark.step):.1f}"
    if mark.value is not None:
        shape = f'circle cx="{x}" cy="{y_scale(mark.value):.1f}" r="6"'
    elif mark.kind == "saved":
        shape = f'path d="M{x} {_BOTTOM - 7 * (mark.run % _MAX_MARK_ROWS) - 7}l4 7h-8z"'
    else:
        shape = f'line x1="{x}" x2="{x}" y1="{_TOP}" y2="{_BOTTOM}"'
    name, _, rest = shape.partition(" ")
    color = f"c{mark.run % NUM_COLORS}"
    return f'<{name} class="{mark.kind} {color}" {rest}><title>{escape(mark.text)}</title></{name}>'


def _line(line: Line, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    series = line.series.at_most(MAX_POINTS)
    points = []
    for step, value in zip(series.steps, series.values, strict=True):
        points.append((f"{x_scale(step):.1f}", f"{y_scale(value):.1f}"))
    color = f"c{line.run % NUM_COLORS}"
    style = "line dashed" if line.style == "dots" else line.style
    yield f'<polyline class="{style} {color}" points="{" ".join(map(",".join, points))}"/>'
    if len(points) == 1 or (line.style == "dots" and len(points) <= _MAX_CIRCLES):
        for x, y in points:
            yield f'<circle class="dot {color}" cx="{x}" cy="{y}" r="3"/>'


@dataclass(frozen=True, slots=True)
class Scale:
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
        largest = max(abs(low), abs(high), 1e-300)
        if high - low < 1e-12 * largest:
            # All values are equal.
            margin = 0.05 * largest if largest > 1e-300 else 0.5
        else:
            margin = _MARGIN * (high - low)
        starts_at_zero = from_zero and low == 0.0 < high
        return cls(low if starts_at_zero else low - margin, high + margin, start, stop)

    def __call__(self, value: float) -> float:
        fraction = (value - self.low) / (self.high - self.low)
        return self.start + fraction * (self.stop - self.start)

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
    for limit, divisor, unit in (
        (1e12, 1e12, "T"),
        (1e9, 1e9, "G"),
        (1e6, 1e6, "M"),
        (1e4, 1e3, "k"),
    ):
        if limit <= abs(value) < 1e15:
            return f"{value / divisor:.4g}{unit}"
    return f"{value:.4g}"
