"""The charts of a report: which lines and marks each one contains, the ranges of its axes, and the legend.

The charts are computed once, and independently of their format: :mod:`~automodel_ckpt.logs.svg` draws them for the
HTML page, and :mod:`~automodel_ckpt.logs.sparkline` as text. A new curve is a line in :data:`PANELS`; metrics of a
run have charts without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from automodel_ckpt.logs.history import BENCHMARK, NAMED_LOSS, VALIDATED, History, Series
from automodel_ckpt.logs.scale import padded_range

_SMOOTHED_POINTS = 200
"""Series with at least so many points are drawn faint, with their moving average."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A field of :attr:`History.series` to draw.

    *style* is ``line`` or ``dots``. *label* follows the name of the run. *text_title* is its title on a
    terminal; curves without one are not shown there. A *smoothed* curve shows its moving average if it is long.
    """

    field: str
    style: str = "line"
    label: str = ""
    text_title: str = ""
    smoothed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of the report: its *title* and *curves*; with *from_zero*, the y axis contains 0.

    The fields of named validation sets in this chart begin with *named_sets*; empty: it has none.
    """

    title: str
    curves: Sequence[Curve]
    from_zero: bool = False
    has_marks: bool = False
    named_sets: str = ""

    def curves_of(self, run: History) -> Iterator[Curve]:
        """Yield the curves of this chart, including those of the named validation sets of *run*."""
        yield from self.curves
        if not self.named_sets:
            return
        for name in run.set_names:
            field = f"{self.named_sets}{name}"
            yield Curve(field, "dots", f"validation, {name}", text_title=name)


LOSS = Panel(
    "Loss",
    (
        Curve("loss", text_title="loss", smoothed=True),
        Curve("val_loss", "dots", "validation", text_title="validation"),
    ),
    has_marks=True,
    named_sets=NAMED_LOSS,
)

PANELS: Sequence[Panel] = (
    Panel("Gradient norm", (Curve("grad_norm", text_title="grad norm", smoothed=True),)),
    Panel("Learning rate", (Curve("lr", text_title="lr"),), from_zero=True),
    Panel(
        "Throughput, tokens per second",
        (Curve("tps", text_title="tok/s", smoothed=True),),
        from_zero=True,
    ),
    Panel(
        "Throughput of each rank, tokens per second",
        (Curve("tps_per_gpu", smoothed=True),),
        from_zero=True,
    ),
    Panel("MFU, percent", (Curve("mfu", text_title="MFU %", smoothed=True),), from_zero=True),
    Panel("Peak memory of rank 0, bytes", (Curve("mem", text_title="memory"),), from_zero=True),
    Panel("Training waited for saves, seconds", (Curve("stall_seconds"),), from_zero=True),
)
"""The charts below those of the loss and of the metrics, in their order."""


def panels_of(runs: Sequence[History]) -> list[Panel]:
    """Return all charts of *runs* in their order, also those without values."""
    measures: dict[str, None] = {}
    for run in runs:
        measures.update(dict.fromkeys(run.measures))
    benchmarks: dict[str, None] = {}
    for run in runs:
        benchmarks.update(dict.fromkeys(run.benchmarks))
    return [LOSS, *map(_measure_panel, measures), *map(_benchmark_panel, benchmarks), *PANELS]


def _benchmark_panel(field: str) -> Panel:
    """The chart of a metric of a task."""
    title = field.removeprefix(BENCHMARK)
    return Panel(f"Benchmark {title}", (Curve(field, "dots", text_title=title),))


def _measure_panel(measure: str) -> Panel:
    """The chart of a metric in training and validation."""
    field = f"{VALIDATED}{measure}"
    title = measure.replace("_", " ")
    curves = (
        Curve(measure, text_title=title, smoothed=True),
        Curve(field, "dots", "validation", text_title=f"val {title}"),
    )
    return Panel(title[:1].upper() + title[1:], curves, named_sets=f"{field}_")


LEGEND = {
    "faint": "each step (the line: smoothed)",
    "dots": "validation",
    "saved": "checkpoint",
    "best": "LOWEST_VAL",
    "resumed": "resumed",
}
"""The styles of lines and kinds of marks that a legend explains."""


@dataclass(frozen=True, slots=True)
class Line:
    """A series to draw. *run* is the number of its color; *style* is ``line``, ``faint`` or ``dots``."""

    label: str
    run: int
    series: Series
    style: str = "line"


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
    """A chart to draw. *step_range* and *value_range* are the lowest and highest values on its axes."""

    title: str
    lines: Sequence[Line]
    marks: Sequence[Mark]
    from_zero: bool
    step_range: tuple[float, float]
    value_range: tuple[float, float]


def charts_of(runs: Sequence[History]) -> list[Chart]:
    """Return the charts of *runs* that contain values. All have the same range of steps, except for marks beyond it."""
    last_steps: list[int] = []
    for run in runs:
        for series in run.series.values():
            last_steps += series.steps[-1:]
    last = max(last_steps, default=1)
    charts = []
    for panel in panels_of(runs):
        lines = _lines_of(panel, runs)
        if lines:
            marks = list(_marks_of(runs)) if panel.has_marks else []
            charts.append(_chart(panel, lines, marks, last))
    return charts


def _chart(panel: Panel, lines: Sequence[Line], marks: Sequence[Mark], last: int) -> Chart:
    steps = [1, last]
    for mark in marks:
        steps.append(mark.step)
    values: list[float] = []
    for line in lines:
        values += line.series.values
    for mark in marks:
        if mark.value is not None:
            values.append(mark.value)
    return Chart(
        panel.title,
        lines,
        marks,
        panel.from_zero,
        step_range=padded_range(steps),
        value_range=padded_range(values, from_zero=panel.from_zero),
    )


def _lines_of(panel: Panel, runs: Sequence[History]) -> list[Line]:
    lines = []
    for number, run in enumerate(runs):
        for curve in panel.curves_of(run):
            series = run.series.get(curve.field, Series())
            if not len(series):
                continue
            label = f"{run.name}, {curve.label}" if curve.label else run.name
            if curve.smoothed and len(series) >= _SMOOTHED_POINTS:
                lines.append(Line(f"{label}, each step", number, series, "faint"))
                lines.append(Line(f"{label}, smoothed", number, series.smoothed()))
            else:
                lines.append(Line(label, number, series, curve.style))
    return lines


def _marks_of(runs: Sequence[History]) -> Iterator[Mark]:
    for number, run in enumerate(runs):
        for step in run.resumed_at:
            yield Mark("resumed", number, step, f"{run.name}: resumed from step {step}")
        for checkpoint in run.checkpoints:
            text = f"{run.name}: checkpoint {checkpoint.name}"
            yield Mark("saved", number, checkpoint.step, text)
            if "LOWEST_VAL" in checkpoint.pointers:
                text = f"{run.name}: LOWEST_VAL, {checkpoint.name}"
                yield Mark("best", number, checkpoint.step, text, checkpoint.val_loss)


def legend_of(charts: Sequence[Chart]) -> dict[str, str]:
    """Return the entries of :data:`LEGEND` for the lines and marks that the *charts* contain."""
    found = set()
    for chart in charts:
        found |= {line.style for line in chart.lines if len(line.series)}
        found |= {mark.kind for mark in chart.marks}
    return {kind: text for kind, text in LEGEND.items() if kind in found}
