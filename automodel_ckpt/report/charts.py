"""Charts as SVG text: lines with marks over steps, and stems. Colours are classes, so that the page's style decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from automodel_ckpt.report.history import Series
from automodel_ckpt.report.scale import Scale, scale_over, short

WIDTH, HEIGHT = 860, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 30
MAX_POINTS = 1600
# Colors of the page's style sheet; further runs get other hues.
NUM_COLOURS = 6
_MORE_HUES = (335, 205, 135, 75, 235, 285)
_SHELVES = 12
# Lines with more points get no circles. Stems of runs that save at the same steps are drawn side by side.
_MOST_CIRCLES = 60
_ASIDE = 3.0
_MOST_ASIDE = 24.0


@dataclass(frozen=True, slots=True)
class Line:
    """A series to draw: *run* numbers its colour; *style* is ``line``, ``faint``, ``dots`` or ``stems``."""

    label: str
    run: int
    series: Series
    style: str = "line"


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step: ``saved``, ``best`` or ``resumed``; *text* is shown on hovering."""

    kind: str
    run: int
    step: int
    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A panel with a *title*, lines and marks; its x axis contains at least *steps* (first, last)."""

    title: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    from_zero: bool = False
    steps: tuple[int, int] = (0, 1)

    @property
    def is_empty(self) -> bool:
        return not any(len(line.series) for line in self.lines)

    def scales(self) -> tuple[Scale, Scale]:
        """The scales of the steps (x axis) and of the values (y axis)."""
        steps = [*self.steps, *(mark.step for mark in self.marks)]
        values = [value for line in self.lines for value in line.series.values]
        return (
            scale_over(steps, LEFT, WIDTH - RIGHT),
            scale_over(values, HEIGHT - BOTTOM, TOP, from_zero=self.from_zero),
        )

    def svg(self) -> str:
        """The panel as SVG text; its width follows the page's width."""
        across, up = self.scales()
        parts = [*_grid(across, up), *self._vertical_marks(across)]
        num_runs = 1 + max((line.run for line in self.lines), default=0)
        for line in self.lines:
            parts += _drawn(line, across, up, num_runs)
        parts += self._point_marks(across, up)
        scale = f'data-low="{across.low!r}" data-high="{across.high!r}"'
        opening = (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'tabindex="0" aria-label="{escape(self.title)}" {scale}>'
        )
        return "\n".join(
            [opening, *parts, '<line class="cursor" y1="14" y2="220" x1="-9" x2="-9"/>', "</svg>"]
        )

    def _vertical_marks(self, across: Scale) -> Iterator[str]:
        for mark in self.marks:
            x = across(mark.step)
            if mark.kind == "resumed":
                yield (
                    f'<line class="resumed c{mark.run}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" '
                    f'y2="{HEIGHT - BOTTOM}"><title>{escape(mark.text)}</title></line>'
                )
            elif mark.kind == "saved":
                y = HEIGHT - BOTTOM - 7 * (mark.run % _SHELVES)
                yield (
                    f'<path class="saved c{mark.run}" d="M{x:.1f} {y - 7}l4 7h-8z">'
                    f"<title>{escape(mark.text)}</title></path>"
                )

    def _point_marks(self, across: Scale, up: Scale) -> Iterator[str]:
        for mark in self.marks:
            if mark.kind == "best" and mark.value is not None:
                yield (
                    f'<circle class="best c{mark.run}" cx="{across(mark.step):.1f}" '
                    f'cy="{up(mark.value):.1f}" r="6"><title>{escape(mark.text)}</title></circle>'
                )


def more_colours(num_runs: int) -> str:
    """Style for the runs beyond the style sheet's colours: hues between those, and then the same in other shades."""
    rules = []
    for run in range(NUM_COLOURS, num_runs):
        cycle, place = divmod(run - NUM_COLOURS, len(_MORE_HUES))
        lightness = (0, 0.1, -0.1)[cycle % 3]
        shade = f"calc(var(--level) + {lightness})"
        hue = _MORE_HUES[place] + 17 * (cycle // 3)
        dash = 14 - 3 * min(cycle, 3)
        rules.append(f".c{run}{{--c:oklch({shade} .15 {hue}deg)}}")
        rules.append(f".line.c{run}:not(.dashed){{stroke-dasharray:{dash} 3}}")
    return "".join(rules)


def _grid(across: Scale, up: Scale) -> Iterator[str]:
    for value in up.ticks():
        y = up(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick up" x="{LEFT - 8}" y="{y + 4:.1f}">{short(value)}</text>'
    for step in across.ticks(8):
        if step == int(step):
            text = (
                f'<text class="tick" x="{across(step):.1f}" '
                f'y="{HEIGHT - 10}" text-anchor="middle">{short(step)}</text>'
            )
            yield text


def _drawn(line: Line, across: Scale, up: Scale, num_runs: int) -> Iterator[str]:
    series = line.series.at_most(MAX_POINTS)
    apart = min(_ASIDE, _MOST_ASIDE / num_runs) if line.style == "stems" else 0.0
    aside = apart * (line.run - (num_runs - 1) / 2)  # several runs may save at the same step
    places = [
        (across(step) + aside, up(value))
        for step, value in zip(series.steps, series.values, strict=True)
    ]
    colour = f"c{line.run}"
    if line.style == "stems":
        foot = up(max(up.low, 0.0))
        yield from (
            f'<path class="stem {colour}" d="M{x:.1f} {foot:.1f}V{y:.1f}"/>' for x, y in places
        )
    elif places:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        style = "line dashed" if line.style == "dots" else line.style
        yield f'<polyline class="{style} {colour}" points="{points}"/>'
    has_circles = line.style in ("dots", "stems") and len(places) <= _MOST_CIRCLES
    if has_circles or len(places) == 1:
        yield from (
            f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places
        )
