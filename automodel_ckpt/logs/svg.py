"""Draw charts as SVG text. Colors are classes: the style sheet of the page defines them."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from automodel_ckpt.logs.charts import Chart, Line
from automodel_ckpt.logs.scale import Scale, short

# In units of the view box. page.js contains the left and right edges, too.
WIDTH, HEIGHT = 860, 250
LEFT, RIGHT, TOP, BOTTOM = 62, WIDTH - 14, 14, HEIGHT - 30
MAX_POINTS = 1600
"""Points per line: about two for each unit of the width."""

NUM_COLORS = 6
"""The number of colors in the style sheet, which further runs repeat."""
_MAX_MARK_ROWS = 12
_MAX_CIRCLES = 60
"""Lines with more points get no circles."""


def svg(chart: Chart) -> str:
    """Draw a chart; its width follows the width of the page."""
    x_scale = Scale(*chart.step_range, LEFT, RIGHT)
    y_scale = Scale(*chart.value_range, BOTTOM, TOP)
    opening = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(chart.title)}" '
        f'data-low="{x_scale.low!r}" data-high="{x_scale.high!r}">'
    )
    elements = [opening, *_grid(x_scale, y_scale), *_step_marks(chart, x_scale)]
    for line in chart.lines:
        elements += _line(line, x_scale, y_scale)
    elements += _value_marks(chart, x_scale, y_scale)
    cursor = f'<line class="cursor" y1="{TOP}" y2="{BOTTOM}" x1="-9" x2="-9"/>'
    return "\n".join([*elements, cursor, "</svg>"])


def _grid(x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    for value in y_scale.ticks():
        y = y_scale(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick up" x="{LEFT - 8}" y="{y + 4:.1f}">{short(value)}</text>'
    for step in x_scale.ticks(8):
        if step == int(step):
            x = f"{x_scale(step):.1f}"
            label = short(step)
            yield f'<text class="tick" x="{x}" y="{HEIGHT - 10}" text-anchor="middle">{label}</text>'


def _step_marks(chart: Chart, x_scale: Scale) -> Iterator[str]:
    """Draw the marks without a value: resumes as vertical lines, checkpoints as triangles on the x axis."""
    for mark in chart.marks:
        x = x_scale(mark.step)
        title = f"<title>{escape(mark.text)}</title>"
        if mark.kind == "resumed":
            position = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}"'
            yield f'<line class="resumed c{mark.run % NUM_COLORS}" {position}>{title}</line>'
        elif mark.kind == "saved":
            y = BOTTOM - 7 * (mark.run % _MAX_MARK_ROWS)
            yield f'<path class="saved c{mark.run % NUM_COLORS}" d="M{x:.1f} {y - 7}l4 7h-8z">{title}</path>'


def _value_marks(chart: Chart, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    for mark in chart.marks:
        if mark.kind != "best" or mark.value is None:
            continue
        x = x_scale(mark.step)
        y = y_scale(mark.value)
        title = f"<title>{escape(mark.text)}</title>"
        yield f'<circle class="best c{mark.run % NUM_COLORS}" cx="{x:.1f}" cy="{y:.1f}" r="6">{title}</circle>'


def _line(line: Line, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    series = line.series.at_most(MAX_POINTS)
    points = []
    for step, value in zip(series.steps, series.values, strict=True):
        points.append(f"{x_scale(step):.1f},{y_scale(value):.1f}")
    color = f"c{line.run % NUM_COLORS}"
    if points:
        style = "line dashed" if line.style == "dots" else line.style
        yield f'<polyline class="{style} {color}" points="{" ".join(points)}"/>'
    if len(points) == 1 or (line.style == "dots" and len(points) <= _MAX_CIRCLES):
        for point in points:
            x, y = point.split(",")
            yield f'<circle class="dot {color}" cx="{x}" cy="{y}" r="3"/>'
