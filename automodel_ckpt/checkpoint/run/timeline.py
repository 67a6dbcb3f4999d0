"""Read how a run spent its time: ``timeline.jsonl`` and ``.timeline.json`` of its directory. Both may be damaged."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import open_regular

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


def read_timeline(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of a run's timeline, in their order: beginnings and ends of starts. Raises OSError."""
    try:
        data = _read(directory / layout.TIMELINE_LOG)
    except (FileNotFoundError, NotADirectoryError):
        return
    for line in data.splitlines():
        record = _parsed(line)
        if record is not None:
            yield record


def read_state(directory: Path) -> dict[str, Any] | None:
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


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return a line as a record. All fields have the right types and are in range. Returns None for any other text."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("start"), str):
        return None
    is_valid = _is_number(record.get("time")) and type(record.get("step")) is int
    if not is_valid or not 0 <= record["step"] <= _MAX_STEP:
        return None
    if record.get("event") == START:
        return record
    seconds = record.get("seconds")
    if record.get("event") != END or not isinstance(seconds, dict):
        return None
    values = [seconds.get(phase) for phase in PHASES] + [record.get("logged")]
    num_steps = record.get("num_steps", 0)
    if type(num_steps) is not int or not 0 <= num_steps <= _MAX_STEP:
        return None
    return record if all(map(_is_number, values)) else None


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and 0 <= value <= _MAX_SECONDS
