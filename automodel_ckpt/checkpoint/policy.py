"""Which checkpoint is the best, and which are kept: pure functions over records of what is on disk."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Record:
    """A checkpoint as the choices below see it: its name's step and epoch, and the value that ranks it (None: not
    validated at its own step)."""

    name: str
    step: int
    epoch: int
    metric: float | None = None


def newest_first(records: Iterable[Record]) -> list[Record]:
    """By step, then epoch, falling."""
    return sorted(records, key=lambda record: (record.step, record.epoch), reverse=True)


def metric_of(losses: Mapping[str, Any], key: str) -> float | None:
    """The ranking value among a checkpoint's losses, or None where it is absent or no finite number."""
    value = losses.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def is_better(value: float | None, than: float | None, mode: Mode) -> bool:
    """Whether a checkpoint takes the place of the best one so far: only a strictly better number does."""
    if value is None or not math.isfinite(value):
        return False
    if than is None:
        return True
    return value < than if mode == "min" else value > than


def best(records: Iterable[Record], mode: Mode) -> Record | None:
    """The best of the records that have a metric; of equals the one with the lowest step."""
    leader: Record | None = None
    for record in sorted(records, key=lambda record: (record.step, record.epoch)):
        if is_better(record.metric, leader.metric if leader else None, mode):
            leader = record
    return leader


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """What stays: the *last* checkpoints (None: all of them), the *best* ones by their metric, and milestones: every
    multiple of *every_steps* and the *steps* named."""

    last: int | None = None
    best: int = 0
    every_steps: int | None = None
    steps: frozenset[int] = frozenset()
    mode: Mode = "min"

    def removable(
        self, records: Collection[Record], protected: Collection[str] = ()
    ) -> list[Record]:
        """The complete checkpoints of a run that need not stay, oldest first.

        Never among them: the newest, those *protected* by name (pointed to, pinned, just saved), the best, milestones.
        """
        if self.last is None:
            return []
        ordered = newest_first(records)
        kept = {record.name for record in ordered[: max(self.last, 1)]} | set(protected)
        kept |= {record.name for record in self._best_of(ordered)}
        kept |= {record.name for record in ordered if self._is_milestone(record.step)}
        return [record for record in reversed(ordered) if record.name not in kept]

    def _best_of(self, records: Iterable[Record]) -> list[Record]:
        """The best records, at most ``self.best``; of equal metrics the earlier checkpoint, as for LOWEST_VAL."""
        sign = 1 if self.mode == "min" else -1
        ranked = [
            (sign * r.metric, r.step, r)
            for r in records
            if r.metric is not None and math.isfinite(r.metric)
        ]
        return [record for _, _, record in sorted(ranked, key=lambda entry: entry[:2])[: self.best]]

    def _is_milestone(self, step: int) -> bool:
        return step in self.steps or (self.every_steps is not None and step % self.every_steps == 0)
