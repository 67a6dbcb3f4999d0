"""Resolve a PATH on ``ckpt``'s command line: a run, a directory of runs, a checkpoint, a pointer, or a path inside."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from automodel_ckpt.errors import CheckpointUnusable

_MOST_LOOKED_AT = 10_000
NAME_ONE = "specify a run directory, a checkpoint or a pointer"
WHERE = "a run directory, a checkpoint, or a pointer such as checkpoints/LATEST"


def add_path(command: argparse.ArgumentParser) -> None:
    """Add the optional PATH argument, which defaults to the current directory."""
    command.add_argument(
        "path", nargs="?", default=".", metavar="PATH", help=f"{WHERE} (default: current directory)"
    )


def run_directory(path: Path) -> Path | None:
    """Return *path* or its ``checkpoints/`` if it holds checkpoints; otherwise None."""
    from automodel_ckpt.checkpoint.run import resume

    for directory in (path, path / "checkpoints"):
        if directory.is_dir() and resume.checkpoint_names(directory):
            return directory
    return None


def run_around(path: Path) -> Path | None:
    """Return the run directory that *path* is, contains, or is inside of; None if there is none."""
    from automodel_ckpt.checkpoint import layout

    if (run := run_directory(path)) is not None:
        return run
    real = Path(os.path.realpath(path))
    for inside in (real, *real.parents):
        if layout.parse_checkpoint_name(inside.name):
            return inside.parent
    return run_directory(path.parent) if not path.is_dir() else None


def runs_below(path: Path, depth: int = 3) -> Iterator[Path]:
    """Yield the run directories below *path*, sorted, down to *depth* levels. Skips hidden directories and links."""
    from automodel_ckpt.checkpoint.run import resume

    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)[:_MOST_LOOKED_AT]
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
            continue
        if resume.checkpoint_names(Path(entry.path)):
            yield Path(entry.path)
        elif depth > 1:
            yield from runs_below(Path(entry.path), depth - 1)


def find_checkpoint(path: Path) -> Path:
    """Resolve *path* to a directory: a run to its newest complete checkpoint, a pointer to its target.

    Raises :class:`CheckpointUnusable` if nothing is found.
    """
    from automodel_ckpt.checkpoint import commit, layout

    if path.is_dir() and not (path.name in layout.POINTERS and path.is_symlink()):
        run = run_directory(path)
        return _resolved(path) if run is None else _newest(run)
    stem = path.name.removesuffix(".txt")
    target = commit.pointed(path.parent, stem) if stem in layout.POINTERS else None
    if (
        target is None
        or not (path.parent / target).is_dir()
        or _is_second_name(path.parent / target)
    ):
        raise nothing("checkpoint not found", path, _seen(path, target), NAME_ONE)
    return _resolved(path.parent / target)


def _resolved(path: Path) -> Path:
    """An absolute path without links; a checkpoint that is itself a link keeps its place in its run."""
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.checkpoint.run.resume import is_moved

    if layout.parse_checkpoint_name(path.name) and is_moved(path):
        return path.parent.resolve() / path.name
    return path.resolve()


def _is_second_name(checkpoint: Path) -> bool:
    """Whether this is a link to another checkpoint of the same run."""
    from automodel_ckpt.checkpoint.run.resume import is_moved

    return checkpoint.is_symlink() and not is_moved(checkpoint)


def _seen(path: Path, target: str | None) -> str:
    """Describe what exists at *path* instead of a checkpoint."""
    if target is not None:
        return f"it points to {target}, which does not exist"
    if path.is_symlink():
        return f"a link to {os.readlink(path)}"
    return "a file" if path.exists() else "no such file or directory"


def whole_checkpoint(path: Path) -> Path:
    """Resolve *path* with :func:`find_checkpoint`; a tree such as ``model/`` resolves to the checkpoint around it.

    Raises :class:`CheckpointUnusable` if nothing is found, or if the directory is in no known format.
    """
    from automodel_ckpt.checkpoint import layout
    from automodel_ckpt.convert.sources import external

    found = find_checkpoint(path)
    for directory in (found, found.parent):
        if os.path.lexists(directory / layout.MANIFEST):
            return directory
    name = found.name
    named = (
        layout.parse_checkpoint_name(name) or layout.is_superseded(name) or layout.is_staging(name)
    )
    if named or external.kinds_in(found):
        return found
    raise nothing("no checkpoint found", path, "the directory is not in a known format", NAME_ONE)


def _newest(run: Path) -> Path:
    from automodel_ckpt.checkpoint.run import resume

    newest = resume.newest(run)
    if newest is None:
        raise nothing("no complete checkpoint found", run, "", "`ckpt ls` lists the reasons")
    return _resolved(run / newest.name)


def nothing(what: str, path: Path, value: str, hint: str) -> CheckpointUnusable:
    """Return the error for a path at which nothing usable was found."""
    return CheckpointUnusable(what, where=str(path), value=value, hint=hint)
