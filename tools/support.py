"""What several tools share: command lines, processes, the logs of a run, tables, and the generated parts of pages."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PERFORMANCE = ROOT / "docs" / "performance.md"
MEASURED = {"timestamp", "tps", "tps_per_gpu", "mfu", "mem", "seconds"}
"""Fields of a log that tell of the machine, not of the training."""


def parser_of(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """A command line that is described by the docstring of its module."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=raw, **options)


def environment(**more: str) -> dict[str, str]:
    """The environment of a process that computes on one thread and downloads nothing."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def train_words(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "automodel_ckpt.cli.train", *map(str, arguments)]


def program(name: str) -> str:
    """A command that is installed next to this interpreter."""
    return str(Path(sys.executable).with_name(name))


def log_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file; none where it does not exist."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def step_lines(path: Path, without: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The lines about steps, *without* some of their fields."""
    hidden = set(without)
    return [
        {key: value for key, value in line.items() if key not in hidden}
        for line in log_lines(path)
        if "event" not in line
    ]


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = False) -> str:
    """A table in Markdown; with *numbers*, all columns but the first are aligned to the right."""
    kinds = ["---", *(["---:" if numbers else "---"] * (len(header) - 1))]
    lines = [f"| {' | '.join(header)} |" if header[0] else f"| | {' | '.join(header[1:])} |"]
    lines.append(f"|{'|'.join(kinds)}|")
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def write_block(name: str, block: str, page: Path = PERFORMANCE) -> None:
    """Replace the text between the markers of a benchmark in the page. Raises SystemExit if the page lacks them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} lacks the lines {begin} and {end}")
    page.write_text(f"{before}{begin}\n{block}\n{end}{after}")


def machine() -> str:
    """Where and when something is measured."""
    model = "unknown processor"
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name")).split(": ", 1)[1]
    system, cores = os.uname(), len(os.sched_getaffinity(0))
    return (
        f"{cores} cores ({model}), {system.sysname} {system.release}, {time.strftime('%Y-%m-%d')}"
    )
