"""One self-contained HTML page for one or several runs: no script, style or picture from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from automodel_ckpt.report.charts import MAX_POINTS, Chart, Line, Mark, more_colours
from automodel_ckpt.report.history import Checkpoint, History, Series
from automodel_ckpt.units import size_text

_SMOOTH_FROM = 200
# Field, title, from zero, smoothed: a schedule is drawn as it is.
PANELS = (
    ("grad_norm", "Gradient norm", False, True),
    ("lr", "Learning rate", True, False),
    ("tps", "Throughput, tokens per second", True, True),
)
_LEGEND = {"saved": "▲ checkpoint", "best": "◯ LOWEST_VAL", "resumed": "┆ resumed"}
_MOST_HEADS = 2


def page(runs: Sequence[History]) -> str:
    """The HTML document for *runs*."""
    style, script = (
        resources.files(__package__).joinpath(name).read_text("utf-8")
        for name in ("page.css", "page.js")
    )
    charts = [chart for chart in charts_of(runs) if not chart.is_empty]
    title = " · ".join(run.name for run in runs)
    heads = _heads(runs) if len(runs) <= _MOST_HEADS else _head_table(runs)
    body = "\n".join(
        [*heads, _legend(charts), *(_figure(chart) for chart in charts), *_tables(runs)]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{style}{more_colours(len(runs))}</style></head>\n<body><main>\n{body}\n</main>"
        f'<div id="tip" hidden></div><script>{script}</script></body></html>\n'
    )


def charts_of(runs: Sequence[History]) -> Iterator[Chart]:
    """The panels of the page, all over the same steps; some may be empty."""
    last = max(
        (series.steps[-1] for run in runs for series in run.series.values() if len(series)),
        default=1,
    )
    steps = (1, last)
    losses = [line for n, run in enumerate(runs) for line in _losses(n, run)]
    yield Chart("Loss", losses, [*_marks(runs)], steps=steps)
    for field, title, from_zero, smooth in PANELS:
        lines = [
            line
            for n, run in enumerate(runs)
            for line in _curves(n, run.name, run.series[field], smooth)
        ]
        yield Chart(title, lines, from_zero=from_zero, steps=steps)
    for field, title in (
        ("stall_seconds", "Training waited for saves, seconds"),
        ("bytes", "Size of saves, bytes"),
    ):
        lines = [
            Line(run.name, number, run.series[field], "stems") for number, run in enumerate(runs)
        ]
        yield Chart(title, lines, from_zero=True, steps=steps)


def _losses(number: int, run: History) -> Iterator[Line]:
    yield from _curves(number, run.name, run.series["loss"])
    if len(run.series["val_loss"]):
        yield Line(f"{run.name}, validation", number, run.series["val_loss"], "dots")


def _curves(number: int, name: str, series: Series, smooth: bool = True) -> Iterator[Line]:
    """The series; a long one is drawn faint, with its moving average."""
    if not smooth or len(series) < _SMOOTH_FROM:
        yield Line(name, number, series)
    else:
        yield Line(f"{name}, each step", number, series, "faint")
        yield Line(f"{name}, smoothed", number, series.smoothed())


def _marks(runs: Sequence[History]) -> Iterator[Mark]:
    for number, run in enumerate(runs):
        for step in run.resumed_at:
            yield Mark("resumed", number, step, f"{run.name}: resumed from step {step}")
        for checkpoint in run.checkpoints:
            yield Mark(
                "saved", number, checkpoint.step, f"{run.name}: checkpoint {checkpoint.name}"
            )
            if "LOWEST_VAL" in checkpoint.pointers:
                text = f"{run.name}: LOWEST_VAL, {checkpoint.name}"
                yield Mark("best", number, checkpoint.step, text, checkpoint.val_loss)


def _figure(chart: Chart) -> str:
    data = []
    for line in chart.lines:
        if len(line.series):
            series = line.series.at_most(MAX_POINTS)
            data.append(
                {
                    "label": line.label,
                    "colour": line.run,
                    "steps": series.steps,
                    "values": series.values,
                }
            )
    embedded = json.dumps(data).replace("<", "\\u003c")
    return (
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{chart.svg()}"
        f'<script type="application/json">{embedded}</script></figure>'
    )


def _heads(runs: Sequence[History]) -> Iterator[str]:
    yield "<h1>" + escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs") + "</h1>"
    for number, run in enumerate(runs):
        cells = "".join(
            f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in summary(run)
        )
        yield (
            f'<section><h2><span class="key c{number}"></span>{escape(run.name)} '
            f"<small>{escape(str(run.path))}</small></h2><dl>{cells}</dl></section>"
        )


def _head_table(runs: Sequence[History]) -> Iterator[str]:
    """The heading and a table with one row per run, for many runs."""
    yield f"<h1>{len(runs)} runs</h1>"
    rows = [dict(summary(run)) for run in runs]
    titles = list(dict.fromkeys(title for row in rows for title in row))
    head = "".join(f"<th>{escape(title)}</th>" for title in ("run", *titles))
    body = "".join(
        f'<tr><td title="{escape(str(run.path))}"><span class="key c{number}"></span>{escape(run.name)}</td>'
        + "".join(f"<td>{escape(row.get(title, ''))}</td>" for title in titles)
        + "</tr>"
        for number, (run, row) in enumerate(zip(runs, rows, strict=True))
    )
    yield f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _legend(charts: Sequence[Chart]) -> str:
    """The legend, with the kinds of marks and lines that the *charts* contain."""
    kinds = {mark.kind for chart in charts for mark in chart.marks}
    entries = [text for kind, text in _LEGEND.items() if kind in kinds]
    styles = {line.style for chart in charts for line in chart.lines}
    if "dots" in styles:
        entries.append("┄ validation")
    entries.append("x axis: optimizer steps")
    spans = "".join(f"<span>{text}</span>" for text in entries)
    return f'<p class="legend">{spans}</p>'


def summary(run: History) -> Iterator[tuple[str, str]]:
    """The main figures of a run, as pairs of name and value."""
    loss, validation, stalls = (run.series[name] for name in ("loss", "val_loss", "stall_seconds"))
    yield "steps", f"{run.last_step:,}"
    if len(loss):
        at = "" if loss.steps[-1] == run.last_step else f" at step {loss.steps[-1]:,}"
        yield "training loss", f"{loss.values[-1]:.4f}{at}"
    if run.not_finite:
        yield "loss not finite", f"{_steps(len(run.not_finite))}, first {run.not_finite[0]:,}"
    if len(validation):
        best = min(range(len(validation)), key=validation.values.__getitem__)
        yield (
            "lowest validation loss",
            f"{validation.values[best]:.4f} at step {validation.steps[best]:,}",
        )
    yield "tokens", f"{run.num_tokens:,}"
    yield "checkpoints", str(len(run.checkpoints))
    if len(stalls):
        waited = sum(stalls.values)
        share = f" ({waited / run.seconds:.1%} of the run)" if run.seconds > 0 else ""
        yield "waited for saves", f"{waited:.2f} s{share}"
    if run.resumed_at:
        yield "resumed", f"{len(run.resumed_at)} times" if len(run.resumed_at) > 1 else "once"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _tables(runs: Sequence[History]) -> Iterator[str]:
    for number, run in enumerate(runs):
        if run.checkpoints:
            head = "".join(
                f"<th>{t}</th>"
                for t in ("checkpoint", "step", "epoch", "train", "validation", "size", "")
            )
            rows = "".join(_row(checkpoint) for checkpoint in run.checkpoints)
            yield (
                f'<h2><span class="key c{number}"></span>Checkpoints of {escape(run.name)}</h2>'
                f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
            )


def _row(checkpoint: Checkpoint) -> str:
    losses = ["" if v is None else f"{v:.4f}" for v in (checkpoint.train_loss, checkpoint.val_loss)]
    cells = [
        checkpoint.name,
        str(checkpoint.step),
        str(checkpoint.epoch),
        *losses,
        size_text(checkpoint.nbytes),
        ", ".join(checkpoint.pointers),
    ]
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
