"""Publish what a command writes for another program: staged next to its target, made durable, and then renamed.

A reader finds the complete file or directory, or nothing new. A killed command leaves only ``.NAME.staging-HEX``, which
the next command with the same target removes. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from automodel_ckpt.base.durable_io import (
    fsync_directory,
    fsync_file,
    is_abandoned,
    owned,
    owner_digits,
    walk,
)
from automodel_ckpt.checkpoint.export.files import ANOTHER_OUTPUT, Log, staged, unwritable
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.commit import make_run_directory
from automodel_ckpt.checkpoint.parts.failures import SAME_COMMAND, as_failure
from automodel_ckpt.checkpoint.run import maintenance
from automodel_ckpt.checkpoint.run.directory import RunDirectory, check_not_a_file
from automodel_ckpt.checkpoint.run.lease import COMMAND_HINT
from automodel_ckpt.checkpoint.run.resume import KeepPolicy
from automodel_ckpt.errors import SaveFailed


def check_file_target(target: Path, *, overwrite: bool) -> None:
    """Raise :class:`SaveFailed` unless a file may be published as *target*: only *overwrite* replaces a file."""
    if target.is_dir():
        raise _occupied(target, "a directory", ANOTHER_OUTPUT)
    if os.path.lexists(target) and not overwrite:
        raise _occupied(target, "a file", f"{ANOTHER_OUTPUT}, or add --force to replace the file")


def check_directory_target(target: Path) -> None:
    """Raise :class:`SaveFailed` unless *target* does not exist or is an empty directory."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise _occupied(target, "a file", ANOTHER_OUTPUT)
    names = sorted(os.listdir(target))
    if names:
        raise _occupied(target, f"a directory with {', '.join(names[:3])}", ANOTHER_OUTPUT)


_occupied = partial(SaveFailed, "the output path already exists")


@contextmanager
def published_file(target: Path, log: Log, *, what: str) -> Iterator[Path]:
    """Yield the path of a file that replaces *target* when the block ends, and is removed if the block raises.

    Missing parents of *target* are created. *target* must not be a symbolic link: publishing renames, and would replace
    the link. *what* names the file in errors, for example ``the GGUF file``. An OSError in the block or in publishing
    becomes :class:`SaveFailed` with path and errno.
    """
    staging = None
    try:
        make_run_directory(target.parent)
        staging = target.with_name(layout.staging_name(target.name, owner_digits(target.parent)))
        for entry in os.scandir(target.parent):
            path = Path(entry.path)
            is_staged = layout.staged_name(path.name) == target.name
            if is_staged and entry.is_file(follow_symlinks=False) and is_abandoned(path):
                log(f"removing {path}, left by an interrupted export")
                path.unlink()
        staging.touch(exist_ok=False)
        with owned(staging):
            yield staging
            # Data before the name: after a power failure, the target is complete, old or new.
            fsync_file(staging)
            os.replace(staging, target)
        fsync_directory(target.parent)
    except OSError as error:
        error.filename = error.filename or str(target)
        raise unwritable(error, f"{what} could not be written") from error
    finally:
        if staging is not None:
            staging.unlink(missing_ok=True)


@contextmanager
def published_directory(target: Path, log: Log) -> Iterator[Path]:
    """Yield a directory that becomes *target* when the block ends, and is removed if the block raises.

    *target* must have passed :func:`check_directory_target`. The block may leave files that are not fsynced. Missing
    parents are created. An OSError in the block or in publishing becomes :class:`SaveFailed` with path and errno.
    """
    with staged(target, log) as staging:
        yield staging
        for parent, _, names in walk(staging):
            for name in names:
                fsync_file(Path(parent, name))


@contextmanager
def held_run(path: Path, doing: str) -> Iterator[RunDirectory]:
    """Yield the run directory *path* for a command that adds checkpoints; leftovers of killed saves are removed first.

    Raises :class:`SaveFailed` for an OSError in the block, which *doing* describes, or if a live run has the directory.
    """
    run = RunDirectory(path, KeepPolicy(), "val_loss")
    check_not_a_file(path)
    try:
        # The lease first: recover() removes staging directories, which a live run may be writing.
        run.hold(COMMAND_HINT)
        maintenance.recover(run.root)
        yield run
    except OSError as error:
        raise as_failure(error, doing, run.root, restart=SAME_COMMAND) from error
    finally:
        run.release()
