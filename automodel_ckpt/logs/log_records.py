"""Read the records of ``training.jsonl`` and ``validation.jsonl``, of which a crash may have torn a line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.errors import CheckpointUnusable

_MAX_STEP = 2**53
"""Within this limit, differences of steps stay exact as floating-point numbers."""


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a log that have a valid step. Raises :class:`CheckpointUnusable` if it cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointUnusable(
            "a log of this run cannot be read",
            where=str(path),
            value=error.strerror,
            hint="remove it",
        ) from error
    yield from records_in(lines)


def records_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the records of *lines* that have a valid step; other lines are ignored."""
    for line in lines:
        with contextlib.suppress(ValueError):
            record = parse_json(line)
            if _has_valid_step(record):
                yield record


def _has_valid_step(record: Any) -> bool:
    """Whether a parsed line of a log is a record of a step that reports and trackers can represent."""
    step = record.get("step") if isinstance(record, dict) else None
    if isinstance(step, bool) or not isinstance(step, int):
        return False
    return 0 <= step <= _MAX_STEP
