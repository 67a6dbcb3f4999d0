"""Format the results of benchmarks: as text, as the tables of docs/performance.md, and as a plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from tools.bench.rounds import ROOT

PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "performance.png"
_OURS, _OTHERS = "#1f6fb4", "#b0b0b0"


_MEMORY = (
    "Saving and loading: in addition to training's, on the rank that needs most. Consolidating: in addition to the "
    "interpreter's."
)


def as_text(results: dict[str, Any]) -> str:
    """Format the results for a terminal."""
    lines = [headline(results)]
    for group in results["groups"]:
        lines += ["", f"{group['title']:46}{'ratio':>8}{'seconds':>9}{'GB/s':>7}"]
        for row in group["rows"]:
            seconds = statistics.median(row["seconds"])
            lines.append(
                f"  {row['name']:44}{row['ratio']:8.2f}{seconds:9.2f}{group['nbytes'] / 1e9 / seconds:7.2f}"
            )
    if results["memory"]:
        lines += ["", f"{'anonymous memory':56}{'MB':>8}"]
        lines += [f"  {entry['name']:54}{entry['megabytes']:8.0f}" for entry in results["memory"]]
    return "\n".join(lines)


def headline(results: dict[str, Any]) -> str:
    machine = results["machine"]
    return (
        f"{results['size'] / 1e9:g} GB of weights, {machine['cores']} cores ({machine['processor']}), "
        f"{machine['kernel']}, {machine['date']}"
    )


def as_markdown(results: dict[str, Any]) -> str:
    """The generated part of docs/performance.md."""
    parts = [
        f"{headline(results)}. Medians; ratios are relative to the first row of each table.",
        "",
        "![](performance.png)",
    ]
    for group in results["groups"]:
        parts += [
            "",
            f"### {group['title'].capitalize()}",
            "",
            "| | ratio | seconds |",
            "|---|---|---|",
        ]
        for row in group["rows"]:
            name = f"**{row['name']}**" if row["ours"] else row["name"]
            parts.append(
                f"| {name} | {row['ratio']:.2f} | {statistics.median(row['seconds']):.2f} |"
            )
    if results["memory"]:
        parts += ["", "### Anonymous memory", "", _MEMORY, "", "| | MB |", "|---|---|"]
        parts += [f"| {entry['name']} | {entry['megabytes']:.0f} |" for entry in results["memory"]]
    return "\n".join(parts)


def write_page(results: dict[str, Any], page: Path = PAGE) -> None:
    """Write the tables to the page."""
    write_block("bench", as_markdown(results), page)


def write_block(name: str, block: str, page: Path = PAGE) -> None:
    """Replace the text between the markers of a benchmark in the page. Raises SystemExit if the page lacks them."""
    begin = f"<!-- {name}: begin -->"
    end = f"<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} lacks the lines {begin} and {end}")
    page.write_text(f"{before}{begin}\n{block}\n{end}{after}")


def write_plot(results: dict[str, Any], path: Path = PLOT) -> None:
    """Draw a bar for each row, colored for this package. Requires matplotlib (`pip install automodel_ckpt[plot]`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    half = -(-len(results["groups"]) // 2)
    figure = pyplot.figure(
        figsize=(12, 0.22 * sum(len(group["rows"]) + 3 for group in results["groups"]) / 2)
    )
    for column, groups in enumerate((results["groups"][:half], results["groups"][half:])):
        heights = [len(group["rows"]) for group in groups] or [1]
        grid = figure.add_gridspec(
            len(heights),
            1,
            height_ratios=heights,
            left=0.16 + 0.51 * column,
            right=0.47 + 0.51 * column,
            top=0.97,
            bottom=0.03,
            hspace=0.4,
        )
        for number, group in enumerate(groups):
            _draw(figure.add_subplot(grid[number, 0]), group)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    _shrink(path)


def _draw(axis: Any, group: dict[str, Any]) -> None:
    rows = group["rows"][::-1]
    colours = [_OURS if row["ours"] else _OTHERS for row in rows]
    bars = axis.barh([row["name"] for row in rows], [row["ratio"] for row in rows], color=colours)
    axis.bar_label(bars, fmt="%.2f", fontsize=6, padding=2)
    axis.axvline(1, color="black", linewidth=0.6)
    axis.set_title(f"{group['title']} (ratio to its first bar)", fontsize=8, loc="left")
    axis.tick_params(labelsize=6)
    axis.margins(x=0.1, y=0.02)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _shrink(path: Path) -> None:
    """Reduce the image to 32 colors, because images in a repository should be small."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(32)
    small.save(path, optimize=True)
