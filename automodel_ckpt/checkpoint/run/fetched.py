"""What a start has fetched from a store into the run directory, and which names mean that store."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.options import RemoteOptions

DIRECTORY = ".fetched"
"""The directory in a run directory with a checkpoint that is only loaded, and then removed."""


def own_name(restore_from: str | None, settings: RemoteOptions | None) -> str | None:
    """Return *restore_from*, without the URL of the run's store if it begins with it."""
    if restore_from is None or settings is None or not is_url(restore_from):
        return restore_from
    url = settings.url.rstrip("/")
    name = restore_from.rstrip("/").removeprefix(f"{url}/")
    if restore_from.rstrip("/") == url:
        return layout.LATEST
    is_name = name in layout.POINTERS or layout.parse_checkpoint_name(name) is not None
    return name if is_name else restore_from


def options_for(url: str, settings: RemoteOptions | None) -> Mapping[str, Any]:
    """Return the options of the run's store for another *url*, if it is in a store of the same kind."""
    if settings is None or settings.url.partition("://")[0] != url.partition("://")[0]:
        return {}
    return settings.options


def remove_fetched(root: Path) -> None:
    """Remove what a start has fetched only to load it. Raises OSError."""
    path = root / DIRECTORY
    if path.is_symlink():
        # What it names is not ours.
        path.unlink()
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
