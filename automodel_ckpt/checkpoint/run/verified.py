"""What ``ckpt verify`` and the starts of a run found, noted in the run's directory for ``ckpt ls``.

A note belongs to one manifest (its inode, time and size): a checkpoint keeps its note under another name, and one that
was copied or replaced has none. Damage stays noted until a later comparison finds the checkpoint intact.
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
    """The notes on the checkpoints that are in *run* now, by their names now."""
    return {name: note for name, (note, _) in _current(run).items()}


def _current(run: Path) -> dict[str, tuple[Note, list[int]]]:
    """The notes, with the stamp of the manifest that each belongs to."""
    notes: dict[tuple[int, ...], Note] = {}
    for entry in _read(run).values():
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            stamp = tuple(int(number) for number in entry["stamp"])
            notes[stamp] = Note(float(entry["time"]), entry["ok"] is True)
    found = {}
    for name in _directories(run):
        with contextlib.suppress(OSError):
            stamp = resume.stamp(run / name)
            if stamp in notes:
                found[name] = (notes[stamp], [*stamp])
    return found


def _directories(run: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(run) if layout.is_checkpoint(entry.name))
    except OSError:
        return []


def remember(run: Path, results: Mapping[str, bool]) -> None:
    """Note whether each checkpoint was in order; where nothing can be written, nothing is noted."""
    notes: dict[str, dict[str, Any]] = {
        name: {"time": note.time, "ok": note.ok, "stamp": stamp} for name, (note, stamp) in _current(run).items()
    }
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
