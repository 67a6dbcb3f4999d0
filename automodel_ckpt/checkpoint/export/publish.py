"""Publishing an export: it is staged next to its target, made durable, and then renamed, complete or not at all.

A directory is replaced only if an export of this program wrote every file in it. If the file system can swap two
directories in one step (RENAME_EXCHANGE), a reader always finds the old export or the new one. Otherwise there is a
short gap, which the log mentions. A process that is killed in the gap leaves the old export under a name from which the
next export restores it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from automodel_ckpt.base.durable_io import fsync_directories, fsync_directory, walk
from automodel_ckpt.checkpoint.export.export_leftovers import Log, clear_leftovers
from automodel_ckpt.checkpoint.export.export_manifest import ExportManifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.ownership import owned, owner_digits
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed, os_problem, writing_hint

Check = Callable[[], None]

_NUM_SHOWN = 5


def resolved_target(output: str | os.PathLike[str] | None, default: Path) -> Path:
    """Return the directory of an export without links: *output*, or else *default*, which is in the checkpoint.

    Raises :class:`SaveFailed` if *default* is used and is a symbolic link: a checkpoint from elsewhere must not choose
    where an export is written.
    """
    if output is None and default.is_symlink():
        raise SaveFailed(
            "the default directory of the export is a symbolic link",
            where=default,
            value=os.readlink(default),
            hint="remove the link, or name a directory with --output",
        )
    # A rename onto a link would replace the link, and the staging directory must be on the file system of the target.
    return Path(os.path.realpath(default if output is None else output))


def check_target(target: Path) -> None:
    """Raise :class:`SaveFailed` unless an export may replace *target*: it does not exist, is empty, or is an export."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise _not_replaceable(target, "not a directory")
    exported = set()
    with contextlib.suppress(CheckpointUnusable):
        exported = {*ExportManifest.read(target).files, layout.EXPORT_MANIFEST}
    others = (file for file in _files(target) if file not in exported)
    # Not all of them: the target may be the root of a file system.
    shown = list(itertools.islice(others, _NUM_SHOWN))
    if shown:
        raise _not_replaceable(target, ", ".join(map(repr, shown)))


def _not_replaceable(target: Path, value: str) -> SaveFailed:
    return SaveFailed(
        "the output directory holds files that no export made",
        where=target,
        value=value,
        hint="move them away, or choose another output path",
    )


def _files(directory: Path) -> Iterator[str]:
    """Yield the relative paths of all files below *directory*, and of links, which are not followed."""
    for parent, directories, names in walk(directory):
        directories.sort()
        links = [name for name in directories if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*names, *links]):
            yield os.path.relpath(os.path.join(parent, name), directory)


@contextlib.contextmanager
def staged(target: Path, log: Log, *, before_publishing: Check = lambda: None) -> Iterator[Path]:
    """Yield a staging directory, which replaces *target* when the block ends and is removed if the block raises.

    *before_publishing* is called last. If it raises, *target* is unchanged. An OSError in the block or in publishing
    becomes :class:`SaveFailed` with path and errno.
    """
    staging = None
    try:
        commit.make_run_directory(target.parent)
        clear_leftovers(target, log)
        staging = target.with_name(layout.staging_name(target.name, owner_digits(target.parent)))
        os.mkdir(staging)
        # Locked: another export could remove an unlocked staging directory as a leftover.
        with owned(staging):
            yield staging
            # Again: files may have been added to the target while the export was written.
            check_target(target)
            # Right before the rename: a run may have lost its lease during a long copy.
            before_publishing()
            _publish(staging, target, log)
    except OSError as error:
        hint = f"{writing_hint(error)}, or choose another output path; nothing was changed"
        problem = os_problem(error, "the export could not be written", hint=hint)
        raise SaveFailed.all_of([problem]) from error
    finally:
        # After a swap, the export that was replaced has the staging directory's name.
        if staging is not None:
            commit.discard(staging)


def _publish(staging: Path, target: Path, log: Log) -> None:
    # The names in each directory must be durable before the staging directory gets the export's name.
    fsync_directories(staging)
    if not os.path.lexists(target):
        os.rename(staging, target)
    elif not commit.exchange(staging, target):
        _replace_with_gap(staging, target, log)
    fsync_directory(target.parent)


def _replace_with_gap(staging: Path, target: Path, log: Log) -> None:
    aside = target.with_name(f".{target.name}.previous-{owner_digits(target.parent)}")
    log(f"this filesystem cannot swap directories: for a moment {target} is missing")
    # Another process must not take the export that is aside for a leftover: it is locked, and was changed just now.
    with owned(target):
        os.utime(target)
        # After a kill between the two renames, clear_leftovers gives the old export its name back.
        os.rename(target, aside)
        try:
            os.rename(staging, target)
        except OSError:
            os.rename(aside, target)
            raise
        # Durable before the old export is deleted: a power failure must leave one of the two.
        fsync_directory(target.parent)
        commit.discard(aside)
