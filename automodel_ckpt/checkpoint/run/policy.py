"""The keep policy, and the best checkpoint: pure functions over records of the checkpoints on disk."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Record:
    """The step and epoch of a checkpoint, and the metric that ranks it (None if its step was not validated)."""

    name: str
    step: int
    epoch: int
    metric: float | None = None


def newest_first(records: Iterable[Record]) -> list[Record]:
    """Sort records by step, then epoch, in descending order."""
    return sorted(records, key=lambda record: (record.step, record.epoch), reverse=True)


def metric_of(losses: Mapping[str, Any], key: str) -> float | None:
    """Return the metric *key* in a checkpoint's losses; None if it is missing or not a finite number."""
    value = losses.get(key)
    # True would rank as 1.0, because bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    # JSON has integers of any size; float() fails for those above 1.8e308.
    except OverflowError:
        return None
    if not math.isfinite(number):
        return None
    return number


def is_better(value: float | None, than: float | None, mode: Mode) -> bool:
    """Whether *value* is strictly better than the best metric so far (None: there is none)."""
    if value is None or not math.isfinite(value):
        return False
    if than is None:
        return True
    if mode == "min":
        return value < than
    return value > than


def best(records: Iterable[Record], mode: Mode) -> Record | None:
    """Return the record with the best metric, and of equal ones that with the lowest step; None without metrics."""
    found: Record | None = None
    for record in reversed(newest_first(records)):
        best_so_far = found.metric if found else None
        if is_better(record.metric, best_so_far, mode):
            found = record
    return found


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Which checkpoints are kept.

    These are the *last* ones (None: all of them), the *best* ones by metric, and milestones: those whose step is a
    multiple of *every_steps* or in *steps*.
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
        keep.update(record.name for record in self._best_of(ordered))
        removed = []
        for record in reversed(ordered):
            if record.name not in keep and not self._is_milestone(record.step):
                removed.append(record)
        return removed

    def _best_of(self, records: Iterable[Record]) -> list[Record]:
        """Return at most ``self.best`` records with the best metrics; of equal ones the earlier, as for LOWEST_VAL."""
        sign = 1 if self.mode == "min" else -1
        ranked = []
        for record in records:
            if record.metric is not None and math.isfinite(record.metric):
                ranked.append((sign * record.metric, record.step, record))
        ranked.sort(key=lambda entry: entry[:2])
        return [record for _, _, record in ranked[: self.best]]

    def _is_milestone(self, step: int) -> bool:
        if step in self.steps:
            return True
        return self.every_steps is not None and step % self.every_steps == 0
