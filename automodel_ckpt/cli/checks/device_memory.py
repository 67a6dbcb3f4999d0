"""``ckpt-train --dry-run --device-memory SIZE``: the memory of the GPU that a forecast is for."""

from __future__ import annotations

import re

from automodel_ckpt.config.overrides import CommandLine
from automodel_ckpt.errors import RecipeError

_FLAG = "--device-memory"
_MIN_BYTES = 1_000_000
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?i?)B?", re.IGNORECASE)


def device_memory(line: CommandLine) -> int:
    """Return the bytes that ``--device-memory`` gives. Raises :class:`RecipeError` for other text."""
    (text,) = line.modes["device_memory"]
    if "dry_run" not in line.modes:
        raise RecipeError(
            f"{_FLAG} requires --dry-run", where=_FLAG, value=text, hint="add --dry-run"
        )
    nbytes = parse_size(text)
    # A number without a unit is bytes, and almost always a mistake.
    if not nbytes or nbytes < _MIN_BYTES:
        raise RecipeError(
            "invalid size of a device's memory",
            where=_FLAG,
            value=text,
            hint="give a number with a unit, such as 80GiB or 24GB",
        )
    return nbytes


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as ``80GiB``, ``24 GB`` or ``1.5T``; None for other text."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    unit = found[2].capitalize()
    factor = _UNITS.get(unit) or _BINARY_UNITS.get(unit)
    return None if factor is None else int(float(found[1]) * factor)
