"""Read a run's directory as series to plot: ``training.jsonl``, ``validation.jsonl`` and its checkpoints.

Torn lines and lines without numbers are ignored, because a report is most useful for a run that crashed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Strings, ValueDict
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.run.notes import recall_losses
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable
from automodel_ckpt.logs.goodput import Goodput, read_goodput
from automodel_ckpt.logs.log_records import number_of, read_records

VALIDATED = "val_"
"""The field of a measure of the main validation set begins with this."""
BENCHMARK = "eval_"
"""The field of a metric of the section ``evaluation`` begins with this."""
# Fields that are plotted also if they are integers. Other integers are counts.
_CURVES = frozenset(
    {"loss", "val_loss", "grad_norm", "lr", "tps", "tps_per_gpu", "mfu", "mem", "stall_seconds"}
)
_NOT_PLOTTED = frozenset({"timestamp", "seconds", "total_seconds"})
_ERROR = "_stderr"
# The most fields of a log that are read: a file may come from anywhere.
_MAX_SERIES = 256
# Completions of a run that are read, the newest ones, and characters of each of their texts.
_MAX_COMPLETIONS, _MAX_TEXT = 64, 2000


@dataclass(frozen=True)
class Series:
    """Values over steps; steps ascend, values are finite."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, points: dict[int, float]) -> Series:
        """Return the series of *points*, values by step."""
        steps = sorted(points)
        return cls(tuple(steps), tuple(points[step] for step in steps))

    def __len__(self) -> int:
        return len(self.steps)

    def at_most(self, num_points: int) -> Series:
        """Return a series of at most *num_points* points that looks the same when it is drawn.

        It contains the lowest and the highest point of each interval.
        """
        if len(self) <= num_points:
            return self
        length = 2 * len(self) / num_points
        points = {}
        for number in range(num_points // 2):
            indices = range(int(number * length), int((number + 1) * length))
            for selected in (min, max):
                index = selected(indices, key=self.values.__getitem__)
                points[self.steps[index]] = self.values[index]
        return Series.of(points)

    def means(self, window: int, num_points: int) -> Series:
        """Return the means of *window* values around each point, for at most *num_points* points."""
        last, half = len(self) - 1, window // 2
        indices = [*range(0, last, math.ceil(len(self) / num_points)), last]
        around = [self.values[max(0, index - half) : index - half + window] for index in indices]
        return Series(tuple(self.steps[index] for index in indices), tuple(map(fmean, around)))


class Checkpoint(NamedTuple):
    """A complete checkpoint, its losses, and the names of the pointers to it, such as LATEST."""

    name: str
    summary: Summary
    train_loss: float | None
    val_loss: float | None
    pointers: Strings


class Completion(NamedTuple):
    """What the model wrote after a prompt of the section ``generation``."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class History:
    """A run, read from its directory.

    *series* has the numbers of the logs by field: of steps (``loss``, ``tps``, ``mfu`` in percent, metrics of the
    objective), of validations (``val_loss``, ``val_MEASURE``, ``val_MEASURE_SET``), of benchmarks (``eval_...``), and
    of saves (``stall_seconds``). *checkpoints* are sorted from the oldest to the newest, *completions* from the newest
    to the oldest. *trained* are the times of the first and the last step, in seconds since 1970. *not_finite* are the
    steps without a finite loss. *goodput* is None for a run of an earlier version.
    """

    name: str
    path: Path
    series: dict[str, Series]
    checkpoints: tuple[Checkpoint, ...]
    resumed_at: tuple[int, ...]
    num_tokens: int
    trained: tuple[float, float] | None
    last_step: int
    not_finite: tuple[int, ...]
    completions: tuple[Completion, ...]
    goodput: Goodput | None


def read_history(path: Path, name: str | None = None) -> History:
    """Read the history of the run in *path*. Raises :class:`CheckpointUnusable` if the directory contains no run."""
    records = list(read_records(path / layout.TRAINING_LOG))
    checkpoints = tuple(_checkpoints(path)) if path.is_dir() else ()
    if not (records or checkpoints):
        raise CheckpointUnusable(
            "the directory contains no run",
            path,
            f"neither {layout.TRAINING_LOG} nor a checkpoint",
            "use the directory of a run, the checkpoint.checkpoint_dir of its recipe",
        )
    steps = [record for record in records if "event" not in record]
    series = _series(steps) | _series(read_records(path / layout.VALIDATION_LOG))
    saves = _series(record for record in records if record.get("event") == "save")
    series["stall_seconds"] = saves.get("stall_seconds", Series())
    if "mfu" in series:
        mfu = series["mfu"]
        series["mfu"] = Series(mfu.steps, tuple(100 * value for value in mfu.values))
    if series.get("tps_per_gpu") == series.get("tps"):
        # There is one rank.
        series.pop("tps_per_gpu", None)
    trained = {record["step"] for record in steps if "loss" in record}
    times = [number_of(record.get("timestamp")) for record in steps]
    known = [time for time in times if time is not None]
    try:
        goodput = read_goodput(path)
    except (AutomodelError, OSError):
        goodput = None
    return History(
        name or path.name,
        path,
        series,
        checkpoints,
        resumed_at=tuple(
            sorted({each["step"] for each in records if each.get("event") == "resume"})
        ),
        num_tokens=sum(int(number_of(record.get("tokens")) or 0) for record in steps),
        trained=(known[0], known[-1]) if known else None,
        last_step=max(trained, default=0),
        not_finite=tuple(sorted(trained.difference(series.get("loss", Series()).steps))),
        completions=tuple(_completions(records))[:_MAX_COMPLETIONS],
        goodput=goodput,
    )


def _series(records: Iterable[ValueDict]) -> dict[str, Series]:
    """Return the numbers of *records* by field. Of several values of a step, the last one counts."""
    points: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.items():
            is_plotted = name in _CURVES or isinstance(value, float)
            if not is_plotted or name in _NOT_PLOTTED or name.endswith(_ERROR):
                continue
            number = number_of(value)
            if number is not None and (name in points or len(points) < _MAX_SERIES):
                points.setdefault(name, {})[record["step"]] = number
    return {name: Series.of(of_field) for name, of_field in points.items()}


def _completions(records: list[ValueDict]) -> Iterator[Completion]:
    """Yield the completions in a log, the newest first. A step that a resume repeated is used once."""
    by_step = {
        each["step"]: each.get("completions")
        for each in records
        if each.get("event") == "completions"
    }
    for step in sorted(by_step, reverse=True):
        found = by_step[step]
        for each in found if isinstance(found, list) else ():
            prompt, text = (
                (each.get("prompt"), each.get("text")) if isinstance(each, dict) else (0, 0)
            )
            if isinstance(prompt, str) and isinstance(text, str):
                yield Completion(step, prompt[:_MAX_TEXT], text[:_MAX_TEXT])


def _checkpoints(root: Path) -> Iterator[Checkpoint]:
    """Yield the checkpoints of a run with a manifest that can be read, oldest first."""
    targets = {pointer: commit.pointed(root, pointer) for pointer in layout.POINTERS}
    for parsed_name in reversed(resume.checkpoint_names(root)):
        name = str(parsed_name)
        try:
            summary = Summary.read(root / name)
        except CheckpointUnusable:
            continue
        # A published checkpoint never changes: later validations are stored separately.
        losses = {**summary.losses, **recall_losses(root / name, summary.digest)}
        pointers = tuple(pointer for pointer, target in targets.items() if target == name)
        train_loss, val_loss = (number_of(losses.get(f"{of}_loss")) for of in ("train", "val"))
        yield Checkpoint(name, summary, train_loss, val_loss, pointers)
