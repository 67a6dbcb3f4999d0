"""Results of ``ckpt verify`` and of the verification at starts, stored in the run directory for ``ckpt ls``.

A result belongs to one manifest (inode, time and size). A renamed checkpoint has the result, and a copied or replaced
one does not. Damage is recorded until a later verification finds the checkpoint intact.
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

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.run import resume

# The file is not trusted, and JSON takes many times its size once parsed.
_MAX_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Note:
    """When a checkpoint was verified (seconds since 1970), and whether it was intact."""

    time: float
    ok: bool


def recall(run: Path) -> dict[str, Note]:
    """Return the results for the checkpoints in *run*, by their current names."""
    return {name: note for name, (note, _) in _current(run).items()}


def _current(run: Path) -> dict[str, tuple[Note, list[int]]]:
    """Return the results, each with the :func:`resume.stamp` of its manifest."""
    # By stamp and not by name: a checkpoint may have been renamed, or replaced by another one.
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
                found[name] = (notes[stamp], list(stamp))
    return found


def _directories(run: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(run) if layout.is_checkpoint(entry.name))
    except OSError:
        return []


def remember(run: Path, results: Mapping[str, bool]) -> None:
    """Store whether each checkpoint was intact. Does nothing if the directory cannot be written."""
    notes: dict[str, dict[str, Any]] = {}
    for name, (note, stamp) in _current(run).items():
        notes[name] = {"time": note.time, "ok": note.ok, "stamp": stamp}
    for name, ok in results.items():
        with contextlib.suppress(OSError):
            stamp = list(resume.stamp(run / name))
            notes[name] = {"time": time.time(), "ok": ok, "stamp": stamp}
    with contextlib.suppress(OSError):
        replace_file(run / layout.VERIFIED, json.dumps(notes).encode())


def _read(run: Path) -> dict[str, Any]:
    try:
        notes = parse_json(read_safely(run, layout.VERIFIED, limit=_MAX_BYTES))
    except (OSError, ValueError):
        return {}
    if not isinstance(notes, dict):
        return {}
    return {name: note for name, note in notes.items() if isinstance(note, dict)}
