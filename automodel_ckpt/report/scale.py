"""From values to places on an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to [start, stop] (a position that falls with the value where start > stop)."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values within the range, 1, 2 or 5 times a power of ten apart."""
        rough = (self.high - self.low) / max(about, 1)
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def scale_over(values: Iterable[float], start: float, stop: float, *, from_zero: bool = False) -> Scale:
    """A scale that holds all *values*, with a little air; never of no length."""
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    if from_zero:
        low, high = min(low, 0.0), high if high > 0 else 1.0
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-300):
        low, high = low - (abs(low) * 0.05 or 0.5), high + (abs(high) * 0.05 or 0.5)
    air = 0.04 * (high - low)
    return Scale(low if from_zero and low == 0.0 else low - air, high + air, start, stop)


def short(value: float) -> str:
    """A tick's label: ``1.2k``, ``0.05``, ``2e-05``."""
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e15):
        return f"{value:.3g}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"
