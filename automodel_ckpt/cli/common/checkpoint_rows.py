"""Rows for ``ckpt ls``: what checkpoints and runs are, by their names, manifests and verification results."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.layout import CheckpointName
from automodel_ckpt.checkpoint.files.type_aliases import Metrics, Strings
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Summary, has_manifest
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.run.links import pinned_names
from automodel_ckpt.checkpoint.run.notes import Verification, recall_losses, recall_verifications
from automodel_ckpt.cli.common.external_checkpoints import first, is_external, row_fields
from automodel_ckpt.cli.common.paths import (
    has_name_of_checkpoint,
    run_directory,
    whole_checkpoint,
)
from automodel_ckpt.cli.common.remote import in_parallel, locate
from automodel_ckpt.errors import CheckpointUnusable

_SUPERSEDED = "superseded: the run was resumed from an earlier step"


@dataclass(frozen=True)
class Row:
    """A directory in a run, as ``ckpt ls`` shows it. The names of the fields are the keys of ``--json``.

    *created* and *verified* are in seconds since 1970. *reason* states why the directory is not a complete checkpoint.
    *damaged* means that the last ``ckpt verify`` found damage: then it is not complete until ``ckpt verify`` succeeds.
    *foreign* means that another program wrote it. *consumed_samples* and *metrics* are stated in its name then.
    """

    name: str
    complete: bool
    step: int | None = None
    epoch: int | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    nbytes: int | None = None
    created: float | None = None
    pointers: Strings = ()
    reason: str = ""
    foreign: bool = False
    verified: float | None = None
    damaged: bool = False
    consumed_samples: int | None = None
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class RunRow:
    """A run, as ``ckpt ls`` shows it in a list of runs. The names of the fields are the keys of ``--json``.

    *num_checkpoints* and *nbytes* count complete checkpoints. *step*, *epoch* and the losses are from the newest one;
    *lowest_val_loss* is the lowest of all.
    """

    run: str
    num_checkpoints: int = 0
    newest: str | None = None
    step: int | None = None
    epoch: int | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    lowest_val_loss: float | None = None
    nbytes: int = 0
    created: float | None = None


def rows_of(run: Path) -> list[Row]:
    """Return a row for each directory of a run that is, or looks like, a checkpoint; oldest first."""
    pointers = _pointers(run)
    notes = recall_verifications(run)
    # Pointers and pins are links to checkpoints, which have their own rows; a link with the name of a checkpoint leads
    # to one that was moved to another disk.
    named = {str(name) for name in resume.checkpoint_names(run)}
    candidates = [
        Path(entry.path)
        for entry in os.scandir(run)
        if (entry.is_symlink() and entry.name in named) or entry.is_dir(follow_symlinks=False)
    ]
    rows = [row_of(path, pointers, notes) for path in candidates if _looks_like_checkpoint(path)]
    rows += [
        _unusable_row(target, "missing: no such checkpoint", names)
        for target, names in pointers.items()
        if not os.path.lexists(run / target)
    ]
    return sorted(rows, key=_row_order)


def remote_rows(url: str) -> list[Row]:
    """Return a row for each checkpoint of a run in an object store, or for the one that *url* names; oldest first.

    Raises :class:`CheckpointUnusable` if there is none.
    """
    run, only = locate(url)
    pointers = _by_target((pointer, run.pointed(pointer)) for pointer in layout.POINTERS)
    named = [name for name in run.names() if only in (None, str(name))]

    def row(name: CheckpointName) -> Row:
        names = tuple(pointers.get(str(name), ()))
        found = run.checkpoint(name)
        if found is not None:
            return _summary_row(Path(str(name)), found.summary, names, None)
        reason = "incomplete: an upload is in progress or was interrupted"
        if run.is_superseded(str(name)):
            reason = _SUPERSEDED
        return _unusable_row(str(name), reason, names)

    rows = in_parallel(row, named)
    if not rows:
        raise CheckpointUnusable("no checkpoints found", run.store, "", "check the URL")
    return sorted(rows, key=_row_order)


def single_row(path: Path) -> Row:
    """Return the row of one checkpoint, with the pointers and verification results of its run."""
    checkpoint = whole_checkpoint(path)
    run = checkpoint.parent
    if run_directory(run) != run:
        return row_of(checkpoint, {}, {})
    return row_of(checkpoint, _pointers(run), recall_verifications(run))


def run_row(above: Path, run: Path) -> RunRow:
    """Return the row of a run. Its name is relative to the directory *above*."""
    from automodel_ckpt.checkpoint.run.maintenance import repeated_bytes

    name = os.path.relpath(run, above)
    complete = [row for row in rows_of(run) if row.complete and "superseded" not in row.reason]
    if not complete:
        return RunRow(name)
    newest = max(complete, key=lambda row: (row.step or 0, row.epoch or 0))
    # min() of values with NaN depends on their order.
    losses = [row.val_loss for row in complete if row.val_loss is not None]
    val_losses = [loss for loss in losses if not math.isnan(loss)]
    # Checkpoints can share files, which take their bytes once.
    repeated = repeated_bytes([run / row.name for row in complete])
    return RunRow(
        run=name,
        num_checkpoints=len(complete),
        newest=newest.name,
        step=newest.step,
        epoch=newest.epoch,
        train_loss=newest.train_loss,
        val_loss=newest.val_loss,
        lowest_val_loss=min(val_losses, default=None),
        nbytes=sum(row.nbytes or 0 for row in complete) - repeated,
        created=newest.created,
    )


def named_rows(paths: Sequence[Path]) -> list[Row]:
    """Return a row for each checkpoint of another program in one directory, ranked by the metric in their names."""
    from automodel_ckpt.convert.imports.file_names import last_of, parse_name, rank

    metadata = {path.name: parse_name(path.name) for path in paths}
    ranking = rank(metadata)
    order = list(ranking.names) if ranking is not None else []
    last = last_of(metadata)
    rows: list[Row] = []
    for path in paths:
        found, metrics = metadata[path.name], metadata[path.name].metrics
        notes = ("last",) if path.name in last else ()
        if ranking is not None and path.name == order[0]:
            notes = (ranking.label, *notes)
        row = _row_without_manifest(path, found.step, found.epoch, notes)
        reason = row.reason
        if ranking is not None and path.name in order:
            place = f"{order.index(path.name) + 1} of {len(order)}"
            reason = f"{ranking.metric} {metrics[ranking.metric]:g}: {place}; {reason}"
        # What the files state counts more than the name.
        train, val = metrics.get("train_loss", metrics.get("loss")), metrics.get("val_loss")
        rows.append(
            replace(
                row,
                reason=reason,
                train_loss=first(row.train_loss, train),
                val_loss=first(row.val_loss, val),
                consumed_samples=found.consumed_samples,
                metrics=metrics,
            )
        )
    return sorted(rows, key=_row_order)


def row_of(
    path: Path, pointers: Mapping[str, Sequence[str]], notes: Mapping[str, Verification]
) -> Row:
    """Return the row of the directory *path*.

    *pointers* and *notes* map the names of the run's checkpoints to their pointers and verification results.
    """
    name = path.name
    pointers_here = tuple(pointers.get(name, ()))
    if layout.is_staging(name):
        return _unusable_row(name, "incomplete: a save is in progress or was killed")
    if path.is_symlink() and not path.is_dir():
        reason = f"moved to {os.readlink(path)}, which does not exist"
        return _unusable_row(name, reason, pointers_here)
    try:
        os.lstat(path / layout.MANIFEST)
    except PermissionError as error:
        return _unusable_row(name, f"cannot be read: {error.strerror}", pointers_here)
    except OSError:
        return _row_without_manifest(path, *_position(name), pointers_here)
    try:
        summary = Summary.read(path)
    except CheckpointUnusable as error:
        problem = error.problems[0]
        return _unusable_row(name, f"{problem.what}: {problem.value}", pointers_here)
    return _summary_row(path, summary, pointers_here, notes.get(name))


def _summary_row(path: Path, summary: Summary, pointers: Strings, note: Verification | None) -> Row:
    """Return the row of a checkpoint with a readable manifest."""
    is_damaged = note is not None and not note.ok
    reason = ""
    if is_damaged:
        reason = "damaged: run `ckpt verify` for details"
    elif layout.is_superseded(path.name):
        reason = _SUPERSEDED
    elif not summary.has_optimizer:
        reason = "weights only"
    elif path.is_symlink():
        reason = f"moved to {os.readlink(path)}"
    # A published checkpoint never changes: later validations are stored next to it.
    losses = {**summary.losses, **recall_losses(path, summary.digest)}
    return Row(
        path.name,
        complete=not is_damaged,
        step=summary.step,
        epoch=summary.epoch,
        train_loss=_number(losses.get("train_loss")),
        val_loss=_number(losses.get("val_loss")),
        nbytes=summary.nbytes,
        created=summary.created,
        pointers=pointers,
        reason=reason,
        verified=note.time if note else None,
        damaged=is_damaged,
    )


def _row_without_manifest(
    path: Path, step: int | None, epoch: int | None, pointers: Strings
) -> Row:
    fields = row_fields(path)
    if fields is None:
        what = "external" if step is None else "torn or external"
        fields = {"reason": f"{what}: no {layout.MANIFEST}"}
    else:
        fields["train_loss"] = _number(fields["train_loss"])
        fields["val_loss"] = _number(fields["val_loss"])
        # As in an import, the files count more than the name: NeMo AutoModel's names count steps from 0.
        step = first(fields.pop("step"), step)
        epoch = first(fields.pop("epoch"), epoch)
    return Row(path.name, False, step, epoch, pointers=pointers, **fields)


def _unusable_row(name: str, reason: str, pointers: Sequence[str] = ()) -> Row:
    """Return the row of what has the name of a checkpoint and is none, for the *reason*."""
    step, epoch = _position(name)
    return Row(name, False, step, epoch, pointers=tuple(pointers), reason=reason)


def _row_order(row: Row) -> tuple[bool, int, int, str]:
    return row.step is None, row.step or 0, row.epoch or 0, row.name


def _position(name: str) -> tuple[int | None, int | None]:
    """Return the step and the epoch in the name of a checkpoint or of its staging directory.

    Returns None when it has none.
    """
    parsed = layout.parse_checkpoint_name(layout.staged_name(name) or name)
    return (parsed.step, parsed.epoch) if parsed else (None, None)


def _pointers(run: Path) -> dict[str, list[str]]:
    """Map the name of each checkpoint to the pointers to it, and ``pinned``."""
    links = [(pointer, commit.pointed(run, pointer)) for pointer in layout.POINTERS]
    return _by_target([*links, *(("pinned", name) for name in pinned_names(run))])


def _by_target(links: Iterable[tuple[str, str | None]]) -> dict[str, list[str]]:
    """Map the targets of links to the names of the links. Targets that are None are left out."""
    names: dict[str, list[str]] = {}
    for name, target in links:
        if target is not None:
            names.setdefault(target, []).append(name)
    return names


def _looks_like_checkpoint(path: Path) -> bool:
    is_ours = has_name_of_checkpoint(path.name) or has_manifest(path)
    return is_ours or os.path.lexists(path / "model") or is_external(path)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)
