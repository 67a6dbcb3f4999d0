"""Resolve a PATH on ``ckpt``'s command line: a run, a directory of runs, a checkpoint, a pointer, or a path inside."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from automodel_ckpt.base.terminal import print_error
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import without_links
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import has_manifest
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.cli.common.arguments import CHECK_PATH
from automodel_ckpt.cli.launch.process import check_working_directory
from automodel_ckpt.errors import CheckpointUnusable, unusable

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Number of entries of a directory that are searched for runs: the current directory may be a data set's.
_MAX_ENTRIES = 10_000
# Runs or checkpoints that a message names, at most.
_MAX_NAMED = 3
IN_THE_WAY = "choose another one, or remove it"
OWN_ONLY = "name a run directory or a checkpoint; `ckpt import` makes one from other files"
_SPECIFY_ONE = "specify a run directory, a checkpoint or a pointer; `ckpt ls` lists them"


def download_directory(given: str | None, source: str) -> Path:
    """Return the directory to download to: *given*, or the last name in *source* in the working directory."""
    if given is None:
        check_working_directory()
        given = source.rpartition("/")[2]
    return Path(given).absolute()


def run_directory(path: Path) -> Path | None:
    """Return *path* or its ``checkpoints/`` if it contains checkpoints; otherwise None."""
    for directory in (path, path / "checkpoints"):
        if directory.is_dir() and resume.checkpoint_names(directory):
            return directory
    return None


def run_around(path: Path) -> Path | None:
    """Return the run directory that *path* is, contains as ``checkpoints/``, or is inside of.

    Returns None when there is none, or when *path* does not exist.
    """
    # `ckpt prune MISSPELLED` must not find the run next to it. A pointer may be a link without a target.
    if not os.path.lexists(path):
        return None
    run = run_directory(path)
    if run is not None:
        return run
    real = without_links(path)
    # realpath() first: the path may be a pointer, or go through a link.
    for inside in (real, *real.parents):
        if layout.parse_checkpoint_name(inside.name):
            return inside.parent
    is_file_of_run = not path.is_dir() and bool(resume.checkpoint_names(path.parent))
    return path.parent if is_file_of_run else None


def run_with_logs(path: Path) -> Path:
    """Return the run directory at or around *path*, or *path* itself: a run can have logs before its first checkpoint.

    Raises :class:`CheckpointUnusable` if *path* does not exist, or is a link to nothing.
    """
    # Before the check of the link: LATEST is in a run also if its target is gone.
    run = run_around(path)
    if run is None and not path.exists():
        raise unusable("run not found", path, _what_exists(path, None), "specify a run directory")
    if run is None and path.is_dir() and not os.path.lexists(path / layout.TRAINING_LOG):
        reject_several_runs(path)
    return run or path


def runs_below(path: Path, depth: int = 3) -> Iterator[Path]:
    """Yield the run directories below *path*, sorted, down to *depth* levels.

    Skips hidden directories, links, and directories that cannot be read.
    """
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)[:_MAX_ENTRIES]
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            is_run = bool(resume.checkpoint_names(Path(entry.path)))
        except OSError:
            continue
        if is_run:
            yield Path(entry.path)
        elif depth > 1:
            yield from runs_below(Path(entry.path), depth - 1)


def reject_several_runs(path: Path) -> None:
    """Raise :class:`CheckpointUnusable` if *path* is a directory of runs, and nothing else."""
    from automodel_ckpt.convert.formats.registry import formats_in

    runs = list(itertools.islice(runs_below(path), _MAX_NAMED + 1))
    if not runs or formats_in(path):
        return
    names = [str(run) for run in runs[:_MAX_NAMED]]
    if len(runs) > _MAX_NAMED:
        names.append("...")
    raise unusable(
        "the directory contains runs",
        path,
        "",
        f"specify one of them: {', '.join(names)}; `ckpt ls {path}` lists all",
    )


def local_model(path: str) -> Path | None:
    """Return *path* as a local path. Returns None for a name of the Hub.

    Raises :class:`CheckpointUnusable` if nothing exists there.
    """
    local = Path(path).expanduser()
    if os.path.lexists(local):
        return local
    if (
        _HUB_NAME.fullmatch(path)
        and local.name not in layout.POINTERS
        and not local.parent.is_dir()
    ):
        return None
    # A pointer exists as a text file, too.
    find_checkpoint(local)
    return local


def find_checkpoint(path: Path) -> Path:
    """Resolve *path*: a run to its newest complete checkpoint, a pointer to its target, a file of another program to
    itself. Print a warning if a run has a newer checkpoint that cannot be used.

    Raises :class:`CheckpointUnusable` if nothing is found, or if a directory cannot be read.
    """
    try:
        return _found_checkpoint(path)
    except PermissionError as error:
        raise CheckpointUnusable.of_system(
            error, "the checkpoint cannot be read", hint=CHECK_PATH
        ) from error


def _found_checkpoint(path: Path) -> Path:
    is_pointer_link = path.name in layout.POINTERS and path.is_symlink()
    if path.is_dir() and not is_pointer_link:
        run = run_directory(path)
        if run is None:
            reject_several_runs(path)
            return _resolved(path)
        return _newest(run)
    # Without symbolic links, a pointer is a text file: LATEST.txt.
    pointer = path.name.removesuffix(".txt")
    if pointer not in layout.POINTERS and path.is_file():
        return _external_file(path)
    target = commit.pointed(path.parent, pointer) if pointer in layout.POINTERS else None
    if target is not None:
        checkpoint = path.parent / target
        # A link to another checkpoint of its run is a second name.
        if checkpoint.is_dir() and (not checkpoint.is_symlink() or resume.is_moved(checkpoint)):
            return _resolved(checkpoint)
    raise unusable("checkpoint not found", path, _what_exists(path, target), _SPECIFY_ONE)


def has_name_of_checkpoint(name: str) -> bool:
    """Whether a directory with this *name* is a checkpoint of a run, a superseded one, or one that is being saved."""
    is_published = layout.parse_checkpoint_name(name) is not None
    return is_published or layout.is_superseded(name) or layout.is_staging(name)


def whole_checkpoint(path: Path) -> Path:
    """Resolve *path* with :func:`find_checkpoint`; a tree such as ``model/`` resolves to the checkpoint around it.

    Raises :class:`CheckpointUnusable` if nothing is found, or if the directory is in no known format.
    """
    from automodel_ckpt.convert.formats.registry import detect, formats_in

    found = find_checkpoint(path)
    for directory in (found, found.parent):
        if has_manifest(directory):
            return directory
    if has_name_of_checkpoint(found.name) or formats_in(found):
        return found
    known = detect(found)
    if known is not None and not known.is_readable:
        known.open(found)  # raises an error that names the format
    reason = "the directory is not in a known format"
    raise unusable("no checkpoint found", path, reason, _SPECIFY_ONE)


def _external_file(path: Path) -> Path:
    """Return the absolute path of a file that another program wrote.

    Raises :class:`CheckpointUnusable`, with the name of the format, if it cannot be read.
    """
    from automodel_ckpt.convert.formats.registry import detect

    known = detect(path)
    if known is None:
        raise unusable("this file is not a checkpoint", path, "an unknown format", _SPECIFY_ONE)
    if not known.is_readable:
        known.open(path)  # raises an error that names the format
    return without_links(path)


def _resolved(path: Path) -> Path:
    """Return the absolute path without links. A checkpoint that was moved elsewhere keeps its path in its run."""
    if layout.parse_checkpoint_name(path.name) and resume.is_moved(path):
        return path.parent.resolve() / path.name
    return path.resolve()


def _newest(run: Path) -> Path:
    newest = resume.newest(run)
    if newest is None:
        raise unusable("no complete checkpoint found", run, "", "`ckpt ls` lists the reasons")
    warning = resume.skipped_warning(run, newest)
    if warning is not None:
        print_error(f"warning: {warning}")
    return _resolved(run / newest.name)


def _what_exists(path: Path, target: str | None) -> str:
    """Describe what exists at *path*, a pointer to *target* or None, instead of a checkpoint."""
    if target is not None:
        return f"it points to {target}, which does not exist"
    if path.is_symlink():
        text = f"a link to {os.readlink(path)}"
        return text if path.exists() else f"{text}, which does not exist"
    return "a file" if path.exists() else "no such file or directory"
