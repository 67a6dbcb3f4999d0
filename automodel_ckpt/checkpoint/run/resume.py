"""Which checkpoints a run has, which one a start uses, and which ones are kept. Imports no torch.

A start selects by the contents of the run directory and ``restore_from``. The trainer and ``ckpt`` use it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.options import Mode
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.commit import stamp
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run.notes import recall_losses
from automodel_ckpt.errors import CheckpointUnusable, unusable


@dataclass(frozen=True)
class Record:
    """The step and epoch of a checkpoint, and the metric that ranks it (None when its step was not validated)."""

    name: str
    step: int
    epoch: int
    metric: float | None = None


def newest_first(records: Iterable[Record]) -> list[Record]:
    """Sort records by step, then epoch, in descending order."""
    return sorted(records, key=lambda record: (record.step, record.epoch), reverse=True)


def metric_of(losses: Values, key: str) -> float | None:
    """Return the metric *key* in a checkpoint's losses, or None when it is missing or not a finite number."""
    value: Any = losses.get(key)
    # Not isinstance: True would rank as 1.0. Comparing does not convert an integer of hundreds of digits, and is False
    # for NaN.
    if type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    return None


def is_better(value: float | None, than: float | None, mode: Mode) -> bool:
    """Whether *value* is strictly better than the best metric so far (None: there is none)."""
    if value is None or not math.isfinite(value):
        return False
    if than is None:
        return True
    if mode == "min":
        return value < than
    return value > than


def ranked(records: Iterable[Record], mode: Mode) -> list[Record]:
    """Sort the records that have a metric from the best to the worst; of equal ones, the lowest step comes first."""
    sign = 1 if mode == "min" else -1
    known = []
    for record in records:
        if record.metric is not None and math.isfinite(record.metric):
            known.append((sign * record.metric, record.step, record.epoch, record))
    return [record for *_, record in sorted(known, key=lambda entry: entry[:3])]


def best_record(records: Iterable[Record], mode: Mode) -> Record | None:
    """Return the record with the best metric, and of equal ones the earliest. Returns None without metrics."""
    return next(iter(ranked(records, mode)), None)


@dataclass(frozen=True)
class KeepPolicy:
    """Which checkpoints are kept.

    These are the *last* ones (None: all of them), the *best* ones by metric, and milestones: checkpoints at a step that
    is a multiple of *every_steps* or in *steps*.
    """

    last: int | None = None
    best: int = 0
    every_steps: int | None = None
    steps: frozenset[int] = frozenset()
    mode: Mode = "min"

    def removable(
        self, records: Collection[Record], protected: Collection[str] = ()
    ) -> list[Record]:
        """Return the complete checkpoints of a run that the policy does not keep, oldest first.

        Never included: the newest one, and those *protected* by name (pointed to, pinned, just saved).
        """
        if self.last is None:
            return []
        ordered = newest_first(records)
        # The newest always stays: without a checkpoint, the run could not resume.
        num_last = max(self.last, 1)
        keep = set(protected)
        keep.update(record.name for record in ordered[:num_last])
        # As for LOWEST_VAL.
        keep.update(record.name for record in ranked(ordered, self.mode)[: self.best])
        removed = []
        for record in reversed(ordered):
            is_milestone = record.step in self.steps or (
                self.every_steps is not None and record.step % self.every_steps == 0
            )
            if record.name not in keep and not is_milestone:
                removed.append(record)
        return removed


# ---------------------------------------------------------------- checkpoints of a run


Known = dict[str, tuple[tuple[int, int, int], Record]]
"""A cache of records by name, each with the :func:`.commit.stamp` that the checkpoint had when it was read."""


def checkpoint_names(root: Path) -> list[layout.CheckpointName]:
    """List the directories of a run that are named like checkpoints, newest first. Does not read their contents.

    A link to a directory elsewhere counts as a checkpoint that was moved to another disk, even if that directory is
    missing. A link to another checkpoint of the same run does not: it is a second name of that checkpoint.
    """
    try:
        entries = list(os.scandir(root))
    except FileNotFoundError:
        return []
    names = []
    for entry in entries:
        name = layout.parse_checkpoint_name(entry.name)
        if name is None:
            continue
        if entry.is_dir(follow_symlinks=False) or is_moved(Path(entry.path)):
            names.append(name)
    return sorted(names, reverse=True)


def is_moved(checkpoint: Path) -> bool:
    """Whether this is a link to a checkpoint outside of the run directory, which was moved to another disk."""
    if not checkpoint.is_symlink():
        return False
    return os.path.dirname(os.path.realpath(checkpoint)) != os.path.realpath(checkpoint.parent)


