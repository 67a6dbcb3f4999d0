"""Results of ``ckpt verify`` and of the verification at starts, stored in the run directory for ``ckpt ls``.

A result belongs to one manifest (inode, time and size): a copied or replaced checkpoint does not have it. Damage is
recorded until a later verification finds the checkpoint intact.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.run.notes import Damaged, read_note, write_note

_MAX_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Note:
    """When a checkpoint was verified (seconds since 1970), and whether it was intact."""

    time: float
    ok: bool


def recall(run: Path) -> dict[str, Note]:
    """Return the results for the checkpoints in *run*, by their names."""
    return {name: Note(entry["time"], entry["ok"]) for name, entry in _current(run).items()}


def remember(run: Path, results: Mapping[str, bool]) -> None:
    """Store whether each checkpoint was intact. Does nothing if the directory cannot be written."""
    notes = _current(run)
    with contextlib.suppress(OSError):
        for name, ok in results.items():
            with contextlib.suppress(FileNotFoundError):
                stamp = list(resume.stamp(run / name))
                notes[name] = {"time": time.time(), "ok": ok, "stamp": stamp}
        write_note(run / layout.VERIFIED, notes)


def _current(run: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of checkpoints with the same manifest as when they were verified."""
    found = {}
    for name, entry in read_note(run, layout.VERIFIED, _MAX_BYTES).items():
        with contextlib.suppress(OSError, *Damaged):
            stamp = [int(number) for number in entry["stamp"]]
            if layout.is_checkpoint(name) and stamp == list(resume.stamp(run / name)):
                ok = entry["ok"] is True
                found[name] = {"time": float(entry["time"]), "ok": ok, "stamp": stamp}
    return found
