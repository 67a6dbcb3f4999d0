"""The page's charts as one PNG, through matplotlib (``pip install 'automodel_ckpt[plot]'``)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.report.charts import Chart
from automodel_ckpt.report.history import History
from automodel_ckpt.report.page import charts_of

_NUM_COLOURS = 10
_LONGEST_NAME = 40
_STYLES = {"dots": "o--", "stems": "o"}
_EXPLAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "faint": ("each step (the line: smoothed)", {"alpha": 0.3}),
    "dots": ("validation", {"linestyle": "--", "marker": "o", "markersize": 3}),
    "saved": ("checkpoint", {"linestyle": "", "marker": "^", "markersize": 4}),
    "best": ("LOWEST_VAL", {"linestyle": "", "marker": "o", "markersize": 8, "fillstyle": "none"}),
    "resumed": ("resumed", {"linestyle": ":"}),
}


def write_picture(runs: Sequence[History], file: Path) -> None:
    """Draw all panels, one above the other. Raises :class:`RecipeError` without matplotlib."""
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise RecipeError(
            "writing a PNG requires matplotlib, which is not installed",
            where="--output",
            value=str(file),
            hint="pip install 'automodel_ckpt[plot]', or write an .html file, which requires nothing",
        ) from error
    pyplot.switch_backend("agg")
    figure = drawn(pyplot, runs)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def drawn(pyplot: Any, runs: Sequence[History]) -> Any:
    """The figure: all panels over the same steps, and one legend below them."""
    charts = [chart for chart in charts_of(runs) if not chart.is_empty]
    figure, axes = pyplot.subplots(
        len(charts), figsize=(9, 2.4 * len(charts)), squeeze=False, layout="constrained"
    )
    for chart, (axis,) in zip(charts, axes, strict=True):
        _draw(chart, axis)
    handles = [*_legend(runs, charts)]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 4),
        fontsize=8,
        frameon=False,
    )
    return figure


def _draw(chart: Chart, axis: Any) -> None:
    axis.set_title(chart.title, fontsize=10, loc="left")
    axis.grid(alpha=0.3)
    for line in chart.lines:
        style, alpha = _STYLES.get(line.style, "-"), 0.3 if line.style == "faint" else 1.0
        axis.plot(
            line.series.steps,
            line.series.values,
            style,
            color=_colour(line.run),
            alpha=alpha,
            markersize=3,
            linewidth=1.2,
        )
    for mark in chart.marks:
        if mark.kind == "resumed":
            axis.axvline(mark.step, color=_colour(mark.run), linestyle=":", linewidth=1)
        elif mark.kind == "saved":
            axis.plot(
                [mark.step],
                [0.02],
                "^",
                color=_colour(mark.run),
                markersize=4,
                transform=axis.get_xaxis_transform(),
            )
        elif mark.value is not None:
            axis.plot(
                [mark.step],
                [mark.value],
                "o",
                color=_colour(mark.run),
                markersize=9,
                fillstyle="none",
            )
    across, _ = chart.scales()
    axis.set_xlim(across.low, across.high)
    if chart.from_zero:
        axis.set_ylim(bottom=0)


def _legend(runs: Sequence[History], charts: Sequence[Chart]) -> Iterator[Any]:
    """The entries of the legend: a color per run, and the kinds of lines and marks in gray."""
    from matplotlib.lines import Line2D

    for number, run in enumerate(runs):
        name = run.name if len(run.name) <= _LONGEST_NAME else f"...{run.name[-_LONGEST_NAME:]}"
        name = name.replace("$", r"\$")  # matplotlib would render it as mathematics
        yield Line2D(
            [], [], color=_colour(number), label=f" {name}"
        )  # a label that begins with _ is left out
    found = {line.style for chart in charts for line in chart.lines if len(line.series)}
    found |= {mark.kind for chart in charts for mark in chart.marks}
    for kind, (label, style) in _EXPLAINED.items():
        if kind in found:
            yield Line2D([], [], color="grey", label=label, **style)


def _colour(run: int) -> Any:
    """The color of a run: one of matplotlib's ten, or a hue by the golden section for further runs."""
    from matplotlib.colors import hsv_to_rgb

    return f"C{run}" if run < _NUM_COLOURS else hsv_to_rgb((run * 0.381966 % 1, 0.75, 0.7))