def records(root: Path, metric_key: str, known: Known | None = None) -> Iterator[Record]:
    """Yield the complete checkpoints of a run, newest first, with the metric that ranks them. Others are skipped.

    *known* is a cache of records.
    """
    known = {} if known is None else known
    for name in checkpoint_names(root):
        found = record(root, str(name), metric_key, known)
        if found is not None:
            yield found


def newest(root: Path, memory: Path | None = None, newest_step: int | None = None) -> Record | None:
    """Return the newest complete checkpoint of a run, without its metric, or None when there is none.

    *memory* is the directory of the run's memory checkpoints. With *newest_step*, later steps are left out.
    """
    for path in _newest_paths(root, memory):
        found = record(path.parent, path.name, "", {})
        if found is not None and (newest_step is None or found.step <= newest_step):
            return found
    return None


def skipped_warning(root: Path, used: Record) -> str | None:
    """Describe the checkpoints that are newer than *used*, the newest complete one. Returns None when there is none.

    A command that is given a run must not silently use the weights of an earlier step.
    """
    reasons = []
    for name in checkpoint_names(root):
        if name.step <= used.step:
            break
        try:
            Summary.read(root / str(name))
        except CheckpointUnusable as error:
            problem = error.problems[0]
            reasons.append(f"{name} cannot be used ({problem.what}: {problem.value})")
        except OSError as error:
            reasons.append(f"{name} cannot be used ({error.strerror})")
    if not reasons:
        return None
    return f"using {root / used.name}: {'; '.join(reasons)}"


def expected(root: Path, restore_from: str | None, memory: Path | None = None) -> Summary | None:
    """Read the summary of the first of :func:`candidates` that can be read, or return None. Verifies nothing."""
    # The load reports a missing or damaged one.
    with contextlib.suppress(CheckpointUnusable):
        for path in candidates(root, restore_from, memory).candidates:
            with contextlib.suppress(CheckpointUnusable):
                return Summary.read(path)
    return None


def validated_losses(root: Path) -> Iterator[Values]:
    """Yield the losses of each complete checkpoint of a run at a validated step, newest first."""
    for name in checkpoint_names(root):
        checkpoint = root / str(name)
        with contextlib.suppress(OSError, CheckpointUnusable):
            summary = Summary.read(checkpoint)
            late = recall_losses(checkpoint, summary.digest)
            if summary.validated or late:
                yield {**summary.losses, **late}


def record(root: Path, name: str, metric_key: str, known: Known) -> Record | None:
    """Return the record of the checkpoint *name*, or None when the checkpoint is missing or damaged.

    It is taken from *known* if the manifest has not changed.
    """
    parsed = layout.parse_checkpoint_name(name)
    if parsed is None:
        return None
    try:
        # Before reading the manifest: if it is replaced meanwhile, the stamp differs next time.
        current = stamp(root / name)
        if name in known and known[name][0] == current:
            return known[name][1]
        summary = Summary.read(root / name)
    except (OSError, CheckpointUnusable):
        return None
    late = recall_losses(root / name, summary.digest)
    metric = None
    if summary.validated or late:
        metric = metric_of({**summary.losses, **late}, metric_key)
    found = Record(name, parsed.step, parsed.epoch, metric)
    known[name] = (current, found)
    return found


@dataclass(frozen=True)
class Request:
    """The checkpoints to try, in order. With *by_name*, the user selected one, and no other may be used."""

    candidates: list[Path]
    by_name: bool
    note: str | None = None


def candidates(root: Path, restore_from: str | None, memory: Path | None = None) -> Request:
    """List the checkpoints to try, in order. *memory* is the directory of the run's memory checkpoints.

    Raises :class:`CheckpointUnusable` if the named one does not exist.

    ``restore_from`` (a pointer, a checkpoint's name, or a path) applies until the run has published a newer checkpoint
    under the same request, so that a requeued command resumes instead of rewinding.
    """
    newest = _newest_paths(root, memory)
    if restore_from is None:
        return Request(newest, by_name=False)
    continued = _published_under(newest, root, restore_from)
    if continued is not None:
        note = f"restore_from {restore_from} was applied before {continued.name} was saved: continuing from there"
        return Request(newest[newest.index(continued) :], by_name=False, note=note)
    return Request([named_checkpoint(root, restore_from)], by_name=True)


def up_to(request: Request, step: int) -> Request:
    """Return *request* without the checkpoints of steps after *step*."""
    candidates = []
    for path in request.candidates:
        name = layout.parse_checkpoint_name(path.name)
        if name is not None and name.step <= step:
            candidates.append(path)
    return replace(request, candidates=candidates)


