"""What a run left in its directory, as series to draw: ``training.jsonl``, ``validation.jsonl``, its checkpoints.

Lines that are torn or hold no numbers are passed over: a report of a run that crashed is needed most.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.files.inside import open_regular
from automodel_ckpt.checkpoint.manifest import Summary
from automodel_ckpt.checkpoint.run import late_validations, resume
from automodel_ckpt.errors import CheckpointUnusable

_LARGEST, _LAST_STEP = 1e100, 2**53
"""Of values and steps that are drawn: sums and differences of these stay finite and exact."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values over steps; steps ascend, values are finite."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def at_most(self, num_points: int) -> Series:
        """A series of at most *num_points* with the same outline: of each stretch its lowest and highest point."""
        if len(self) <= num_points:
            return self
        kept: list[int] = []
        stretch = 2 * len(self) / num_points
        for number in range(num_points // 2):
            part = range(int(number * stretch), int((number + 1) * stretch))
            low, high = (choose(part, key=self.values.__getitem__) for choose in (min, max))
            kept += sorted({low, high})
        return Series(tuple(self.steps[i] for i in kept), tuple(self.values[i] for i in kept))

    def smoothed(self) -> Series:
        """The exponential moving average over a hundredth of the series, at least ten values; corrected for its start
        (as Adam's; Kingma and Ba 2015)."""
        weight = 1 - 1 / max(10, len(self) / 100)
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
    """A run: *series* by field (``loss``, ``grad_norm``, ``lr``, ``tps``, ``val_loss``, ``stall_seconds``, ``bytes``),
    its checkpoints (oldest first), the steps it was resumed at, the last step and those whose loss is no finite
    number, and the sums below."""

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
        """From the first step's line to the last's; pauses between a stop and its resume count."""
        times = self.timestamps.values
        return times[-1] - times[0] if times else 0.0


def read_history(path: Path, name: str | None = None) -> History:
    """The history of the run in *path*. Raises :class:`CheckpointUnusable` where no run has been."""
    records = list(_records(path / layout.TRAINING_LOG))
    validations = list(_records(path / layout.VALIDATION_LOG))
    checkpoints = tuple(_checkpoints(path)) if path.is_dir() else ()
    if not (records or checkpoints):
        raise CheckpointUnusable(
            "the directory contains no run to plot",
            where=str(path),
            value=f"neither {layout.TRAINING_LOG} nor a checkpoint",
            remedy="use the directory of a run, the checkpoint.checkpoint_dir of its recipe",
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
        name or path.name, path, series, checkpoints, tuple(resumed), tokens, times, max(lossy, default=0), not_finite
    )


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointUnusable(
            "a log of this run cannot be read", where=str(path), value=error.strerror, remedy="remove it"
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
    """Of several values at one step the last counts, as after a resume."""
    found = {record["step"]: value for record in records if (value := _number(record.get(name))) is not None}
    steps = sorted(found)
    return Series(tuple(steps), tuple(found[step] for step in steps))


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= _LARGEST else None  # which infinities and NaN are not


def _checkpoints(root: Path) -> Iterator[Checkpoint]:
    pointed = {pointer: commit.pointed(root, pointer) for pointer in layout.POINTERS}
    for name in reversed(resume.checkpoint_names(root)):
        try:
            summary = Summary.read(root / str(name))
        except CheckpointUnusable:
            continue
        pointers = tuple(pointer for pointer, target in pointed.items() if target == str(name))
        measured = {**summary.losses, **late_validations.recall(root / str(name), summary.digest)}
        losses = [_number(measured.get(key)) for key in ("train_loss", "val_loss")]
        yield Checkpoint(str(name), summary.step, summary.epoch, losses[0], losses[1], summary.nbytes, pointers)
