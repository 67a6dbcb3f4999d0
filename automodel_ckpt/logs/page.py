"""Write one self-contained HTML page for one or more runs: it loads no script, style or image from elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import median

from automodel_ckpt.base.units import counted, exact_time, size_text
from automodel_ckpt.logs.charts import MAX_POINTS, NUM_COLORS, Chart, charts_of, legend_of
from automodel_ckpt.logs.goodput import CATEGORIES, Goodput, slow_rank_text
from automodel_ckpt.logs.history import Checkpoint, Completion, History, Series

_CHECKPOINT_TITLES = ("checkpoint", "date", "step", "epoch", "train", "validation", "size", "")


def page(runs: Sequence[History], differences: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the HTML document for *runs*.

    *differences* maps the keys of recipes that differ between the runs to their values, one per run.
    """
    from jinja2 import Environment, FileSystemLoader

    charts = charts_of(runs)
    figures = [dict(summary(run)) for run in runs]
    # Names of runs and checkpoints are names of directories: any text, also HTML.
    environment = Environment(autoescape=True, loader=FileSystemLoader(Path(__file__).parent))
    environment.filters["checkpoint_row"] = _checkpoint_row
    environment.filters["completion_row"] = _completion_row
    return environment.get_template("page.html.jinja").render(
        runs=list(runs),
        style=_resource("page.css"),
        script=_resource("page.js"),
        figures=figures,
        titles=list(dict.fromkeys(title for found in figures for title in found)),
        differences=differences,
        legend=legend_of(charts),
        charts=[(chart.title, chart.svg, _data(chart)) for chart in charts],
        num_colors=NUM_COLORS,
        checkpoint_titles=_CHECKPOINT_TITLES,
        times=lambda goodput: list(_times(goodput)),
        counted=counted,
        slow_rank_text=slow_rank_text,
    )


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _data(chart: Chart) -> str:
    """Return the values of a chart as JSON, which page.js shows at the pointer."""
    data = []
    for line in chart.lines:
        series = line.series.at_most(MAX_POINTS)
        values = {"steps": series.steps, "values": series.values}
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


def _completion_row(completion: Completion) -> tuple[str, ...]:
    return f"{completion.step:,}", completion.prompt, completion.text


def _checkpoint_row(checkpoint: Checkpoint) -> list[str]:
    cells = [checkpoint.name, _date(checkpoint.created), str(checkpoint.step)]
    cells.append(str(checkpoint.epoch))
    for loss in (checkpoint.train_loss, checkpoint.val_loss):
        cells.append("" if loss is None else f"{loss:.4f}")
    return [*cells, size_text(checkpoint.nbytes), ", ".join(checkpoint.pointers)]


def _date(timestamp: float) -> str:
    """Format a time in seconds since 1970 as local date and time; empty if it is no date."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(timestamp))
    except (OverflowError, OSError, ValueError):
        return ""


def summary(run: History) -> Iterator[tuple[str, str]]:
    """Yield the main figures of a run, as pairs of name and value."""
    loss, validation = run.series["loss"], run.series["val_loss"]
    yield "steps", f"{run.last_step:,}"
    if len(loss):
        at = "" if loss.steps[-1] == run.last_step else f" at step {loss.steps[-1]:,}"
        yield "training loss", f"{loss.values[-1]:.4f}{at}"
    if run.not_finite:
        yield (
            "loss not finite",
            f"{counted(len(run.not_finite), 'step')}, first {run.not_finite[0]:,}",
        )
    if len(validation):
        lowest = min(validation.values)
        step = validation.steps[validation.values.index(lowest)]
        yield "lowest validation loss", f"{lowest:.4f} at step {step:,}"
    accuracy = run.series.get("val_accuracy", Series())
    if len(accuracy):
        highest = max(accuracy.values)
        step = accuracy.steps[accuracy.values.index(highest)]
        yield "highest validation accuracy", f"{highest:.2%} at step {step:,}"
    yield "tokens", f"{run.num_tokens:,}"
    times = run.timestamps.values
    if times and all(map(_date, (times[0], times[-1]))):
        yield "trained", f"{_date(times[0])} to {_date(times[-1])}"
    for field, name, text in (("tps", "tokens per second", "{:,.0f}"), ("mfu", "MFU", "{:.1f}%")):
        values = run.series[field].values
        if values:
            yield name, text.format(median(values))
    memory = run.series["mem"].values
    if memory:
        yield "peak memory", size_text(max(memory))
    yield "checkpoints", str(len(run.checkpoints))
    if run.goodput is not None:
        yield "goodput", f"{run.goodput.share:.1%}"
    stalls = run.series["stall_seconds"]
    if len(stalls):
        waited = sum(stalls.values)
        # The logged steps end before the last save.
        total = run.goodput.total if run.goodput is not None else run.seconds
        share = f" ({waited / total:.1%} of the run)" if total > waited else ""
        yield "waited for saves", f"{waited:.2f} s{share}"
    num_resumes = len(run.resumed_at)
    if num_resumes:
        yield "resumed", "once" if num_resumes == 1 else f"{num_resumes} times"