def _newest_paths(root: Path, memory: Path | None) -> list[Path]:
    """List the checkpoints on disk and in *memory*, newest first. If both have a step, the one on disk comes first."""
    found = [(name, root) for name in checkpoint_names(root)]
    if memory is not None:
        found += [(name, memory) for name in checkpoint_names(memory)]
    found.sort(key=lambda item: (item[0], item[1] == root), reverse=True)
    return [directory / str(name) for name, directory in found]


def is_continued(root: Path, restore_from: str) -> bool:
    """Whether the run has published a checkpoint under *restore_from*, so that it continues from there."""
    newest = [root / str(name) for name in checkpoint_names(root)]
    return _published_under(newest, root, restore_from) is not None


def request_text(root: Path, restore_from: str | None) -> str | None:
    """Return the text with which a checkpoint records the ``restore_from`` of the run that saved it.

    A pointer or a checkpoint of this run is recorded by name, because the run directory may be moved or mounted
    elsewhere. Any other path is recorded as an absolute path, and a URL without the slash at its end.
    """
    if restore_from is None or restore_from in layout.POINTERS:
        return restore_from
    if layout.parse_checkpoint_name(restore_from):
        return restore_from
    if is_url(restore_from):
        return restore_from.rstrip("/")
    path = Path(os.path.abspath(restore_from))
    if layout.parse_checkpoint_name(path.name) and path.parent.resolve() == root.resolve():
        return path.name
    return str(path.resolve())


def _published_under(newest: list[Path], root: Path, restore_from: str) -> Path | None:
    """Return the newest readable checkpoint if it was saved under this ``restore_from``; otherwise None."""
    for path in newest:
        try:
            lineage = Summary.read(path).lineage
        except CheckpointUnusable:
            continue
        # Only the newest one counts: if it was saved without this request, the request applies.
        if _is_same_request(root, lineage.get("restore_from"), restore_from):
            return path
        return None
    return None


def _is_same_request(root: Path, noted: object, restore_from: str) -> bool:
    """Whether ``restore_from`` refers to the same checkpoint as *noted*, the text in a checkpoint of the run.

    The run directory may have been moved since. Earlier versions recorded the absolute path of a checkpoint of the run,
    and a recipe may still contain that path.
    """
    request = request_text(root, restore_from)
    if noted == request:
        return True
    if not isinstance(noted, str) or request is None:
        return False
    one, other = Path(noted), Path(request)
    is_checkpoint = layout.parse_checkpoint_name(one.name) is not None
    if one.name != other.name or not is_checkpoint or one.is_absolute() == other.is_absolute():
        return False
    # One is a name in this run, the other a path: the previous location of this run, or another run.
    path = one if one.is_absolute() else other
    if not path.exists():
        return True
    try:
        return Summary.read(path).digest == Summary.read(root / path.name).digest
    except CheckpointUnusable:
        return False


def named_checkpoint(root: Path, name: str) -> Path:
    """Return the path of a checkpoint. *name* is a pointer, a checkpoint's name, or a path to either.

    Raises :class:`CheckpointUnusable` if it does not exist.
    """
    found: Path | None = None
    if name in layout.POINTERS:
        target = commit.pointed(root, name)
        if target:
            found = root / target
    elif layout.parse_checkpoint_name(name):
        found = root / name
    else:
        found = pointed_path(Path(name))
    is_second_name = found is not None and found.is_symlink() and not is_moved(found)
    if found is None or not found.is_dir() or (name in layout.POINTERS and is_second_name):
        newest = [str(each) for each in checkpoint_names(root)[:10]]
        existing = ", ".join(newest) or "no checkpoints"
        raise unusable(
            "the checkpoint to restore from does not exist",
            "checkpoint.restore_from",
            name,
            f"use an existing one ({root} contains {existing}), LATEST, LOWEST_VAL after a validation, or a path",
        )
    if not os.path.lexists(found / layout.MANIFEST) and checkpoint_names(found):
        raise unusable(
            "the checkpoint to restore from is a run directory",
            "checkpoint.restore_from",
            name,
            f"name one of its checkpoints, such as {found / layout.LATEST}",
        )
    return found


def pointed_path(path: Path) -> Path | None:
    """Return the path of a checkpoint, given its path or a pointer's path. A pointer is a link or a text file.

    Returns None for a pointer to nothing.
    """
    if path.name in (f"{pointer}.txt" for pointer in layout.POINTERS):
        path = path.with_suffix("")
    if path.name not in layout.POINTERS:
        return path
    target = commit.pointed(path.parent, path.name)
    return path.parent / target if target else None
