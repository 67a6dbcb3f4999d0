"""Read a run's directory as series to plot: ``training.jsonl``, ``validation.jsonl`` and its checkpoints.

Torn lines and lines without numbers are ignored, because a report is most useful for a run that crashed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run import late_validations, resume
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable
from automodel_ckpt.logs.goodput import Goodput, read_goodput
from automodel_ckpt.logs.log_records import read_records

_MAX_VALUE = 1e100
"""Limit of plotted values, within which sums and differences stay finite and exact."""
NAMED_LOSS = "val_loss_"
"""The field of the loss of a named validation set begins with this."""
VALIDATED = "val_"
"""The field of a measure of the main validation set begins with this."""
BENCHMARK = "eval_"
"""The field of a metric of the section ``evaluation`` begins with this."""
_ERROR = "_stderr"
_CURVES = ("loss", "grad_norm", "lr", "tps", "tps_per_gpu", "mfu", "mem")
_STEP_FIELDS = frozenset(
    {"step", "epoch", "timestamp", "tokens", "label_tokens", "samples", "seconds", *_CURVES}
)
"""Fields of a step that have charts, or none; others are metrics of the objective."""
_MAX_COMPLETIONS, _MAX_TEXT = 64, 2000
"""Completions of a run that are read, the newest ones, and characters of each of their texts."""
_MAX_FURTHER = 96
"""Metrics and named validation sets that are read, at most."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values over steps; steps ascend, values are finite."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def at_most(self, num_points: int) -> Series:
        """Return a series of at most *num_points* points that looks the same when it is drawn.

        It contains the lowest and the highest point of each interval.
        """
        if len(self) <= num_points:
            return self
        num_intervals = num_points // 2
        length = 2 * len(self) / num_points
        selected: list[int] = []
        for number in range(num_intervals):
            start, end = int(number * length), int((number + 1) * length)
            indices = range(start, end)
            lowest = min(indices, key=self.values.__getitem__)
            highest = max(indices, key=self.values.__getitem__)
            selected += sorted({lowest, highest})
        steps = tuple(self.steps[index] for index in selected)
        values = tuple(self.values[index] for index in selected)
        return Series(steps, values)

    def times(self, factor: float) -> Series:
        """Return the series with all values multiplied by *factor*."""
        return Series(self.steps, tuple(factor * value for value in self.values))

    def smoothed(self) -> Series:
        """Return the exponential moving average over a hundredth of the series, at least ten values.

        The bias at the start is corrected as in Adam (Kingma and Ba, 2015).
        """
        window = max(10, len(self) / 100)
        decay = 1 - 1 / window
        average = total_weight = 0.0
        averages = []
        for value in self.values:
            average = decay * average + (1 - decay) * value
            total_weight = decay * total_weight + (1 - decay)
            averages.append(average / total_weight)
        return Series(self.steps, tuple(averages))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. *pointers* are the names of the pointers to it, such as LATEST."""

    name: str
    step: int
    epoch: int
    train_loss: float | None
    val_loss: float | None
    nbytes: int
    pointers: tuple[str, ...]
    created: float = 0.0
    """In seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model wrote after a prompt of the section ``generation``."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class History:
    """A run, read from its directory.

    *series* has the fields ``loss``, ``grad_norm``, ``lr``, ``tps``, ``tps_per_gpu``, ``mfu`` (in percent), ``mem``,
    ``val_loss``, ``stall_seconds`` and ``bytes``; for each name in *measures*, if there are values, ``MEASURE`` in
    training and ``val_MEASURE``; for each named validation set ``val_loss_NAME`` and ``val_MEASURE_NAME``.
    ``tps_per_gpu`` is empty for one rank. *checkpoints* are sorted from the oldest to the newest. *timestamps* are in
    seconds since 1970. *not_finite* are the steps whose loss is not finite.
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
    completions: tuple[Completion, ...] = ()
    """From the newest step to the oldest, at most 64."""
    measures: tuple[str, ...] = ()
    """What was measured beside the loss, in training or validation."""
    set_names: tuple[str, ...] = ()
    """The names of validation sets."""
    benchmarks: tuple[str, ...] = ()
    """The fields in *series* of the metrics of the section ``evaluation``, such as ``eval_hellaswag_acc``."""
    goodput: Goodput | None = None
    """How the time was spent; None for a run of an earlier version."""

    @property
    def seconds(self) -> float:
        """Return the seconds from the first logged step to the last, including pauses between a stop and its resume."""
        times = self.timestamps.values
        return times[-1] - times[0] if times else 0.0


def read_history(path: Path, name: str | None = None) -> History:
    """Read the history of the run in *path*. Raises :class:`CheckpointUnusable` if the directory contains no run."""
    records = list(read_records(path / layout.TRAINING_LOG))
    validations = list(read_records(path / layout.VALIDATION_LOG))
    checkpoints = tuple(_checkpoints(path)) if path.is_dir() else ()
    if not (records or checkpoints):
        raise CheckpointUnusable(
            "the directory contains no run",
            where=str(path),
            value=f"neither {layout.TRAINING_LOG} nor a checkpoint",
            hint="use the directory of a run, the checkpoint.checkpoint_dir of its recipe",
        )
    steps = [record for record in records if "event" not in record]
    saves = [record for record in records if record.get("event") == "save"]
    resumes = [record for record in records if record.get("event") == "resume"]
    fields = [field_name for record in validations for field_name in record]
    named = [name for name in fields if name.startswith(NAMED_LOSS)]
    set_names = _distinct(name.removeprefix(NAMED_LOSS) for name in named)
    measures = _distinct(_measures(steps, validations, set_names))
    metrics = [name for name in fields if name.startswith(BENCHMARK)]
    benchmarks = _distinct(name for name in metrics if not name.endswith(_ERROR))
    validated = _validation_fields(measures, set_names)
    series = {}
    for of_kind, names in (
        (steps, (*_CURVES, *measures)),
        (validations, (*validated, *benchmarks)),
        (saves, ("stall_seconds", "bytes")),
    ):
        for field_name in names:
            series[field_name] = _series(of_kind, field_name)
    series["mfu"] = series["mfu"].times(100)
    if series["tps_per_gpu"] == series["tps"]:
        series["tps_per_gpu"] = Series()
    num_tokens = sum(int(_number(record.get("tokens")) or 0) for record in steps)
    trained = {record["step"] for record in steps if "loss" in record}
    not_finite = trained.difference(series["loss"].steps)
    return History(
        name or path.name,
        path,
        series,
        checkpoints,
        resumed_at=tuple(sorted({record["step"] for record in resumes})),
        num_tokens=num_tokens,
        timestamps=_series(steps, "timestamp"),
        last_step=max(trained, default=0),
        not_finite=tuple(sorted(not_finite)),
        completions=tuple(_completions(records)),
        measures=measures,
        set_names=set_names,
        benchmarks=benchmarks,
        goodput=_goodput(path),
    )


def _goodput(path: Path) -> Goodput | None:
    try:
        return read_goodput(path)
    except (AutomodelError, OSError):
        return None


def _completions(records: list[dict[str, Any]]) -> list[Completion]:
    """Return the newest completions in a log. A step that a resume repeated is used once."""
    by_step: dict[int, list[Any]] = {}
    for record in records:
        found = record.get("completions")
        if record.get("event") == "completions" and isinstance(found, list):
            by_step[record["step"]] = found
    result: list[Completion] = []
    for step in sorted(by_step, reverse=True):
        for each in by_step[step]:
            if not isinstance(each, dict) or len(result) == _MAX_COMPLETIONS:
                continue
            prompt, text = each.get("prompt"), each.get("text")
            if isinstance(prompt, str) and isinstance(text, str):
                result.append(Completion(step, prompt[:_MAX_TEXT], text[:_MAX_TEXT]))
    return result


def _series(records: list[dict[str, Any]], name: str) -> Series:
    """Return the values of field *name*. If a step has several values, as after a resume, the last one is used."""
    found: dict[int, float] = {}
    for record in records:
        value = _number(record.get(name))
        if value is not None:
            found[record["step"]] = value
    steps = sorted(found)
    return Series(tuple(steps), tuple(found[step] for step in steps))


def _validation_fields(measures: tuple[str, ...], set_names: tuple[str, ...]) -> list[str]:
    """List the fields of the loss and of *measures*, for the main validation set and the named ones."""
    fields = []
    for measure in ("loss", *measures):
        field_name = f"{VALIDATED}{measure}"
        fields += [field_name, *(f"{field_name}_{set_name}" for set_name in set_names)]
    return fields


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    """List *names* once, in their order. A file may come from anywhere: thousands of curves help no one."""
    return tuple(islice(dict.fromkeys(names), _MAX_FURTHER))


def _measures(
    steps: list[dict[str, Any]], validations: list[dict[str, Any]], set_names: tuple[str, ...]
) -> Iterator[str]:
    """Yield what was measured beside the loss, in the order of the first lines. Counts, which are integers, are not."""
    suffixes = tuple(f"_{set_name}" for set_name in set_names)
    for record in validations:
        for field_name, value in record.items():
            name = field_name.removeprefix(VALIDATED)
            is_measure = field_name != name and name != "loss" and isinstance(value, float)
            if is_measure and not (suffixes and name.endswith(suffixes)):
                yield name
    for record in steps:
        for field_name, value in record.items():
            is_known = field_name in _STEP_FIELDS or field_name.startswith(VALIDATED)
            if isinstance(value, float) and not is_known:
                yield field_name


def _number(value: object) -> float | None:
    """Return a value as a float; None if it is not a number, not finite, or too large to plot."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    # An integer of hundreds of digits.
    except OverflowError:
        return None
    # False for NaN, too
    return number if abs(number) <= _MAX_VALUE else None


def _checkpoints(root: Path) -> Iterator[Checkpoint]:
    """Yield the checkpoints of a run whose manifests can be read, oldest first."""
    targets = {pointer: commit.pointed(root, pointer) for pointer in layout.POINTERS}
    for parsed_name in reversed(resume.checkpoint_names(root)):
        name = str(parsed_name)
        try:
            summary = Summary.read(root / name)
        except CheckpointUnusable:
            continue
        # A published checkpoint never changes: later validations are stored beside it.
        losses = {**summary.losses, **late_validations.recall(root / name, summary.digest)}
        yield Checkpoint(
            name,
            summary.step,
            summary.epoch,
            train_loss=_number(losses.get("train_loss")),
            val_loss=_number(losses.get("val_loss")),
            nbytes=summary.nbytes,
            pointers=tuple(pointer for pointer, target in targets.items() if target == name),
            created=summary.created,
        )
