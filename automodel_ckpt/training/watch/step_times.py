"""How long the steps of a run usually take, in this start and in earlier ones: what a hang is compared with."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from automodel_ckpt.checkpoint.run.timeline import STEP_TIMES
from automodel_ckpt.config.schema import RecipeConfig

_NUM_FIRST_STEPS = 3
"""Steps at the start of a process that compile and allocate, and are no measure of others."""
_MIN_STEPS, _MAX_STEPS = 5, 200


@dataclass(frozen=True, slots=True)
class EarlierTimes:
    """Seconds of steps in earlier starts: the longest of their *first* steps, and the newest *median* of the others."""

    first: float | None = None
    median: float | None = None

    @classmethod
    def read(cls, records: Iterable[Mapping[str, Any]], configuration: str) -> EarlierTimes:
        """Read what the *records* of a run's timeline have about starts with the same *configuration*."""
        first: list[float] = []
        medians: list[float] = []
        for record in records:
            times = record.get(STEP_TIMES)
            if not isinstance(times, dict) or times.get("configuration") != configuration:
                continue
            for name, found in (("first", first), ("median", medians)):
                seconds = times.get(name)
                if isinstance(seconds, int | float) and 0 < seconds < math.inf:
                    found.append(float(seconds))
        return cls(max(first, default=None), medians[-1] if medians else None)


def configuration_of(config: RecipeConfig, world_size: int) -> str:
    """A digest of all that the time of a step depends on."""
    return hashlib.sha256(f"{world_size} {config!r}".encode()).hexdigest()[:32]


class StepTimes:
    """The seconds of each step of this start, in the order of the steps.

    *configuration* is that of this start, and *earlier* is what starts with the same one took. With *compiles*, the
    first steps of a start depend on what is in the compiler's cache, and are not compared.
    """

    def __init__(
        self,
        configuration: str = "",
        *,
        compiles: bool = False,
        earlier: EarlierTimes | None = None,
    ) -> None:
        self.configuration = configuration
        self.earlier = earlier or EarlierTimes()
        self._compiles = compiles
        self._first: list[float] = []
        self._others: deque[float] = deque(maxlen=_MAX_STEPS)

    def note(self, seconds: float) -> None:
        """Add the next step."""
        if len(self._first) < _NUM_FIRST_STEPS:
            self._first.append(seconds)
        else:
            self._others.append(seconds)

    @property
    def has_noted(self) -> bool:
        """Whether this start has completed a step."""
        return bool(self._first)

    @property
    def usual(self) -> float | None:
        """The seconds that the present step is compared with; None if there is nothing to compare it with."""
        if len(self._others) >= _MIN_STEPS:
            return median(list(self._others))
        if len(self._first) == _NUM_FIRST_STEPS:
            return self.earlier.median
        return None if self._compiles else self.earlier.first

    @property
    def text(self) -> str:
        """What :attr:`usual` is, for messages."""
        if len(self._others) >= _MIN_STEPS:
            return "the median"
        if len(self._first) == _NUM_FIRST_STEPS:
            return "the median of earlier starts"
        return "the longest of the first steps of earlier starts"

    @property
    def record(self) -> dict[str, Any]:
        """What the timeline has for the next starts."""
        enough = len(self._others) >= _MIN_STEPS
        return {
            "configuration": self.configuration,
            "first": max(self._first, default=None),
            "median": median(list(self._others)) if enough else self.earlier.median,
        }
