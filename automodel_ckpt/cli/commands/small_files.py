"""What the small files of a checkpoint say, as commands show and compare it; empty where they cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def recipe_leaves(checkpoint: Path) -> dict[str, str]:
    """The recipe: dotted key to the text of each value."""
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.config.changes import saved_recipe

    return saved_recipe(checkpoint / layout.CONFIG)


def first_state(checkpoint: Path, files: tuple[str, ...]) -> dict[str, Any]:
    """The state in the first of an attribute's files, where it is plain."""
    from automodel_ckpt.checkpoint.state.display import plain_state

    return plain_state(checkpoint, files[0]) if files else {}
