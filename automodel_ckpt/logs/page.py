"""Render a report of one or more runs. It loads no script, style or image from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from automodel_ckpt.base.units import counted, duration, size_text
from automodel_ckpt.logs.charts import MARKS, NUM_COLORS, charts_of, short
from automodel_ckpt.logs.goodput import CATEGORIES
from automodel_ckpt.logs.history import History, Series

_FOLDER = Path(__file__).parent
# Fields of steps, and how the summary of a run shows them.
_FIGURES: Sequence[tuple[str, str, Callable[[Sequence[float]], str]]] = (
    ("tps", "tokens per second", lambda values: f"{median(values):,.0f}"),
    ("mfu", "MFU", lambda values: f"{median(values):.1f}%"),
    ("mem", "peak memory", lambda values: size_text(max(values))),
)


def page(
    runs: Sequence[History],
    differences: dict[str, list[str]] | None = None,
    template: str = "page.html.jinja",
) -> str:
    """Return the HTML document for *runs*, or with the template ``loss.svg.jinja`` their loss as an image.

    Args:
        runs: The runs, at least one.
        differences: The keys of recipes that differ between the runs, with their values, one per run.
        template: The file of the template.

    Returns:
        The document.
    """
    from jinja2 import Environment, FileSystemLoader

    facts = [dict(summary(run)) for run in runs]
    rows = {name: [each.get(name, "") for each in facts] for each in facts for name in each}
    # Names of runs and checkpoints are names of directories: any text, also HTML.
    environment = Environment(autoescape=True, loader=FileSystemLoader(_FOLDER))
    environment.globals.update(
        marks=MARKS, num_colors=NUM_COLORS, short=short, counted=counted, date=_date
    )
    environment.globals.update(duration=duration, size_text=size_text, categories=CATEGORIES)
    rows |= differences or {}
    return environment.get_template(template).render(runs=runs, rows=rows, charts=charts_of(runs))


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
