"""``ckpt ls``: list the checkpoints of a run, the runs in a directory, or checkpoints of other programs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.cli.common.arguments import add_path
from automodel_ckpt.cli.common.checkpoint_rows import (
    Row,
    RunRow,
    named_rows,
    remote_rows,
    rows_of,
    run_row,
    single_row,
)
from automodel_ckpt.cli.common.paths import run_directory, runs_below
from automodel_ckpt.cli.common.terminal import (
    age_text,
    coloured,
    fitted,
    json_text,
    printable,
    size_text,
)
from automodel_ckpt.errors import EXIT_DONE

_TITLES = (
    "checkpoint",
    "step",
    "epoch",
    "train loss",
    "val loss",
    "size",
    "age",
    "complete",
    "verified",
    "",
)
# Columns that are dropped on a narrow terminal, in this order. The name, the step and the last column always stay.
_DROPPED_FIRST = ("epoch", "verified", "train loss", "size", "age", "complete", "val loss")
_RUN_TITLES = ("run", "checkpoints", "newest", "train loss", "val loss", "lowest", "size", "age")
_RUN_DROPPED_FIRST = ("train loss", "size", "val loss", "checkpoints", "age", "lowest")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe the command ``ckpt ls``."""
    command.description = (
        "List the checkpoints of a run, the runs in a directory, or checkpoints of other programs whose names state "
        "steps and metrics."
    )
    add_path(command)


def run(arguments: argparse.Namespace) -> int:
    """Run ``ckpt ls``. Raises :class:`CheckpointUnusable` if there is neither a run nor a checkpoint."""
    if is_url(arguments.path):
        _print(remote_rows(arguments.path), arguments)
        return EXIT_DONE
    from automodel_ckpt.convert.imports.external import named_checkpoints

    path = Path(arguments.path)
    run = run_directory(path)
    runs: list[Path] = []
    if run != path and path.is_dir() and not path.is_symlink():
        runs = list(runs_below(path))
    if runs and runs != [run]:
        run_rows = [run_row(path, each) for each in runs]
        _print_runs(run_rows, arguments.json)
        return EXIT_DONE
    named = [] if run else named_checkpoints(path)
    if named:
        rows = named_rows(named)
    elif run:
        rows = rows_of(run)
    else:
        rows = [single_row(path)]
    _print(rows, arguments)
    return EXIT_DONE


def _print(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json_text([asdict(row) for row in rows]))
    else:
        _print_rows(rows)


def _print_rows(rows: Sequence[Row]) -> None:
    cells: list[Sequence[str]] = [_TITLES]
    for row in rows:
        cells.append(_cells(row))
    head, *lines = fitted(cells, range(1, 7), _DROPPED_FIRST, wrap_last=True)
    print(coloured(head, "bold", sys.stdout))
    for row, line in zip(rows, lines, strict=True):
        is_usable = (row.complete or row.foreign) and not row.damaged
        if not is_usable:
            line = coloured(line, "red", sys.stdout)
        print(line)


def _cells(row: Row) -> tuple[str, ...]:
    from automodel_ckpt.checkpoint.files import layout

    if row.damaged:
        complete = "damaged"
    elif row.complete:
        complete = "yes"
    else:
        complete = "?" if row.foreign else "no"
    notes = list(row.pointers)
    if row.reason:
        notes.append(row.reason)
    return (
        printable(layout.staged_name(row.name) or row.name),
        _count(row.step),
        _count(row.epoch),
        _loss(row.train_loss),
        _loss(row.val_loss),
        _size(row.nbytes),
        _age(row.created),
        complete,
        _age(row.verified),
        printable(", ".join(notes)),
    )


def _print_runs(rows: Sequence[RunRow], as_json: bool) -> None:
    if as_json:
        print(json_text([asdict(row) for row in rows]))
        return
    cells: list[Sequence[str]] = [_RUN_TITLES]
    for row in rows:
        cells.append(_run_cells(row))
    head, *lines = fitted(cells, (1, *range(3, 8)), _RUN_DROPPED_FIRST)
    print(coloured(head, "bold", sys.stdout))
    print("\n".join(lines))


def _run_cells(row: RunRow) -> tuple[str, ...]:
    return (
        printable(row.run),
        str(row.num_checkpoints),
        printable(row.newest or "none"),
        _loss(row.train_loss),
        _loss(row.val_loss),
        _loss(row.lowest_val_loss),
        _size(row.nbytes),
        _age(row.created),
    )


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else size_text(nbytes)


def _age(seconds: float | None) -> str:
    return "" if seconds is None else age_text(seconds)
