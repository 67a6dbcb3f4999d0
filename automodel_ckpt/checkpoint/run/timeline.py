"""Read how a run spent its time: ``timeline.jsonl`` and ``.timeline.json`` of its directory. Both may be damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.run.notes import Damaged

STARTUP, STEPS, DATA, SAVES, VALIDATION, OTHER = (
    "startup",
    "steps",
    "data",
    "saves",
    "validation",
    "other",
)
PHASES = (STARTUP, STEPS, DATA, SAVES, VALIDATION, OTHER)
"""Start-up until the first step; steps; training waits for data, or for a save; validation; what remains."""
DONE, STOPPED, FAILED, KILLED = "done", "stopped", "failed", "killed"
START, END = "start", "end"
STRAGGLER = "straggler"
"""The event of a line of ``training.jsonl`` about a rank that is slower than the others."""
FORWARD, ARRIVAL = "forward", "arrival"
"""Its part: in forward passes, or in what precedes a step."""
SLOT_BYTES = 1024
"""The state is written alternately to two slots of a file, so that a kill damages at most one."""
_MAX_BYTES = 64 * 2**20
_MAX_SECONDS, _MAX_STEP = 1e12, 2**53


def read_timeline(directory: Path) -> Iterator[ValueDict]:
    """Yield the valid lines of a run's timeline, in their order: beginnings and ends of starts. Raises OSError."""
    try:
        data = _read(directory / layout.TIMELINE_LOG)
    except (FileNotFoundError, NotADirectoryError):
        return
    for line in data.splitlines():
        record = _parsed(line)
        if record is not None:
            yield record


def read_state(directory: Path) -> ValueDict | None:
    """Return the newest state of the last start, as the line of its end, or None when it cannot be read."""
    try:
        data = _read(directory / layout.TIMELINE_STATE)
    except OSError:
        return None
    slots = [_parsed(data[:SLOT_BYTES]), _parsed(data[SLOT_BYTES : 2 * SLOT_BYTES])]
    found = [slot for slot in slots if slot is not None and slot["event"] == END]
    return max(found, key=lambda state: state["time"], default=None)


def _read(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(_MAX_BYTES)


def _parsed(line: bytes) -> ValueDict | None:
    """Return a line as a record. All fields have the right types and are in range. Returns None for any other text."""
    try:
        record = parse_json(line)
        values = [record["time"]]
        counts = [record["step"], record.get("num_steps", 0)]
        is_known = record["event"] in (START, END) and isinstance(record["start"], str)
        if record["event"] == END:
            values += [record["logged"], *(record["seconds"][phase] for phase in PHASES)]
    except Damaged:
        return None
    are_counts = all(type(each) is int and 0 <= each <= _MAX_STEP for each in counts)
    return record if is_known and are_counts and all(map(_is_number, values)) else None


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # Not math.isfinite(), which fails for the largest integers. Comparisons with NaN are false.
    return 0 <= value <= _MAX_SECONDS
