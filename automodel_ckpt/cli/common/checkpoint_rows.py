"""Rows for ``ckpt ls``: what checkpoints and runs are, by their names, manifests and verification results."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.cli.common import external_checkpoints
from automodel_ckpt.cli.common.paths import run_directory, whole_checkpoint
from automodel_ckpt.cli.common.remote import in_parallel, locate
from automodel_ckpt.errors import CheckpointUnusable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.files.layout import CheckpointName
    from automodel_ckpt.checkpoint.parts.manifest import Summary
    from automodel_ckpt.checkpoint.run.verification_results import Note


@dataclass(frozen=True, slots=True)
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
    pointers: tuple[str, ...] = ()
    reason: str = ""
    foreign: bool = False
    verified: float | None = None
    damaged: bool = False
    consumed_samples: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run, as ``ckpt ls`` shows it in a list of runs. The names of the fields are the keys of ``--json``.

    *num_checkpoints* and *nbytes* count complete checkpoints. *step*, *epoch* and the losses are those of the newest
    one; *lowest_val_loss* is the lowest of all.
    """

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


def rows_of(run: Path) -> list[Row]:
    """Return a row for each directory of a run that is, or looks like, a checkpoint; oldest first."""
    from automodel_ckpt.checkpoint.run import resume

    pointers = _pointers(run)
    notes = _verification_notes(run)
    candidates = []
    for entry in os.scandir(run):
        # Pointers and pins are links to checkpoints, which have their own rows.
        if entry.is_dir(follow_symlinks=False):
            candidates.append(Path(entry.path))
    for name in resume.checkpoint_names(run):
        path = run / str(name)
        # It was moved to another disk, with a link to it.
        if path.is_symlink():
            candidates.append(path)
    rows = []
    for path in candidates:
        if _looks_like_checkpoint(path):
            rows.append(row_of(path, pointers, notes))
    for target, names in pointers.items():
        if not os.path.lexists(run / target):
            rows.append(_missing_row(target, names))
    return sorted(rows, key=_row_order)


def remote_rows(url: str) -> list[Row]:
    """Return a row for each checkpoint of a run in an object store, or for the one that *url* names; oldest first.

    Raises :class:`CheckpointUnusable` if there is none.
    """
    from automodel_ckpt.checkpoint.files import layout

    run, only = locate(url)
    pointers: dict[str, list[str]] = {}
    for pointer in layout.POINTERS:
        target = run.pointed(pointer)
        if target is not None:
            pointers.setdefault(target, []).append(pointer)
    named = [name for name in run.names() if only in (None, str(name))]

    def row(name: CheckpointName) -> Row:
        names = tuple(pointers.get(str(name), ()))
        found = run.checkpoint(name)
        if found is not None:
            return _summary_row(Path(str(name)), found.summary, names, None)
        reason = "incomplete: an upload is in progress or was interrupted"
        if run.is_superseded(str(name)):
            reason = "superseded: the run was resumed from an earlier step"
        return Row(str(name), False, name.step, name.epoch, pointers=names, reason=reason)

    rows = in_parallel(row, named)
    if not rows:
        raise CheckpointUnusable(
            "no checkpoints found", where=str(run.store), value="", hint="check the URL"
        )
    return sorted(rows, key=_row_order)


def single_row(path: Path) -> Row:
    """Return the row of one checkpoint, with the pointers and verification results of its run."""
    checkpoint = whole_checkpoint(path)
    run = checkpoint.parent
    if run_directory(run) != run:
        return row_of(checkpoint, {}, {})
    return row_of(checkpoint, _pointers(run), _verification_notes(run))


def run_row(above: Path, run: Path) -> RunRow:
    """Return the row of a run, whose name is relative to the directory *above*."""
    from automodel_ckpt.checkpoint.run.shared_files import repeated_bytes

    name = os.path.relpath(run, above)
    complete = [row for row in rows_of(run) if row.complete and "superseded" not in row.reason]
    if not complete:
        return RunRow(name, 0, None, None, None, None, None, None, 0, None)
    newest = max(complete, key=lambda row: (row.step or 0, row.epoch or 0))
    val_losses = []
    for row in complete:
        # min() of values with NaN depends on their order.
        if row.val_loss is not None and not math.isnan(row.val_loss):
            val_losses.append(row.val_loss)
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
    rows: list[Row] = []
    for path in paths:
        found = metadata[path.name]
        if found.step is None:
            # The name states nothing, such as last.ckpt: then the file is read, which takes longer.
            stated = external_checkpoints.counters_in(path)
            found = replace(found, step=stated.step, epoch=stated.epoch)
            metadata[path.name] = found
    last = last_of(metadata)
    for path in paths:
        found = metadata[path.name]
        notes: list[str] = []
        if ranking is not None and path.name == ranking.names[0]:
            notes.append(ranking.label)
        if path.name in last:
            notes.append("last")
        row = _row_without_manifest(path, found.step, found.epoch, tuple(notes))
        if ranking is not None and path.name in ranking.names:
            place = ranking.names.index(path.name) + 1
            reason = f"{ranking.metric} {found.metrics[ranking.metric]:g}: {place} of {len(ranking.names)}"
            row = replace(row, reason=f"{reason}; {row.reason}")
        train_loss = found.metrics.get("train_loss", found.metrics.get("loss"))
        val_loss = found.metrics.get("val_loss")
        rows.append(
            replace(
                row,
                train_loss=row.train_loss if row.train_loss is not None else train_loss,
                val_loss=row.val_loss if row.val_loss is not None else val_loss,
                consumed_samples=found.consumed_samples,
                metrics=found.metrics,
            )
        )
    return sorted(rows, key=_row_order)


