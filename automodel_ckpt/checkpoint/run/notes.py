"""Small JSON files in a run directory: written in one rename, read with a limit. None of them is trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.errors import CheckpointUnusable

MAX_BYTES = 1 << 20
"""The limit by default: JSON takes many times its size once parsed."""
Damaged = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
"""What reading fields of a note that another program changed may raise."""


def read_note(directory: Path, name: str, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Return the mapping in the file *name* of *directory*; empty if the file is missing, damaged or too large."""
    try:
        found = parse_json(read_safely(directory, name, limit=limit))
    except (OSError, ValueError, CheckpointUnusable):
        return {}
    return found if isinstance(found, dict) else {}


def write_note(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a note. Raises OSError."""
    replace_file(path, json.dumps(content).encode() + b"\n")
