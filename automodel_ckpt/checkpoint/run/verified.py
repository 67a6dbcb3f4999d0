"""What ``ckpt verify`` found, noted in the run's directory, so that ``ckpt ls`` can tell when a checkpoint was read.

A note is of one manifest (its inode, time and size): a checkpoint that was copied or replaced has none.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.files.inside import read_inside
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.on_disk import replace_file

_MAX_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Note:
    """When a checkpoint was verified (seconds since 1970), and whether all was in order."""

    time: float
    ok: bool


def recall(run: Path) -> dict[str, Note]:
    """The notes that are still of the checkpoints that stand there, by name."""
    found = {}
    for name, note in _read(run).items():
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError, OverflowError):
            if os.path.basename(name) == name and note["stamp"] == [*resume.stamp(run / name)]:
                found[name] = Note(float(note["time"]), note["ok"] is True)
    return found


def remember(run: Path, results: Mapping[str, bool]) -> None:
    """Note whether each checkpoint was in order; where nothing can be written, nothing is noted."""
    standing = recall(run)
    notes = {name: note for name, note in _read(run).items() if name in standing}
    for name, ok in results.items():
        with contextlib.suppress(OSError):
            notes[name] = {"time": time.time(), "ok": ok, "stamp": [*resume.stamp(run / name)]}
    with contextlib.suppress(OSError):
        replace_file(run / layout.VERIFIED, json.dumps(notes).encode())


def _read(run: Path) -> dict[str, Any]:
    try:
        notes = json.loads(read_inside(run, layout.VERIFIED, limit=_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: note for name, note in notes.items() if isinstance(note, dict)} if isinstance(notes, dict) else {}
