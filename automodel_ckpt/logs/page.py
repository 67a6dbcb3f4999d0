"""Write one self-contained HTML page for one or more runs: it loads no script, style or image from elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from statistics import median

from automodel_ckpt.base.units import counted, exact_time, size_text
from automodel_ckpt.logs.charts import Chart, charts_of, legend_of
from automodel_ckpt.logs.goodput import CATEGORIES, slow_rank_text
from automodel_ckpt.logs.history import Checkpoint, History, Series
from automodel_ckpt.logs.svg import MAX_POINTS, more_colors, svg

_SYMBOLS = {"saved": "▲", "best": "◯", "resumed": "┆", "dots": "┄"}
"""The symbols in the legend. Faint lines need none: the pointer shows their labels."""
_MAX_SECTIONS = 2
"""For more runs, a table replaces the section with the main figures of each run."""
_CHECKPOINT_TITLES = ("checkpoint", "date", "step", "epoch", "train", "validation", "size", "")


def page(runs: Sequence[History], differences: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the HTML document for *runs*.

    *differences* maps the keys of recipes that differ between the runs to their values, one per run.
    """
    style, script = _resource("page.css"), _resource("page.js")
    charts = charts_of(runs)
    # Names of runs and checkpoints are names of directories: any text, also HTML.
    title = escape(" · ".join(run.name for run in runs))
    heads = _run_sections(runs) if len(runs) <= _MAX_SECTIONS else _run_table(runs)
    figures = [_figure(chart) for chart in charts]
    parts = [
        *heads,
        *_differences(runs, differences or {}),
        *_time_bars(runs),
        _legend(charts),
        *figures,
        *_completion_tables(runs),
        *_checkpoint_tables(runs),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{style}{more_colors(len(runs))}</style></head>\n"
        f"<body><main>\n{body}\n</main>"
        f'<div id="tip" hidden></div><script>{script}</script></body></html>\n'
    )


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _figure(chart: Chart) -> str:
    """Return a chart, and its values as JSON, which page.js shows at the pointer."""
    data = []
    for line in chart.lines:
        series = line.series.at_most(MAX_POINTS)
        if len(series):
            values = {"steps": series.steps, "values": series.values}
            data.append({"label": line.label, "colour": line.run, **values})
    # In a script element, "</script>" in a label would end the element.
    embedded = json.dumps(data).replace("<", "\\u003c")
    return (
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{svg(chart)}"
        f'<script type="application/json">{embedded}</script></figure>'
    )


def _legend(charts: Sequence[Chart]) -> str:
    entries = []
    for kind, text in legend_of(charts).items():
        if kind in _SYMBOLS:
            entries.append(f"{_SYMBOLS[kind]} {text}")
    entries.append("x axis: optimizer steps")
    spans = "".join(f"<span>{text}</span>" for text in entries)
    return f'<p class="legend">{spans}</p>'


