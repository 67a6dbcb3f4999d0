"""Sizes and counts in words, for messages and logs. Imports nothing."""

from __future__ import annotations


def size_text(nbytes: float) -> str:
    """Bytes in decimal units: ``1.2 MB``."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < (1000 if unit == "B" else 999.95) or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def values_text(number: int) -> str:
    """How many values beside tensors: ``1 value that is not a tensor``."""
    return (
        "1 value that is not a tensor" if number == 1 else f"{number} values that are not tensors"
    )


def others_text(number: int) -> str:
    """How many tensors of others than the model: ``1 tensor that is not the model's``."""
    return (
        "1 tensor that is not the model's"
        if number == 1
        else f"{number} tensors that are not the model's"
    )


def left_out(text: str, number: int) -> str:
    """``1 value … is left out``."""
    return f"{text} {'is' if number == 1 else 'are'} left out"
