"""Ranges of axes, positions on them, and their ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_MARGIN = 0.04
"""The margin at each end of an axis, as a fraction of its range."""


def padded_range(values: Iterable[float], *, from_zero: bool = False) -> tuple[float, float]:
    """Return the lowest and highest value of an axis that contains all *values* with a margin.

    The range is never empty, even for no values or equal ones. With *from_zero*, it contains 0, without a margin below.
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
    margin = _MARGIN * (high - low)
    starts_at_zero = from_zero and low == 0.0
    return (low if starts_at_zero else low - margin), high + margin


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps the values [low, high] to the positions [start, stop]; positions may descend."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        fraction = (value - self.low) / (self.high - self.low)
        return self.start + fraction * (self.stop - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Return round values within the range, 1, 2 or 5 times a power of ten apart."""
        least_distance = (self.high - self.low) / max(about, 1)
        magnitude = 10.0 ** math.floor(math.log10(least_distance))
        distance = 10 * magnitude
        for factor in (5, 2, 1):
            # 0.999: rounding errors must not select the next larger distance
            if factor * magnitude >= least_distance * 0.999:
                distance = factor * magnitude
        first = math.ceil(self.low / distance - 1e-9)
        last = math.floor(self.high / distance + 1e-9)
        return [number * distance for number in range(first, last + 1)]


def short(value: float) -> str:
    """Format the label of a tick: ``1.2k``, ``0.05``, ``2e-05``."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.3g}"
    for limit, divisor, unit in (
        (1e12, 1e12, "T"),
        (1e9, 1e9, "G"),
        (1e6, 1e6, "M"),
        (1e4, 1e3, "k"),
    ):
        if size >= limit:
            return f"{value / divisor:.4g}{unit}"
    return f"{value:.4g}"
