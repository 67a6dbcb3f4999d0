"""``ckpt ls``: list the checkpoints of a run, the runs in a directory, or checkpoints of other programs."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.base.terminal import colored
from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Strings
from automodel_ckpt.cli.common.arguments import PATH
from automodel_ckpt.cli.common.checkpoint_rows import (
    Row,
    RunRow,
    named_rows,
    remote_rows,
    rows_of,
    run_row,
    single_row,
)
from automodel_ckpt.cli.common.output import age_text, fitted, print_document
from automodel_ckpt.cli.common.paths import run_directory, runs_below
from automodel_ckpt.errors import printable

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
USAGE = f"""
List the checkpoints of a run, the runs in a directory, or checkpoints of other programs whose names state steps and
metrics.

{PATH}
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt ls``. Raises :class:`CheckpointUnusable` if there is neither a run nor a checkpoint."""
    if is_url(arguments.path):
        return _print(remote_rows(arguments.path), arguments)
    from automodel_ckpt.convert.imports.external import named_checkpoints

    path = Path(arguments.path)
    run = run_directory(path)
    runs = []
    if run != path and path.is_dir() and not path.is_symlink():
        runs = list(runs_below(path))
    if runs and runs != [run]:
        rows = [run_row(path, each) for each in runs]
        cells = [_RUN_TITLES, *map(_run_cells, rows)]
        head, *lines = fitted(cells, (1, *range(3, 8)), _RUN_DROPPED_FIRST)
        return _print_table(rows, head, lines, arguments)
    if run:
        return _print(rows_of(run), arguments)
    named = named_checkpoints(path)
    return _print(named_rows(named) if named else [single_row(path)], arguments)


def _print(rows: Sequence[Row], arguments: Namespace) -> int:
    head, *lines = fitted([_TITLES, *map(_cells, rows)], range(1, 7), _DROPPED_FIRST)
    for number, row in enumerate(rows):
        if row.damaged or not (row.complete or row.foreign):
            lines[number] = colored(lines[number], "red", sys.stdout)
    return _print_table(rows, head, lines, arguments)


def _print_table(rows: Sequence[Any], head: str, lines: list[str], arguments: Namespace) -> int:
    head = colored(head, "bold", sys.stdout)
    return print_document(arguments, [asdict(row) for row in rows], [head, *lines])


def _cells(row: Row) -> Strings:
    if row.damaged:
        complete = "damaged"
    elif row.complete:
        complete = "yes"
    else:
        complete = "?" if row.foreign else "no"
    notes = [*row.pointers, *([row.reason] if row.reason else [])]
    return (
        printable(layout.staged_name(row.name) or row.name),
        _text(row.step),
        _text(row.epoch),
        _loss(row.train_loss),
        _loss(row.val_loss),
        _text(row.nbytes, size_text),
        _text(row.created, age_text),
        complete,
        _text(row.verified, age_text),
        printable(", ".join(notes)),
    )


def _run_cells(row: RunRow) -> Strings:
    return (
        printable(row.run),
        str(row.num_checkpoints),
        printable(row.newest or "none"),
        _loss(row.train_loss),
        _loss(row.val_loss),
        _loss(row.lowest_val_loss),
        _text(row.nbytes, size_text),
        _text(row.created, age_text),
    )


def _text(value: Any, form: Callable[[Any], str] = str) -> str:
    """The text of a cell, which is empty for an unknown value."""
    return "" if value is None else form(value)


def _loss(value: float | None) -> str:
    return _text(value, "{:.4f}".format)