def _run_sections(runs: Sequence[History]) -> Iterator[str]:
    """Yield the heading, and a section with the main figures of each run."""
    heading = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    yield f"<h1>{escape(heading)}</h1>"
    for number, run in enumerate(runs):
        cells = []
        for name, value in summary(run):
            cells.append(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>")
        yield (
            f"<section><h2>{_color_key(number)}{escape(run.name)} "
            f"<small>{escape(str(run.path))}</small></h2><dl>{''.join(cells)}</dl></section>"
        )


def _run_table(runs: Sequence[History]) -> Iterator[str]:
    """Yield the heading, and a table with the main figures, one row per run."""
    yield f"<h1>{len(runs)} runs</h1>"
    summaries = [dict(summary(run)) for run in runs]
    titles: list[str] = []
    for figures in summaries:
        titles += [title for title in figures if title not in titles]
    rows = []
    for number, (run, figures) in enumerate(zip(runs, summaries, strict=True)):
        path = escape(str(run.path))
        name = f'<td title="{path}">{_color_key(number)}{escape(run.name)}</td>'
        cells = _cells([figures.get(title, "") for title in titles])
        rows.append(f"<tr>{name}{cells}</tr>")
    yield _table(["run", *titles], rows)


def _differences(
    runs: Sequence[History], differences: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield a table of the keys of the recipes that differ, with a column per run."""
    if not differences:
        return
    head = ["<th>key</th>"]
    for number, run in enumerate(runs):
        head.append(f"<th>{_color_key(number)}{escape(run.name)}</th>")
    rows = []
    for key, values in differences.items():
        rows.append(f"<tr>{_cells([key, *values])}</tr>")
    yield (
        "<h2>Differences between the recipes</h2>"
        f'<table class="texts"><thead><tr>{"".join(head)}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _time_bars(runs: Sequence[History]) -> Iterator[str]:
    """Yield the time of each run by category: a bar, and its legend with seconds and shares."""
    for number, run in enumerate(runs):
        found = run.goodput
        if found is None or found.total <= 0:
            continue
        bars = []
        entries = []
        for color, (name, title) in enumerate(CATEGORIES.items()):
            seconds = found.seconds[name]
            share = seconds / found.total
            if seconds <= 0:
                continue
            text = f"{title} {exact_time(seconds)}: {share:.1%}"
            bars.append(f'<i class="t{color}" style="flex-grow:{share:.6f}" title="{text}"></i>')
            entries.append(f'<span><i class="t{color}"></i>{text}</span>')
        yield (
            f"<h2>{_color_key(number)}Time of {escape(run.name)}: {found.share:.1%} useful</h2>"
            f'<div class="time">{"".join(bars)}</div><p class="legend">{"".join(entries)}</p>'
        )
        if found.slow_ranks:
            rows = [f"<li>{escape(slow_rank_text(slow))}</li>" for slow in found.slow_ranks]
            yield f"<p>Ranks that were slower than the others:</p><ul>{''.join(rows)}</ul>"


def _completion_tables(runs: Sequence[History]) -> Iterator[str]:
    """Yield a table of completions per run: those of the newest step, and the earlier ones collapsed."""
    for number, run in enumerate(runs):
        if not run.completions:
            continue
        newest: list[str] = []
        earlier: list[str] = []
        for completion in run.completions:
            texts = [f"{completion.step:,}", completion.prompt, completion.text]
            rows = newest if completion.step == run.completions[0].step else earlier
            rows.append(f"<tr>{_cells(texts)}</tr>")
        yield f"<h2>{_color_key(number)}Completions of {escape(run.name)}</h2>"
        titles = ("step", "prompt", "completion")
        yield _table(titles, newest, "texts")
        if earlier:
            yield _details("earlier completions", _table(titles, earlier, "texts"))


def _details(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


def _checkpoint_tables(runs: Sequence[History]) -> Iterator[str]:
    for number, run in enumerate(runs):
        if run.checkpoints:
            rows = [_checkpoint_row(checkpoint) for checkpoint in run.checkpoints]
            title = f"{_color_key(number)}{counted(len(rows), 'checkpoint')} of {escape(run.name)}"
            yield _details(title, _table(_CHECKPOINT_TITLES, rows))


def _checkpoint_row(checkpoint: Checkpoint) -> str:
    date = _date(checkpoint.created)
    cells = [checkpoint.name, date, str(checkpoint.step), str(checkpoint.epoch)]
    for loss in (checkpoint.train_loss, checkpoint.val_loss):
        cells.append("" if loss is None else f"{loss:.4f}")
    cells.append(size_text(checkpoint.nbytes))
    cells.append(", ".join(checkpoint.pointers))
    return f"<tr>{_cells(cells)}</tr>"


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def _date(timestamp: float) -> str:
    """Format a time in seconds since 1970 as local date and time; empty if it is no date."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(timestamp))
    except (OverflowError, OSError, ValueError):
        return ""


def _table(titles: Sequence[str], rows: Sequence[str], kind: str = "numbers") -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _color_key(run: int) -> str:
    return f'<span class="key c{run}"></span>'


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
