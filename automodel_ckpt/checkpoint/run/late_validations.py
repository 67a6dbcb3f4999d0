"""Results of validations that ran after their checkpoint was published: a signal had interrupted them.

A published checkpoint is never changed, so the results are stored beside it, with the digest of its manifest: they are
copied with the run, and are ignored when another checkpoint has the name. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.durable_io import replace_file

_MAX_BYTES = 1 << 22
_MAX_TEXT = 100


def note(checkpoint: Path, digest: str, losses: Mapping[str, Any]) -> None:
    """Store the *losses* of a checkpoint whose manifest has *digest*. Raises OSError."""
    run = checkpoint.parent
    kept = {
        name: entry
        for name, entry in _read(run).items()
        if layout.parse_checkpoint_name(name) and (run / name).is_dir()
    }
    kept[checkpoint.name] = {"manifest": digest, "losses": dict(losses)}
    replace_file(run / layout.LATE_VALIDATIONS, json.dumps(kept, indent=1).encode() + b"\n")


def recall(checkpoint: Path, digest: str) -> dict[str, Any]:
    """The stored losses of a checkpoint whose manifest has *digest*; empty where there are none."""
    entry = _read(checkpoint.parent).get(checkpoint.name)
    losses = (
        entry.get("losses") if isinstance(entry, dict) and entry.get("manifest") == digest else None
    )
    return (
        {key: value for key, value in losses.items() if _is_loss(value)}
        if isinstance(losses, dict)
        else {}
    )


def _is_loss(value: object) -> bool:
    """Whether a value can be a loss that a run wrote: null, a 64-bit number, or text for a value that is not finite."""
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    return (
        value is None
        or isinstance(value, float)
        or (isinstance(value, str) and len(value) <= _MAX_TEXT)
    )


def _read(run: Path) -> dict[str, Any]:
    try:
        raw = json.loads(read_safely(run, layout.LATE_VALIDATIONS, limit=_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}
