"""What custom recipes call to build the objects of their ``_target_`` sections, and programs to check a recipe.

The functions are in ``plugins.py`` and ``prepare.py``, which the package imports directly.
"""

from __future__ import annotations

from automodel_ckpt.config.callables.plugins import build, build_function, callable_of
from automodel_ckpt.config.callables.prepare import (
    PreparedRecipe,
    check_targets,
    prepare,
    resolve_recipe,
)

__all__ = [
    "PreparedRecipe",
    "build",
    "build_function",
    "callable_of",
    "check_targets",
    "prepare",
    "resolve_recipe",
]
