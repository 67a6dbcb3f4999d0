"""Results of validations that ran after their checkpoint was published, because a signal interrupted them before.

A published checkpoint is never changed, so the results are stored in the run directory with the digest of the manifest.
They are copied with the run, and ignored if another checkpoint has the name. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.run.notes import read_note, write_note

_MAX_BYTES = 1 << 22
_MAX_TEXT = 100


def note(checkpoint: Path, digest: str, losses: Mapping[str, Any]) -> None:
    """Store the *losses* of a checkpoint whose manifest has *digest*. Raises OSError."""
    run = checkpoint.parent
    # Entries of removed checkpoints are dropped: a long run would reach the limit.
    entries = {}
    for name, entry in read_note(run, layout.LATE_VALIDATIONS, _MAX_BYTES).items():
        if layout.parse_checkpoint_name(name) and (run / name).is_dir():
            entries[name] = entry
    entries[checkpoint.name] = {"manifest": digest, "losses": dict(losses)}
    write_note(run / layout.LATE_VALIDATIONS, entries)


def recall(checkpoint: Path, digest: str) -> dict[str, Any]:
    """Return the stored losses of a checkpoint whose manifest has *digest*; empty if there are none."""
    notes = read_note(checkpoint.parent, layout.LATE_VALIDATIONS, _MAX_BYTES)
    entry = notes.get(checkpoint.name)
    if not isinstance(entry, dict) or entry.get("manifest") != digest:
        return {}
    losses = entry.get("losses")
    if not isinstance(losses, dict):
        return {}
    return {key: value for key, value in losses.items() if _is_loss(value)}


def _is_loss(value: object) -> bool:
    """Whether a value can be a loss that a run wrote: null, a 64-bit number, or text for a value that is not finite."""
    # JSON integers can have thousands of digits, which float() cannot convert.
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    return value is None or isinstance(value, float)
