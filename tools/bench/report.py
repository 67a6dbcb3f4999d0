"""Format the results of benchmarks: as text, and as the tables of docs/performance.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from tools.bench.rounds import ROOT

PAGE = ROOT / "docs" / "performance.md"


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
