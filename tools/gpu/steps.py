"""What several parts do first: write the base that they train."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu.session import BASE, PartRun, Session
from tools.gpu.shapes import LLAMA_1B, LLAMA_8B, TINY, write_base

_NAMES = {LLAMA_8B["hidden_size"]: "8B", LLAMA_1B["hidden_size"]: "1B"}


def base_of(part: PartRun, config: Mapping[str, Any]) -> Path | None:
    """The directory of the base of these shapes, which the first part that needs it writes; None if that failed."""
    session = part.session
    name = _NAMES[config["hidden_size"]]
    if name in session.bases:
        return session.bases[name]
    directory = session.scratch / f"base-{name}"
    shapes = TINY if session.is_dry_run else config
    if not part.measure(BASE, write_base, shapes, directory, session.device, limit=180):
        return None
    session.bases[name] = directory
    return directory


def remove_base(session: Session, config: Mapping[str, Any]) -> None:
    """Remove the base of these shapes, if there is one; a later part writes it again."""
    directory = session.bases.pop(_NAMES[config["hidden_size"]], None)
    if directory is not None:
        shutil.rmtree(directory)
