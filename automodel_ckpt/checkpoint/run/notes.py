"""Small JSON files in a run directory: written in one rename, read with a limit. None of them is trusted.

Two of them are about checkpoints, which never change after their publication: the losses of validations that ran later,
because a signal interrupted them before, and the results of ``ckpt verify`` and of the verification at starts, for
``ckpt ls``. An entry belongs to one manifest: it is ignored if another checkpoint has the name. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.errors import CheckpointUnusable

log = logging.getLogger("automodel_ckpt")

MAX_BYTES = 1 << 20
"""The limit by default: JSON takes many times its size once parsed."""
Damaged = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
"""What reading fields of a note that another program changed may raise."""
_MAX_BYTES_OF_ALL = 1 << 22
"""The limit of a note about all checkpoints of a run."""
_MAX_TEXT = 100


def read_note(directory: Path, name: str, limit: int = MAX_BYTES) -> ValueDict:
    """Return the mapping in the file *name* of *directory*; empty if the file is missing, damaged or too large."""
    try:
        found = parse_json(read_safely(directory, name, limit=limit))
    except (OSError, ValueError, CheckpointUnusable):
        return {}
    return found if isinstance(found, dict) else {}


def write_note(path: Path, content: Values) -> None:
    """Replace a note. Raises OSError."""
    replace_file(path, json.dumps(content).encode() + b"\n")


def stamp(checkpoint: Path) -> tuple[int, int, int]:
    """Return (inode, mtime in ns, bytes) of a checkpoint's manifest, to detect a replaced one. Raises OSError."""
    # The inode counts because a copy can keep time and size.
    found = os.lstat(checkpoint / layout.MANIFEST)
    return found.st_ino, found.st_mtime_ns, found.st_size


def forget_memory(run: Path) -> None:
    """Make the memory checkpoints of *run* unusable, because the run continues without them. Called by rank 0."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(run / layout.MEMORY)
        log.info(
            "checkpoints in memory of earlier starts are not used: checkpoint.memory is not set"
        )


# ---------------------------------------------------------------- later validations


def note_losses(checkpoint: Path, digest: str, losses: Values) -> None:
    """Store the *losses* of a later validation of a checkpoint; *digest* is its manifest's. Raises OSError."""
    run = checkpoint.parent
    # Entries of removed checkpoints are dropped: a long run would reach the limit.
    entries = {}
    for name, entry in read_note(run, layout.LATE_VALIDATIONS, _MAX_BYTES_OF_ALL).items():
        if layout.parse_checkpoint_name(name) and (run / name).is_dir():
            entries[name] = entry
    entries[checkpoint.name] = {"manifest": digest, "losses": dict(losses)}
    write_note(run / layout.LATE_VALIDATIONS, entries)


def recall_losses(checkpoint: Path, digest: str) -> ValueDict:
    """Return the stored losses of a checkpoint, with a manifest that has *digest*; empty if there are none."""
    notes = read_note(checkpoint.parent, layout.LATE_VALIDATIONS, _MAX_BYTES_OF_ALL)
    with contextlib.suppress(*Damaged):
        entry = notes[checkpoint.name]
        if entry["manifest"] == digest:
            return {key: value for key, value in entry["losses"].items() if _is_loss(value)}
    return {}


def _is_loss(value: object) -> bool:
    """Whether a value can be a loss that a run wrote: null, a 64-bit number, or text for a value that is not finite."""
    # JSON integers can have thousands of digits, which float() cannot convert.
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    return value is None or isinstance(value, float)


# ---------------------------------------------------------------- verifications


class Verification(NamedTuple):
    """When a checkpoint was verified (seconds since 1970), and whether it was intact."""

    time: float
    ok: bool


def recall_verifications(run: Path) -> dict[str, Verification]:
    """Return the results for the checkpoints in *run* with the manifest that they had then, by their names.

    Damage is recorded until a later verification finds the checkpoint intact.
    """
    found = {}
    for name, entry in read_note(run, layout.VERIFIED, _MAX_BYTES_OF_ALL).items():
        with contextlib.suppress(OSError, *Damaged):
            is_same = [int(number) for number in entry["stamp"]] == list(stamp(run / name))
            if layout.is_checkpoint(name) and is_same:
                found[name] = Verification(float(entry["time"]), entry["ok"] is True)
    return found


def note_verifications(run: Path, results: Mapping[str, bool]) -> None:
    """Store whether each checkpoint was intact. Does nothing if the directory cannot be written."""
    now = time.time()
    current = recall_verifications(run) | {n: Verification(now, ok) for n, ok in results.items()}
    notes = {}
    for name, each in current.items():
        with contextlib.suppress(OSError):
            current_stamp = list(stamp(run / name))
            notes[name] = {"time": each.time, "ok": each.ok, "stamp": current_stamp}
    with contextlib.suppress(OSError):
        write_note(run / layout.VERIFIED, notes)
