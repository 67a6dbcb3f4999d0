"""Where an export is published: the path of ``--output``, or its default next to the source."""

from __future__ import annotations

import os
from pathlib import Path

from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.publishing import check_directory_target, check_file_target

_ROOT = Path("/")


def file_output(
    source: Source, output: str | os.PathLike[str] | None, suffix: str, *, overwrite: bool
) -> Path:
    """Return the path of the file to publish: *output*, or the source's name with *suffix*, next to it.

    Raises :class:`SaveFailed` if there is something that may not be replaced.
    """
    target = _real(output or _next_to(source, suffix))
    check_file_target(target, overwrite=overwrite)
    return target


def directory_output(source: Source, output: str | os.PathLike[str] | None, suffix: str) -> Path:
    """Return the path of the directory to publish: *output*, or the source's name with *suffix*, next to it.

    Raises :class:`SaveFailed` if there is something else than an empty directory.
    """
    target = _real(output or _next_to(source, suffix))
    check_directory_target(target)
    return target


def nbytes_below(directory: Path) -> int:
    """Return the bytes of all files in *directory* and its subdirectories."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _next_to(source: Source, suffix: str) -> Path:
    # Formats whose files can be in several places describe them relative to the root of the file system.
    path = source.model_directory if source.root == _ROOT else source.root
    return path.with_name(path.name + suffix)


def _real(output: str | os.PathLike[str]) -> Path:
    # Publishing renames: without this, it would replace a link instead of its target.
    return Path(os.path.realpath(output))
