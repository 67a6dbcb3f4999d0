"""Read the records of ``training.jsonl`` and ``validation.jsonl``, of which a crash may have torn a line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from automodel_ckpt.checkpoint.files.safe_open import open_regular, parse_json
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.errors import CheckpointUnusable

# Within this limit, differences of steps stay exact as floating-point numbers.
_MAX_STEP = 2**53
# Within this limit, sums and differences of values stay finite and exact.
_MAX_VALUE = 1e100


def read_records(path: Path) -> Iterator[ValueDict]:
    """Yield the records of a log that have a valid step. Raises :class:`CheckpointUnusable` if it cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointUnusable(
            "a log of this run cannot be read",
            path,
            error.strerror,
            "remove it",
        ) from error
    yield from records_in(lines)


def records_in(lines: Iterable[bytes]) -> Iterator[ValueDict]:
    """Yield the records of *lines* that have a valid step; other lines are ignored."""
    for line in lines:
        with suppress(ValueError):
            record = parse_json(line)
            step = record.get("step") if isinstance(record, dict) else None
            # Not isinstance, which accepts true and false.
            if type(step) is int and 0 <= step <= _MAX_STEP:
                yield record


def number_of(value: object) -> float | None:
    """Return a value of a record as a float. Returns None unless it is a finite number of a usual size."""
    if type(value) not in (int, float):
        return None
    # Comparing does not convert: an integer may have hundreds of digits. It is False for NaN.
    return float(value) if abs(value) <= _MAX_VALUE else None  # type: ignore[arg-type]
