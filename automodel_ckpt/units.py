"""Format sizes and counts for messages and logs. Imports nothing of the package."""

from __future__ import annotations


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


def values_text(number: int) -> str:
    """Format a number of values that are not tensors: ``1 value that is not a tensor``."""
    if number == 1:
        return "1 value that is not a tensor"
    return f"{number} values that are not tensors"


def others_text(number: int) -> str:
    """Format a number of tensors that are not part of the model: ``1 tensor that is not the model's``."""
    if number == 1:
        return "1 tensor that is not the model's"
    return f"{number} tensors that are not the model's"


def left_out(text: str, number: int) -> str:
    """State that the *number* things that *text* describes are not included: ``1 value ... is left out``."""
    return f"{text} {'is' if number == 1 else 'are'} left out"
