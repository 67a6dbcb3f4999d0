"""Draw the charts as one PNG image with matplotlib (``pip install 'automodel_ckpt[plot]'``)."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from automodel_ckpt.logs.charts import Chart, Mark, charts_of, legend_of
from automodel_ckpt.logs.goodput import CATEGORIES
from automodel_ckpt.logs.history import History
from automodel_ckpt.logs.scale import short

_NUM_COLORS = 10
"""The number of colors in matplotlib's default cycle."""
_MAX_NAME_CHARS = 40
_LINE_FORMATS = {"dots": "o--", "stems": "o"}
_LEGEND_STYLES: dict[str, dict[str, Any]] = {
    "faint": {"alpha": 0.3},
    "dots": {"linestyle": "--", "marker": "o", "markersize": 3},
    "saved": {"linestyle": "", "marker": "^", "markersize": 4},
    "best": {"linestyle": "", "marker": "o", "markersize": 8, "fillstyle": "none"},
    "resumed": {"linestyle": ":"},
}


def picture(runs: Sequence[History], file: Path) -> bytes:
    """Return the charts of *runs* as a PNG image for *file*. Raises :class:`RecipeError` without matplotlib."""
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise RecipeError(
            "writing a PNG requires matplotlib, which is not installed",
            where="--output",
            value=str(file),
            hint="pip install 'automodel_ckpt[plot]', or write an .html file, which requires nothing",
        ) from error
    # Needs no display, which another backend may need.
    pyplot.switch_backend("agg")
    figure = draw_figure(pyplot, runs)
    content = io.BytesIO()
    figure.savefig(content, dpi=110, format="png")
    pyplot.close(figure)
    return content.getvalue()


def draw_figure(pyplot: Any, runs: Sequence[History]) -> Any:
    """Return a figure with all charts, one above the other, and one legend below them.

    Raises :class:`CheckpointUnusable` if the logs contain no values.
    """
    charts = charts_of(runs)
    if not charts:
        raise CheckpointUnusable(
            "the logs contain no values to plot",
            where=", ".join(str(run.path) for run in runs),
            value="",
            hint="train at least one step; `ckpt ls` lists the checkpoints",
        )
    timed = [run for run in runs if run.goodput is not None and run.goodput.total > 0]
    num_rows = len(charts) + bool(timed)
    figure, rows = pyplot.subplots(
        num_rows, figsize=(9, 2.4 * num_rows), squeeze=False, layout="constrained"
    )
    for chart, (axis,) in zip(charts, rows[: len(charts)], strict=True):
        _draw(chart, axis)
    if timed:
        _draw_time(timed, rows[-1][0])
    handles = list(_legend_handles(runs, charts))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 4),
        fontsize=8,
        frameon=False,
    )
    return figure


def _draw_time(runs: Sequence[History], axis: Any) -> None:
    """Draw a bar per run that shows how its time was spent."""
    axis.set_title("Share of the time, %", fontsize=10, loc="left")
    names = [f"{run.name[:_MAX_NAME_CHARS]} " for run in runs]
    ends = [0.0] * len(runs)
    for name, title in CATEGORIES.items():
        shares = []
        for run in runs:
            assert run.goodput is not None
            shares.append(100 * run.goodput.seconds[name] / run.goodput.total)
        if any(shares):
            axis.barh(names, shares, left=ends, label=title, height=0.5)
            ends = [end + share for end, share in zip(ends, shares, strict=True)]
    axis.legend(fontsize=7, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)


def _draw(chart: Chart, axis: Any) -> None:
    axis.set_title(chart.title, fontsize=10, loc="left")
    axis.grid(alpha=0.3)
    for line in chart.lines:
        line_format = _LINE_FORMATS.get(line.style, "-")
        if len(line.series) == 1:
            line_format = "o"  # a line of one point is not visible
        axis.plot(
            line.series.steps,
            line.series.values,
            line_format,
            # Markers at the edge are drawn completely.
            clip_on="o" not in line_format,
            color=_color(line.run),
            alpha=0.3 if line.style == "faint" else 1.0,
            markersize=3,
            linewidth=1.2,
        )
    for mark in chart.marks:
        _draw_mark(mark, axis)
    axis.set_xlim(*chart.step_range)
    # The range of all values: matplotlib's own cuts off marks, and values below 0.
    axis.set_ylim(*chart.value_range)
    axis.yaxis.set_major_formatter(lambda value, _: short(value))


def _draw_mark(mark: Mark, axis: Any) -> None:
    color = _color(mark.run)
    if mark.kind == "resumed":
        axis.axvline(mark.step, color=color, linestyle=":", linewidth=1)
    elif mark.kind == "saved":
        # x in steps, y as a fraction of the axis: just above the x axis
        transform = axis.get_xaxis_transform()
        axis.plot([mark.step], [0.02], "^", color=color, markersize=4, transform=transform)
    elif mark.value is not None:
        axis.plot(
            [mark.step],
            [mark.value],
            "o",
            color=color,
            markersize=9,
            fillstyle="none",
            clip_on=False,
        )


def _legend_handles(runs: Sequence[History], charts: Sequence[Chart]) -> Iterator[Any]:
    """Yield the entries of the legend: a color for each run, and the styles of lines and marks in gray."""
    from matplotlib.lines import Line2D

    for number, run in enumerate(runs):
        name = run.name
        if len(name) > _MAX_NAME_CHARS:
            name = f"...{name[-_MAX_NAME_CHARS:]}"
        name = name.replace("$", r"\$")  # matplotlib would render it as mathematics
        # The space: matplotlib leaves labels out that begin with an underscore.
        yield Line2D([], [], color=_color(number), label=f" {name}")
    for kind, text in legend_of(charts).items():
        yield Line2D([], [], color="grey", label=text, **_LEGEND_STYLES[kind])


def _color(run: int) -> Any:
    """Return the color of a run: one of matplotlib's ten, or a hue by the golden ratio for further runs."""
    from matplotlib.colors import hsv_to_rgb

    return f"C{run}" if run < _NUM_COLORS else hsv_to_rgb((run * 0.381966 % 1, 0.75, 0.7))
