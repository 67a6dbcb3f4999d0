"""``ckpt ls``: the checkpoints of a run, or the runs of a directory."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.cli.commands import external
from automodel_ckpt.cli.paths import add_path, run_directory, runs_below, whole_checkpoint
from automodel_ckpt.cli.terminal import age_text, coloured, fitted, json_text, printable, size_text
from automodel_ckpt.errors import EXIT_DONE, CheckpointUnusable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.run.verification_results import Note

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
# What a narrow terminal does without, in this order; the name, the step and the last column always stay.
_DROPPED_FIRST = ("epoch", "verified", "train loss", "size", "age", "complete", "val loss")
_RUN_TITLES = ("run", "checkpoints", "newest", "train loss", "val loss", "lowest", "size", "age")
_RUN_DROPPED_FIRST = ("train loss", "size", "val loss", "checkpoints", "age", "lowest")


@dataclass(frozen=True, slots=True)
class Row:
    """A directory of a run as ``ckpt ls`` shows it. *reason* says why it is no complete checkpoint; *verified* is when
    its files were compared last (seconds since 1970), *damaged* that damage was found then: such a checkpoint is not
    complete until `ckpt verify` finds it intact."""

    name: str
    complete: bool
    step: int | None = None
    epoch: int | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    nbytes: int | None = None
    created: float | None = None
    pointers: tuple[str, ...] = ()
    reason: str = ""
    foreign: bool = False
    verified: float | None = None
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run among others: how many checkpoints are complete, what they take, and the newest of them."""

    run: str
    num_checkpoints: int
    newest: str | None
    step: int | None
    epoch: int | None
    train_loss: float | None
    val_loss: float | None
    lowest_val_loss: float | None
    nbytes: int
    created: float | None


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``ckpt``'s."""
    command: argparse.ArgumentParser = commands.add_parser(
        "ls",
        help="list checkpoints or runs",
        description="List the checkpoints of a run, or the runs in a directory.",
    )
    add_path(command)
    return command


def ls(arguments: argparse.Namespace) -> int:
    """Run the command."""
    path = Path(arguments.path)
    run = run_directory(path)
    runs: list[Path] = []
    if run != path and path.is_dir() and not path.is_symlink():
        runs = [*runs_below(path)]
    if runs and runs != [run]:
        return _print_runs([_run_row(path, each) for each in runs], arguments.json)
    rows = [*rows_of(run)] if run else [_alone(path)]
    if arguments.json:
        print(json_text([asdict(row) for row in rows]))
    else:
        _print_rows(rows)
    return EXIT_DONE


def _alone(path: Path) -> Row:
    """One checkpoint, with what its run says of it."""
    checkpoint = whole_checkpoint(path)
    run = checkpoint.parent if run_directory(checkpoint.parent) == checkpoint.parent else None
    return row_of(checkpoint, _pointers(run) if run else {}, _notes(run) if run else {})


def rows_of(run: Path) -> Iterator[Row]:
    """A row for each directory of a run that is, or might be taken for, a checkpoint; oldest first."""
    from automodel_ckpt.checkpoint.run import resume

    pointers, notes = _pointers(run), _notes(run)
    directories = [
        Path(entry.path) for entry in os.scandir(run) if entry.is_dir(follow_symlinks=False)
    ]
    checkpoints = [run / str(name) for name in resume.checkpoint_names(run)]
    # A checkpoint that was moved to another disk is a link to its new place.
    moved = [path for path in checkpoints if path.is_symlink()]
    rows = []
    for path in (*directories, *moved):
        if _looks_like_checkpoint(path):
            rows.append(row_of(path, pointers, notes))
    for name, pointing in pointers.items():
        if not os.path.lexists(run / name):
            rows.append(_missing(name, pointing))
    yield from sorted(rows, key=_row_order)


def _row_order(row: Row) -> tuple[bool, int, int, str]:
    return row.step is None, row.step or 0, row.epoch or 0, row.name


def _missing(name: str, pointers: Sequence[str]) -> Row:
    """The row of a checkpoint that only pointers or a pin name."""
    from automodel_ckpt.checkpoint import layout

    parsed = layout.parse_checkpoint_name(name)
    step, epoch = (parsed.step, parsed.epoch) if parsed else (None, None)
    return Row(
        name, False, step, epoch, pointers=tuple(pointers), reason="missing: no such checkpoint"
    )


def _pointers(run: Path) -> dict[str, list[str]]:
    """The pointers to each checkpoint, and ``pinned``."""
    from automodel_ckpt.checkpoint import commit, layout
    from automodel_ckpt.checkpoint.run.links import pinned_names

    pointers: dict[str, list[str]] = {}
    for pointer in layout.POINTERS:
        if (target := commit.pointed(run, pointer)) is not None:
            pointers.setdefault(target, []).append(pointer)
    for name in pinned_names(run):
        pointers.setdefault(name, []).append("pinned")
    return pointers


def _notes(run: Path) -> Mapping[str, Note]:
    from automodel_ckpt.checkpoint.run.verification_results import recall

    return recall(run)


def _looks_like_checkpoint(path: Path) -> bool:
    from automodel_ckpt.checkpoint import layout

    named = (
        layout.parse_checkpoint_name(path.name)
        or layout.is_superseded(path.name)
        or layout.is_staging(path.name)
    )
    return (
        bool(named)
        or any(os.path.lexists(path / name) for name in (layout.MANIFEST, "model"))
        or external.is_known(path)
    )


