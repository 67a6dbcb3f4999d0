"""Results of validations that ran after their checkpoint was published, because a signal interrupted them before.

A published checkpoint is never changed, so the results are stored in the run directory with the digest of the manifest.
They are copied with the run, and ignored if another checkpoint has the name. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import read_safely

# The file is not trusted, and JSON takes many times its size once parsed.
_MAX_BYTES = 1 << 22
_MAX_TEXT = 100


def note(checkpoint: Path, digest: str, losses: Mapping[str, Any]) -> None:
    """Store the *losses* of a checkpoint whose manifest has *digest*. Raises OSError."""
    run = checkpoint.parent
    # Entries of removed checkpoints are dropped: a long run would reach the limit of _read().
    entries = {}
    for name, entry in _read(run).items():
        if layout.parse_checkpoint_name(name) and (run / name).is_dir():
            entries[name] = entry
    entries[checkpoint.name] = {"manifest": digest, "losses": dict(losses)}
    content = json.dumps(entries, indent=1) + "\n"
    replace_file(run / layout.LATE_VALIDATIONS, content.encode())


def recall(checkpoint: Path, digest: str) -> dict[str, Any]:
    """Return the stored losses of a checkpoint whose manifest has *digest*; empty if there are none."""
    entry = _read(checkpoint.parent).get(checkpoint.name)
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


def _read(run: Path) -> dict[str, Any]:
    try:
        raw = parse_json(read_safely(run, layout.LATE_VALIDATIONS, limit=_MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}
