"""Which checkpoint to resume from, and which is the best: pure functions over records of what is on disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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
    return sorted(records, key=lambda record: (record.step, record.epoch), reverse=True)


def metric_of(losses: Mapping[str, Any], key: str) -> float | None:
    """The ranking value among a checkpoint's losses, or None where it is absent or no finite number."""
    value = losses.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


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


def superseded_by_going_back(records: Iterable[Record], resumed_step: int) -> list[Record]:
    """The checkpoints that a run abandons when it goes on from an earlier step: all later ones."""
    return [record for record in records if record.step > resumed_step]
