"""Maps values to positions on an axis."""

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
        steps = [factor * magnitude for factor in (1, 2, 5, 10)]
        step = next(step for step in steps if step >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def scale_over(
    values: Iterable[float], start: float, stop: float, *, from_zero: bool = False
) -> Scale:
    """A scale from *start* to *stop* that contains all *values* with a margin of 4 percent.

    Its range is never empty, even for no values or equal ones. With *from_zero*, it contains 0, without a margin below.
    """
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    if from_zero:
        low = min(low, 0.0)
        high = high if high > 0 else 1.0
    largest = max(abs(low), abs(high), 1e-300)
    if high - low < 1e-12 * largest:
        low_margin = abs(low) * 0.05 or 0.5
        high_margin = abs(high) * 0.05 or 0.5
        low, high = low - low_margin, high + high_margin
    margin = 0.04 * (high - low)
    starts_at_zero = from_zero and low == 0.0
    return Scale(low if starts_at_zero else low - margin, high + margin, start, stop)


def short(value: float) -> str:
    """A tick's label: ``1.2k``, ``0.05``, ``2e-05``."""
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e15):
        return f"{value:.3g}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"
