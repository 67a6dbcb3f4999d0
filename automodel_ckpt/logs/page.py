"""Write one self-contained HTML page for one or more runs: it loads no script, style or image from elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from automodel_ckpt.base.units import counted, exact_time, size_text
from automodel_ckpt.logs import charts
from automodel_ckpt.logs.charts import NUM_COLORS, Chart
from automodel_ckpt.logs.goodput import CATEGORIES, Goodput
from automodel_ckpt.logs.history import Checkpoint, History, Series

_CHECKPOINT_TITLES = ("checkpoint", "date", "step", "epoch", "train", "validation", "size", "")
_FOLDER = Path(__file__).parent
_FIGURES: Sequence[tuple[str, str, Callable[[Sequence[float]], str]]] = (
    ("tps", "tokens per second", lambda values: f"{median(values):,.0f}"),
    ("mfu", "MFU", lambda values: f"{median(values):.1f}%"),
    ("mem", "peak memory", lambda values: size_text(max(values))),
)
"""Fields of steps, and how the summary of a run shows them."""


def page(runs: Sequence[History], differences: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the HTML document for *runs*.

    *differences* maps the keys of recipes that differ between the runs to their values, one per run.
    """
    from jinja2 import Environment, FileSystemLoader

    drawn = charts.charts_of(runs)
    figures = [dict(summary(run)) for run in runs]
    # Names of runs and checkpoints are names of directories: any text, also HTML.
    environment = Environment(autoescape=True, loader=FileSystemLoader(_FOLDER))
    environment.filters["checkpoint_row"] = _checkpoint_row
    environment.globals.update(num_colors=NUM_COLORS, size=charts, short=charts.short)
    return environment.get_template("page.html.jinja").render(
        runs=list(runs),
        style=(_FOLDER / "page.css").read_text("utf-8"),
        script=(_FOLDER / "page.js").read_text("utf-8"),
        figures=figures,
        titles=list(dict.fromkeys(title for found in figures for title in found)),
        differences=differences,
        legend=charts.LEGEND,
        charts=[(chart, _data(chart)) for chart in drawn],
        checkpoint_titles=_CHECKPOINT_TITLES,
        times=lambda goodput: list(_times(goodput)),
        counted=counted,
    )


def _data(chart: Chart) -> str:
    """Return the values of a chart as JSON, which page.js shows at the pointer."""
    data = []
    for line in chart.lines:
        values = {"steps": line.series.steps, "values": line.series.values}
        data.append({"label": line.label, "colour": line.run % NUM_COLORS, **values})
    # In a script element, "</script>" in a label would end the element.
    return json.dumps(data).replace("<", "\\u003c")


def _times(goodput: Goodput) -> Iterator[tuple[int, float, str]]:
    """Yield the color, the share and the text of each category of time."""
    for color, (name, title) in enumerate(CATEGORIES.items()):
        seconds = goodput.seconds[name]
        if seconds > 0:
            share = seconds / goodput.total
            yield color, round(share, 6), f"{title} {exact_time(seconds)}: {share:.1%}"


def _checkpoint_row(checkpoint: Checkpoint) -> list[str]:
    found = checkpoint.summary
    losses = (checkpoint.train_loss, checkpoint.val_loss)
    return [
        checkpoint.name,
        _date(found.created),
        str(found.step),
        str(found.epoch),
        *("" if loss is None else f"{loss:.4f}" for loss in losses),
        size_text(found.nbytes),
        ", ".join(checkpoint.pointers),
    ]


def _date(timestamp: float) -> str:
    """Format a time in seconds since 1970 as local date and time; empty if it is no date."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(timestamp))
    except (OverflowError, OSError, ValueError):
        return ""


def summary(run: History) -> Iterator[tuple[str, str]]:
    """Yield the main figures of a run, as pairs of name and value."""

    def of(field: str) -> Series:
        return run.series.get(field, Series())

    yield "steps", f"{run.last_step:,}"
    if loss := of("loss"):
        at = "" if loss.steps[-1] == run.last_step else f" at step {loss.steps[-1]:,}"
        yield "training loss", f"{loss.values[-1]:.4f}{at}"
    if run.not_finite:
        steps = counted(len(run.not_finite), "step")
        yield "loss not finite", f"{steps}, first {run.not_finite[0]:,}"
    for field, name, best, form in (
        ("val_loss", "lowest validation loss", min, ".4f"),
        ("val_accuracy", "highest validation accuracy", max, ".2%"),
    ):
        if series := of(field):
            value = best(series.values)
            step = series.steps[series.values.index(value)]
            yield name, f"{value:{form}} at step {step:,}"
    yield "tokens", f"{run.num_tokens:,}"
    if run.trained is not None and all(map(_date, run.trained)):
        yield "trained", " to ".join(map(_date, run.trained))
    for field, name, text in _FIGURES:
        if series := of(field):
            yield name, text(series.values)
    yield "checkpoints", str(len(run.checkpoints))
    if run.goodput is not None:
        yield "goodput", f"{run.goodput.share:.1%}"
    if stalls := of("stall_seconds"):
        yield "waited for saves", f"{sum(stalls.values):.2f} s"
    if num_resumes := len(run.resumed_at):
        yield "resumed", "once" if num_resumes == 1 else f"{num_resumes} times"
