"""The table of checkpoints of other programs in docs/clients.md."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tools.interop.program import Check

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
TITLE = "## Checkpoints of other programs"
_HEAD = [
    TITLE,
    "",
    "`make interop` (tools/interop) runs each program in a separate environment. The program writes checkpoints that",
    "are read here, and reads what is written here.",
    "",
    "| program | versions | date | check | result | |",
    "|---|---|---|---|---|---|",
]


def section_of(page: str) -> str:
    """Return the section with the table from the text of the page; empty if there is none."""
    _, title, rest = page.partition(TITLE)
    return title + rest


def replace_rows(
    page: Path, program: str, version: str, date: str, checks: Iterable[Check]
) -> None:
    """Replace the rows of *program* in the table of the file *page*; the rows of other programs stay."""
    text = page.read_text()
    before = text.partition(TITLE)[0].rstrip("\n")
    rows: list[str] = []
    for line in section_of(text).splitlines():
        if line.startswith("| ") and not line.startswith(("| program |", f"| {program} |")):
            rows.append(line)
    for check in checks:
        verdict = "yes" if check.good else "**no**"
        cells = [program, version, date, check.what, check.found, verdict]
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    # sorted() keeps the order of the checks of a program.
    rows.sort(key=lambda row: row.split(" | ")[0].lower())
    page.write_text("\n".join([before, "", *_HEAD, *rows]) + "\n")
