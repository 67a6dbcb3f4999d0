"""The keep policy, and the best checkpoint: pure functions over records of the checkpoints on disk."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from automodel_ckpt.checkpoint.files.type_aliases import Values

Mode = Literal["min", "max"]


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


def best(records: Iterable[Record], mode: Mode) -> Record | None:
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
