"""A fine-tuning trainer for Hugging Face models with checkpoints that can be trusted.

    from automodel_ckpt import Checkpointer, load_recipe, train

Importing this package is cheap: torch and transformers are imported when one of these names is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.former_names import keep_former_names
from automodel_ckpt.base.version import __version__

if TYPE_CHECKING:
    from automodel_ckpt.api import TrainingResult, load_recipe, train
    from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions

__all__ = [
    "CheckpointOptions",
    "Checkpointer",
    "TrainingResult",
    "__version__",
    "load_recipe",
    "train",
]

_HOMES = {
    "CheckpointOptions": "automodel_ckpt.checkpoint",
    "Checkpointer": "automodel_ckpt.checkpoint",
    "TrainingResult": "automodel_ckpt.api",
    "load_recipe": "automodel_ckpt.api",
    "train": "automodel_ckpt.api",
}

keep_former_names()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
