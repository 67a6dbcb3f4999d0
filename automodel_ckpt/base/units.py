"""Format sizes and counts for messages and logs. Imports nothing of the package."""

from __future__ import annotations

from collections.abc import Sequence


def size_text(nbytes: float) -> str:
    """Format a number of bytes in decimal units: ``1.2 MB``."""
    if nbytes < 1000:
        return f"{float(nbytes):.0f} B"
    value = nbytes / 1000
    for unit in ("kB", "MB", "GB"):
        if value < 999.95:  # larger values would be rounded to 1000.0
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def measure_text(value: float) -> str:
    """Format a measure such as an accuracy or a perplexity: ``0.5000``, for very large numbers ``1.234e+30``."""
    return f"{value:.4f}" if abs(value) < 1e9 else f"{value:.4g}"


def values_text(number: int) -> str:
    """Format a number of values that are not tensors: ``1 value that is not a tensor``."""
    return counted(number, "value that is not a tensor", "values that are not tensors")


def others_text(number: int) -> str:
    """Format a number of tensors that are not part of the model: ``1 tensor that is not the model's``."""
    return counted(number, "tensor that is not the model's", "tensors that are not the model's")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a number of things: ``1 sample``, ``2 samples``, ``1,024 ranks``. *plural* defaults to the noun with s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def counted_are(number: int, noun: str) -> str:
    """Begin a sentence about a number of things: ``1 tensor is``, ``2 tensors are``."""
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


def some_of(names: Sequence[str], most: int) -> str:
    """Format the first *most* of *names*, and the number of the others: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def duration(seconds: float) -> str:
    """Format seconds with at most two units: ``8 s``, ``3 min 20 s``, ``5 h 04 min``, ``2 d 3 h``."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


def exact_time(seconds: float) -> str:
    """Format seconds with a digit after the point, and long times also in larger units: ``812.0 s (13 min 32 s)``."""
    text = f"{seconds:,.1f} s"
    return text if seconds < 600 else f"{text} ({duration(seconds)})"
