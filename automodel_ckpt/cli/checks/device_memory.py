"""``ckpt-train --dry-run --device-memory SIZE``: the memory of the GPU that a forecast is for."""

from __future__ import annotations

import re

from automodel_ckpt.config.overrides import CommandLine
from automodel_ckpt.errors import RecipeError

_MIN_BYTES = 1_000_000
_UNITS = "KMGT"
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", re.IGNORECASE)


def device_memory(line: CommandLine) -> int | None:
    """Return the bytes that ``--device-memory`` gives; None without it. Raises :class:`RecipeError` for other text."""
    if "device_memory" not in line.modes:
        return None
    (text,) = line.modes["device_memory"]
    nbytes = parse_size(text)
    # A number without a unit is bytes, and almost always a mistake.
    if not nbytes or nbytes < _MIN_BYTES:
        raise RecipeError(
            "invalid size of a device's memory",
            where="--device-memory",
            value=text,
            hint="give a number with a unit, such as 80GiB or 24GB",
        )
    return nbytes


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as ``80GiB``, ``24 GB`` or ``1.5T``; None for other text."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    power = _UNITS.index(found[2].upper()) + 1 if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
