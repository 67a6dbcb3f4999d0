"""How an export appears: staged beside its place, durable before it has its name, and whole or not at all.

A directory is replaced only when an export of ours made every file in it. Where the system can swap two directories in
one step (RENAME_EXCHANGE), a reader always finds the old export or the new one. Elsewhere there is a short gap, named
in the log; a process killed in it leaves the old export under a name from which the next one restores it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.export_leftovers import Log, clear_leftovers
from automodel_ckpt.checkpoint.export_manifest import ExportManifest
from automodel_ckpt.checkpoint.files.ownership import owned, owner_digits
from automodel_ckpt.durable_io import fsync_directory
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed, os_problem

Check = Callable[[], None]

_REMEDY = "free space or choose another --output; nothing was changed"


def check_target(target: Path) -> None:
    """Raise :class:`SaveFailed` unless the export may take the place *target*: free, empty, or an export's own."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        _check_replaceable(target, "not a directory")
    if strangers := sorted(_files(target) - _exported_files(target)):
        _check_replaceable(target, ", ".join(map(repr, strangers[:5])))


def _check_replaceable(target: Path, value: str) -> None:
    raise SaveFailed(
        "the output directory holds files that no export made",
        where=str(target),
        value=value,
        hint="move them away, or choose another --output",
    )


def _files(directory: Path) -> set[str]:
    return {
        os.path.relpath(os.path.join(parent, name), directory)
        for parent, directories, names in os.walk(directory)
        for name in [*names, *(d for d in directories if os.path.islink(os.path.join(parent, d)))]
    }


def _exported_files(directory: Path) -> set[str]:
    """The files that the export in *directory* lists as its own; none where there is no such list."""
    try:
        return {*ExportManifest.read(directory).files, layout.EXPORT_MANIFEST}
    except CheckpointUnusable:
        return set()


@contextlib.contextmanager
def staged(target: Path, log: Log, *, before_publishing: Check = lambda: None) -> Iterator[Path]:
    """A staging directory that takes *target*'s place when the block ends, and is removed when it raises.

    What *before_publishing* raises is raised, and *target* is unchanged then.
    An OSError in the block or in publishing becomes :class:`SaveFailed` with path and errno.
    """
    staging = None
    try:
        commit.make_run_directory(target.parent)
        clear_leftovers(target, log)
        staging = target.with_name(layout.staging_name(target.name, owner_digits(target.parent)))
        os.mkdir(staging)
        with owned(staging):
            yield staging
            check_target(target)
            before_publishing()
            _publish(staging, target, log)
    except OSError as error:
        raise SaveFailed.all_of(
            [os_problem(error, "the export could not be written", hint=_REMEDY)]
        ) from error
    finally:
        # After a swap the staging name holds the export that was replaced.
        if staging is not None:
            commit.discard(staging)


def _publish(staging: Path, target: Path, log: Log) -> None:
    for directory, _, _ in os.walk(staging, topdown=False):
        fsync_directory(Path(directory))
    if not os.path.lexists(target):
        os.rename(staging, target)
    elif not commit.exchange(staging, target):
        _replace_with_gap(staging, target, log)
    fsync_directory(target.parent)


def _replace_with_gap(staging: Path, target: Path, log: Log) -> None:
    aside = target.with_name(f".{target.name}.previous-{owner_digits(target.parent)}")
    log(f"this filesystem cannot swap directories: for a moment {target} is missing")
    os.rename(target, aside)
    try:
        os.rename(staging, target)
    except OSError:
        os.rename(aside, target)
        raise
    commit.discard(aside)