def row_of(path: Path, pointers: Mapping[str, Sequence[str]], notes: Mapping[str, Note]) -> Row:
    """Return the row of the directory *path*.

    *pointers* and *notes* map the names of the run's checkpoints to their pointers and verification results.
    """
    from automodel_ckpt.checkpoint.files import layout
    from automodel_ckpt.checkpoint.parts.manifest import Summary

    name = path.name
    step, epoch = _position(name)
    if layout.is_staging(name):
        reason = "incomplete: a save is in progress or was killed"
        return Row(name, False, step, epoch, reason=reason)
    pointers_here = tuple(pointers.get(name, ()))
    if path.is_symlink() and not path.is_dir():
        reason = f"moved to {os.readlink(path)}, which does not exist"
        return Row(name, False, step, epoch, pointers=pointers_here, reason=reason)
    try:
        has_manifest = bool(os.lstat(path / layout.MANIFEST))
    except PermissionError as error:
        reason = f"cannot be read: {error.strerror}"
        return Row(name, False, step, epoch, pointers=pointers_here, reason=reason)
    except OSError:
        has_manifest = False
    if not has_manifest:
        return _row_without_manifest(path, step, epoch, pointers_here)
    try:
        summary = Summary.read(path)
    except CheckpointUnusable as error:
        problem = error.problems[0]
        reason = f"{problem.what}: {problem.value}"
        return Row(name, False, step, epoch, pointers=pointers_here, reason=reason)
    return _summary_row(path, summary, pointers_here, notes.get(name))


def _summary_row(path: Path, summary: Summary, pointers: tuple[str, ...], note: Note | None) -> Row:
    """Return the row of a checkpoint whose manifest could be read."""
    from automodel_ckpt.checkpoint.files import layout
    from automodel_ckpt.checkpoint.run.late_validations import recall

    is_damaged = note is not None and not note.ok
    if is_damaged:
        reason = "damaged: run `ckpt verify` for details"
    elif layout.is_superseded(path.name):
        reason = "superseded: the run was resumed from an earlier step"
    elif not summary.has_optimizer:
        reason = "weights only"
    elif path.is_symlink():
        reason = f"moved to {os.readlink(path)}"
    else:
        reason = ""
    # A published checkpoint never changes: later validations are stored beside it.
    losses = {**summary.losses, **recall(path, summary.digest)}
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
    path: Path, step: int | None, epoch: int | None, pointers: tuple[str, ...]
) -> Row:
    from automodel_ckpt.checkpoint.files import layout

    fields = external_checkpoints.row_fields(path)
    if fields is None:
        what = "external" if step is None else "torn or external"
        fields = {"reason": f"{what}: no {layout.MANIFEST}"}
    else:
        fields["train_loss"] = _number(fields["train_loss"])
        fields["val_loss"] = _number(fields["val_loss"])
        # As in an import, the files count more than the name: NeMo AutoModel's names count steps from 0.
        stated_step, stated_epoch = fields.pop("step"), fields.pop("epoch")
        step = step if stated_step is None else stated_step
        epoch = epoch if stated_epoch is None else stated_epoch
    return Row(path.name, False, step, epoch, pointers=pointers, **fields)


def _missing_row(name: str, pointers: Sequence[str]) -> Row:
    """Return the row of a checkpoint that does not exist although *pointers* name it."""
    step, epoch = _position(name)
    reason = "missing: no such checkpoint"
    return Row(name, False, step, epoch, pointers=tuple(pointers), reason=reason)


def _row_order(row: Row) -> tuple[bool, int, int, str]:
    return row.step is None, row.step or 0, row.epoch or 0, row.name


def _position(name: str) -> tuple[int | None, int | None]:
    """Return the step and the epoch in the name of a checkpoint or of its staging directory; None if it has none."""
    from automodel_ckpt.checkpoint.files import layout

    parsed = layout.parse_checkpoint_name(layout.staged_name(name) or name)
    return (parsed.step, parsed.epoch) if parsed else (None, None)


def _pointers(run: Path) -> dict[str, list[str]]:
    """Map the name of each checkpoint to the pointers to it, and ``pinned``."""
    from automodel_ckpt.checkpoint.files import layout
    from automodel_ckpt.checkpoint.parts import commit
    from automodel_ckpt.checkpoint.run.links import pinned_names

    pointers: dict[str, list[str]] = {}
    for pointer in layout.POINTERS:
        target = commit.pointed(run, pointer)
        if target is not None:
            pointers.setdefault(target, []).append(pointer)
    for name in pinned_names(run):
        pointers.setdefault(name, []).append("pinned")
    return pointers


def _verification_notes(run: Path) -> Mapping[str, Note]:
    """Map the name of each checkpoint to the result of its last ``ckpt verify``."""
    from automodel_ckpt.checkpoint.run.verification_results import recall

    return recall(run)


def _looks_like_checkpoint(path: Path) -> bool:
    from automodel_ckpt.checkpoint.files import layout

    name = path.name
    if layout.parse_checkpoint_name(name) or layout.is_superseded(name) or layout.is_staging(name):
        return True
    if os.path.lexists(path / layout.MANIFEST) or os.path.lexists(path / "model"):
        return True
    return external_checkpoints.is_external(path)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)
