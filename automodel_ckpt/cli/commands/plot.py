"""``ckpt plot``: plot the curves of one or more runs as an HTML page, a PNG image, or text on the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.cli.paths import run_around
from automodel_ckpt.cli.terminal import can_print, print_path, printable
from automodel_ckpt.errors import EXIT_DONE, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.report.history import History, Series

_TERMINAL = (
    ("loss", "loss"),
    ("val_loss", "validation"),
    ("grad_norm", "grad norm"),
    ("lr", "lr"),
    ("tps", "tok/s"),
)
# Columns that a line takes beside its curve, at most.
_BESIDE = 40


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe the command ``ckpt plot``."""
    command.description = (
        "Plot the curves of one or more runs: loss with checkpoints, LOWEST_VAL and resumes, gradient "
        "norm, learning rate, throughput, and the cost of saves. Without --output, small plots are printed."
    )
    command.add_argument(
        "paths",
        nargs="*",
        default=["."],
        metavar="RUN",
        help="run directories, or paths inside them (default: current directory)",
    )
    command.add_argument(
        "--output", "-o", metavar="FILE", help="write a standalone .html page or a .png image"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run ``ckpt plot``. Raises :class:`CheckpointUnusable` if a path contains no run."""
    from automodel_ckpt.report.history import read_history

    directories = [run_around(Path(path)) or Path(path) for path in arguments.paths]
    runs = []
    for path, name in zip(directories, _names(directories), strict=True):
        runs.append(read_history(path, name))
    if arguments.output:
        _write(runs, Path(arguments.output))
    if arguments.json:
        print(json.dumps([_document(run) for run in runs], indent=2))
    elif arguments.output:
        print_path(arguments.output)
    else:
        for run in runs:
            print("\n".join(_lines(run)))
    return EXIT_DONE


def _names(paths: list[Path]) -> list[str]:
    """Name each run by the last parts of its path, as many as are needed to distinguish the runs."""
    all_parts = [path.absolute().parts for path in paths]
    longest = max(map(len, all_parts))
    names: list[str] = []
    for depth in range(1, longest + 1):
        names = ["/".join(parts[-depth:]) for parts in all_parts]
        are_unique = len(set(names)) == len(names)
        if are_unique and names != ["checkpoints"]:
            break
    return names


def _write(runs: list[History], file: Path) -> None:
    if file.suffix == ".png":
        from automodel_ckpt.report.picture import write_picture

        write_picture(runs, file)
    elif file.suffix in (".html", ".htm"):
        from automodel_ckpt.report.page import page

        file.write_bytes(page(runs).encode("utf-8", "backslashreplace"))  # a name may be no Unicode
    else:
        raise RecipeError(
            "unsupported file extension",
            where="--output",
            value=str(file),
            hint="use .html or .png",
        )


def _lines(run: History) -> Iterator[str]:
    import shutil

    from automodel_ckpt.report.page import summary
    from automodel_ckpt.report.sparkline import ASCII_BARS, BARS, sparkline

    width = max(10, min(shutil.get_terminal_size().columns - _BESIDE, 60))
    bars = BARS if can_print(BARS, sys.stdout) else ASCII_BARS
    yield printable(f"{run.name}: " + ", ".join(f"{what} {value}" for what, value in summary(run)))
    for field, title in _TERMINAL:
        series = run.series[field]
        if len(series):
            line = sparkline(series, width, bars)
            yield f"  {title:<10}  {line}  {series.values[0]:.4g} .. {series.values[-1]:.4g}"


def _document(run: History) -> dict[str, Any]:
    def points(series: Series) -> dict[str, list[float]]:
        return {"steps": list(series.steps), "values": list(series.values)}

    return {
        "name": run.name,
        "path": str(run.path),
        "num_tokens": run.num_tokens,
        "resumed_at": list(run.resumed_at),
        "checkpoints": [checkpoint.name for checkpoint in run.checkpoints],
        "series": {name: points(series) for name, series in run.series.items()},
    }
