"""Recipes with flags, as ``ckpt-train --print-config`` prints them."""

import contextlib
import io
from pathlib import Path
from typing import Any

from automodel_ckpt import load_recipe
from automodel_ckpt.cli.train import main
from automodel_ckpt.errors import RecipeError


def output(*words: str) -> str:
    """Return what ``ckpt-train`` prints for *words*. Raises :class:`RecipeError` with its messages."""
    text, messages = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(messages):
        code = main(words)
    if code:
        raise RecipeError(messages.getvalue(), where=" ".join(words), value=code, hint="")
    return text.getvalue()


def printed(recipe: Path, *words: str) -> str:
    """Return the configuration that *recipe* and *words* give."""
    return output(str(recipe), "--print-config", *words)


def load(recipe: Path, *words: str) -> Any:
    if not words:
        return load_recipe(recipe)
    text = printed(recipe, *words)
    path = recipe.with_name("printed.yaml")
    path.write_text(text)
    return load_recipe(path)
