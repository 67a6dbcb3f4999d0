"""Checkpoints that can be trusted: save, load, verify and consolidate. Names load on first use, so that the parts
without torch stay without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.checkpointer import Checkpointer
    from automodel_ckpt.checkpoint.export.hf_assets import HFAssets
    from automodel_ckpt.checkpoint.loader import Resumed
    from automodel_ckpt.checkpoint.options import CheckpointOptions
    from automodel_ckpt.checkpoint.parts.discovery import discover
    from automodel_ckpt.checkpoint.parts.manifest import Manifest
    from automodel_ckpt.checkpoint.saving.save import SaveReport

__all__ = [
    "CheckpointOptions",
    "Checkpointer",
    "HFAssets",
    "Manifest",
    "Resumed",
    "SaveReport",
    "discover",
]

_HOMES = {
    "CheckpointOptions": "options",
    "Checkpointer": "checkpointer",
    "Resumed": "loader",
    "SaveReport": "saving.save",
    "HFAssets": "export.hf_assets",
    "Manifest": "parts.manifest",
    "discover": "parts.discovery",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
