"""Reads a run's directory as series to plot: ``training.jsonl``, ``validation.jsonl`` and its checkpoints.

Torn lines and lines without numbers are ignored, because a report is most useful for a run that crashed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.checkpoint.manifest import Summary
from automodel_ckpt.checkpoint.run import late_validations, resume
from automodel_ckpt.errors import CheckpointUnusable

_LARGEST, _LAST_STEP = 1e100, 2**53
"""Limits of plotted values and steps, within which sums and differences stay finite and exact."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values over steps; steps ascend, values are finite."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def at_most(self, num_points: int) -> Series:
        """A series of at most *num_points* points with the same extremes: the lowest and highest point per interval."""
        if len(self) <= num_points:
            return self
        kept: list[int] = []
        interval = 2 * len(self) / num_points
        for number in range(num_points // 2):
            indices = range(int(number * interval), int((number + 1) * interval))
            lowest = min(indices, key=self.values.__getitem__)
            highest = max(indices, key=self.values.__getitem__)
            kept += sorted({lowest, highest})
        steps = tuple(self.steps[index] for index in kept)
        values = tuple(self.values[index] for index in kept)
        return Series(steps, values)

    def smoothed(self) -> Series:
        """The exponential moving average over a hundredth of the series, at least ten values.

        The bias at the start is corrected as in Adam (Kingma and Ba, 2015).
        """
        window = max(10, len(self) / 100)
        weight = 1 - 1 / window
        average, total, values = 0.0, 0.0, []
        for value in self.values:
            average = weight * average + (1 - weight) * value
            total = weight * total + (1 - weight)
            values.append(average / total)
        return Series(self.steps, tuple(values))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint; *pointers* are the names of the links to it."""

    name: str
    step: int
    epoch: int
    train_loss: float | None
    val_loss: float | None
    nbytes: int
    pointers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class History:
    """A run, read from its directory.

    *series* has the fields ``loss``, ``grad_norm``, ``lr``, ``tps``, ``val_loss``, ``stall_seconds`` and ``bytes``.
    *checkpoints* are sorted from the oldest to the newest; *not_finite* are the steps whose loss is not finite.
    """

    name: str
    path: Path
    series: dict[str, Series]
    checkpoints: tuple[Checkpoint, ...] = ()
    resumed_at: tuple[int, ...] = ()
    num_tokens: int = 0
    timestamps: Series = field(default_factory=Series)
    last_step: int = 0
    not_finite: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """The time from the first logged step to the last, including pauses between a stop and its resume."""
        times = self.timestamps.values
        return times[-1] - times[0] if times else 0.0


def read_history(path: Path, name: str | None = None) -> History:
    """The history of the run in *path*. Raises :class:`CheckpointUnusable` if the directory contains no run."""
    records = list(_records(path / layout.TRAINING_LOG))
    validations = list(_records(path / layout.VALIDATION_LOG))
    checkpoints = tuple(_checkpoints(path)) if path.is_dir() else ()
    if not (records or checkpoints):
        raise CheckpointUnusable(
            "the directory contains no run to plot",
            where=str(path),
            value=f"neither {layout.TRAINING_LOG} nor a checkpoint",
            hint="use the directory of a run, the checkpoint.checkpoint_dir of its recipe",
        )
    steps = [record for record in records if "event" not in record]
    saves = [record for record in records if record.get("event") == "save"]
    series = {name: _series(steps, name) for name in ("loss", "grad_norm", "lr", "tps")}
    series["val_loss"] = _series(validations, "val_loss")
    series |= {name: _series(saves, name) for name in ("stall_seconds", "bytes")}
    resumed = sorted({record["step"] for record in records if record.get("event") == "resume"})
    tokens = sum(int(_number(record.get("tokens")) or 0) for record in steps)
    times = _series(steps, "timestamp")
    lossy = {record["step"] for record in steps if "loss" in record}
    not_finite = tuple(sorted(lossy - {*series["loss"].steps}))
    return History(
        name or path.name,
        path,
        series,
        checkpoints,
        tuple(resumed),
        tokens,
        times,
        max(lossy, default=0),
        not_finite,
    )


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointUnusable(
            "a log of this run cannot be read",
            where=str(path),
            value=error.strerror,
            hint="remove it",
        ) from error
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step = record.get("step") if isinstance(record, dict) else None
        if isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= _LAST_STEP:
            yield record


def _series(records: list[dict[str, Any]], name: str) -> Series:
    """The values of field *name*. Of several values at one step, as after a resume, the last one is used."""
    found: dict[int, float] = {}
    for record in records:
        value = _number(record.get(name))
        if value is not None:
            found[record["step"]] = value
    steps = sorted(found)
    return Series(tuple(steps), tuple(found[step] for step in steps))


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= _LARGEST else None  # excludes infinities and NaN


def _checkpoints(root: Path) -> Iterator[Checkpoint]:
    pointed = {pointer: commit.pointed(root, pointer) for pointer in layout.POINTERS}
    for name in reversed(resume.checkpoint_names(root)):
        try:
            summary = Summary.read(root / str(name))
        except CheckpointUnusable:
            continue
        pointers = tuple(pointer for pointer, target in pointed.items() if target == str(name))
        measured = {**summary.losses, **late_validations.recall(root / str(name), summary.digest)}
        train_loss = _number(measured.get("train_loss"))
        val_loss = _number(measured.get("val_loss"))
        yield Checkpoint(
            str(name), summary.step, summary.epoch, train_loss, val_loss, summary.nbytes, pointers
        )
