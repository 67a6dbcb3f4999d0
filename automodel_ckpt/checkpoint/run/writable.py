"""Checks of a run directory before anything is written there. Imports no torch."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.errors import RecipeError

OPENING = "opening checkpoint.checkpoint_dir"


def check_links(directory: Path) -> None:
    """Raise :class:`RecipeError` if *directory* or one of its parents is a link to nothing."""
    for path in reversed([directory, *directory.parents]):
        # Unlike Path.exists(), this is False and not an error in a directory that cannot be searched.
        if os.path.exists(path):
            continue
        if os.path.islink(path):
            target = os.path.realpath(path)
            raise RecipeError(
                "the run directory is a link to a directory that does not exist",
                where=str(directory),
                value=f"{path} is a link to {target}, which does not exist",
                hint=f"create {target}, or use another run directory",
            )
        return


def check_outside_checkpoints(directory: Path) -> None:
    """Raise :class:`RecipeError` if *directory* is a checkpoint, or inside of one: it would be removed with it."""
    real = Path(os.path.realpath(directory))
    for path in (real, *real.parents):
        if layout.is_checkpoint(path.name) and os.path.lexists(path / layout.MANIFEST):
            raise RecipeError(
                "a run directory cannot be a checkpoint, or be inside of one",
                where=str(directory),
                value=f"{path} is a checkpoint",
                hint=f"use {path.parent} or another directory; a run resumes from its newest checkpoint, or from "
                "checkpoint.restore_from",
            )


def check_not_a_file(directory: Path) -> None:
    """Raise :class:`RecipeError` if *directory* exists and is no directory."""
    if directory.exists() and not directory.is_dir():
        raise RecipeError(
            "the run directory is a file",
            where=str(directory),
            value="not a directory",
            hint="name another directory",
        )


def check_writable(directory: Path) -> None:
    """Raise :class:`RecipeError` if a run could not create or write *directory*. Writes nothing."""
    check_links(directory)
    check_outside_checkpoints(directory)
    existing = directory.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    code = 0
    if not os.path.isdir(existing):
        code = errno.ENOTDIR
    elif os.statvfs(existing).f_flag & os.ST_RDONLY:
        code = errno.EROFS
    elif not os.access(existing, os.W_OK | os.X_OK):
        code = errno.EACCES
    if code:
        error = OSError(code, os.strerror(code), str(existing))
        raise as_failure(error, OPENING, directory, RecipeError)