def row_of(path: Path, pointers: Mapping[str, Sequence[str]], notes: Mapping[str, Note]) -> Row:
    """What is known of the checkpoint directory *path*: *pointers* to, and *notes* on, each name of its run."""
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.checkpoint.manifest import Summary
    from automodel_ckpt.checkpoint.run.late_validations import recall

    name = layout.parse_checkpoint_name(layout.staged_name(path.name) or path.name)
    step, epoch = (name.step, name.epoch) if name else (None, None)
    here = tuple(pointers.get(path.name, ()))
    if layout.is_staging(path.name):
        reason = "incomplete: a save is in progress or was killed"
        return Row(path.name, False, step, epoch, reason=reason)
    moved_to = f"moved to {os.readlink(path)}" if path.is_symlink() else ""
    if moved_to and not path.is_dir():
        return Row(
            path.name, False, step, epoch, pointers=here, reason=f"{moved_to}, which does not exist"
        )
    if not os.path.lexists(path / layout.MANIFEST):
        return _without_manifest(path, step, epoch, here)
    try:
        summary = Summary.read(path)
    except CheckpointUnusable as error:
        problem = error.problems[0]
        return Row(
            path.name, False, step, epoch, pointers=here, reason=f"{problem.what}: {problem.value}"
        )
    note = notes.get(path.name)
    damaged = note is not None and not note.ok
    reasons = (
        "damaged: run `ckpt verify` for details" if damaged else "",
        "superseded: the run was resumed from an earlier step"
        if layout.is_superseded(path.name)
        else "",
        "" if summary.has_optimizer else "weights only",
        moved_to,
    )
    losses = {**summary.losses, **recall(path, summary.digest)}
    train_loss, val_loss = (_number(losses.get(key)) for key in ("train_loss", "val_loss"))
    return Row(
        path.name,
        not damaged,
        summary.step,
        summary.epoch,
        train_loss,
        val_loss,
        summary.nbytes,
        summary.created,
        here,
        next(filter(None, reasons), ""),
        verified=note.time if note else None,
        damaged=damaged,
    )


def _without_manifest(
    path: Path, step: int | None, epoch: int | None, pointers: tuple[str, ...]
) -> Row:
    from automodel_ckpt.checkpoint import layout

    if (facts := external.facts(path)) is not None:
        facts |= {key: _number(facts[key]) for key in ("train_loss", "val_loss")}
        return Row(path.name, False, step, epoch, pointers=pointers, **facts)
    what = "external" if step is None else "torn or external"
    return Row(
        path.name, False, step, epoch, pointers=pointers, reason=f"{what}: no {layout.MANIFEST}"
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _run_row(above: Path, run: Path) -> RunRow:
    name = os.path.relpath(run, above)
    complete = [row for row in rows_of(run) if row.complete and "superseded" not in row.reason]
    if not complete:
        return RunRow(name, 0, None, None, None, None, None, None, 0, None)
    newest = max(complete, key=lambda row: (row.step or 0, row.epoch or 0))
    val_losses = [row.val_loss for row in complete if row.val_loss is not None]
    numbers = [loss for loss in val_losses if not math.isnan(loss)]
    return RunRow(
        run=name,
        num_checkpoints=len(complete),
        newest=newest.name,
        step=newest.step,
        epoch=newest.epoch,
        train_loss=newest.train_loss,
        val_loss=newest.val_loss,
        lowest_val_loss=min(numbers, default=None),
        nbytes=sum(row.nbytes or 0 for row in complete),
        created=newest.created,
    )


# ---------------------------------------------------------------- for people


def _print_rows(rows: Sequence[Row]) -> None:
    cells = [_cells(row) for row in rows]
    head, *lines = fitted([_TITLES, *cells], range(1, 7), _DROPPED_FIRST, wrap_last=True)
    print(coloured(head, "bold", sys.stdout))
    for row, line in zip(rows, lines, strict=True):
        is_usable = not row.damaged and (row.complete or row.foreign)
        if not is_usable:
            line = coloured(line, "red", sys.stdout)
        print(line)


def _cells(row: Row) -> tuple[str, ...]:
    from automodel_ckpt.checkpoint import layout

    notes = ", ".join((*row.pointers, *([row.reason] if row.reason else [])))
    complete = "damaged" if row.damaged else "yes" if row.complete else "?" if row.foreign else "no"
    verified = _age(row.verified)
    name = layout.staged_name(row.name) or row.name
    return (
        printable(name),
        *_counts(row.step, row.epoch),
        *_losses(row.train_loss, row.val_loss),
        _size(row.nbytes),
        _age(row.created),
        complete,
        verified,
        printable(notes),
    )


def _print_runs(rows: Sequence[RunRow], as_json: bool) -> int:
    if as_json:
        print(json_text([asdict(row) for row in rows]))
        return EXIT_DONE
    cells = [
        (
            printable(row.run),
            str(row.num_checkpoints),
            printable(row.newest or "none"),
            *_losses(row.train_loss, row.val_loss, row.lowest_val_loss),
            _size(row.nbytes),
            _age(row.created),
        )
        for row in rows
    ]
    head, *lines = fitted([_RUN_TITLES, *cells], (1, *range(3, 8)), _RUN_DROPPED_FIRST)
    print(coloured(head, "bold", sys.stdout))
    print("\n".join(lines))
    return EXIT_DONE


def _counts(*values: int | None) -> Iterable[str]:
    return ("" if value is None else str(value) for value in values)


def _losses(*values: float | None) -> Iterable[str]:
    return ("" if value is None else f"{value:.4f}" for value in values)


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else size_text(nbytes)


def _age(seconds: float | None) -> str:
    return "" if seconds is None else age_text(seconds)
