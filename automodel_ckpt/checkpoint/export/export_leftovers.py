"""Find and remove what killed exports leave in a checkpoint.

An export is staged in ``.NAME.staging-HEX`` beside its target ``NAME``, and locked (flock) while it is written. On a
file system that cannot swap directories, the export that is replaced is ``.NAME.previous-HEX`` for a moment. Both can
be as large as the model. They belong to no checkpoint, so a checkpoint that holds them is intact.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.ownership import is_abandoned
from automodel_ckpt.checkpoint.parts import commit

Log = Callable[[str], None]

# A live process replaces an export between two renames, which takes milliseconds.
_REPLACED_SECONDS = 60.0


def leftovers_in(checkpoint: Path) -> Iterator[Path]:
    """The directories that killed exports left in the directories of a checkpoint's modules, and those that exports use
    at this moment.

    Nothing is listed for a checkpoint that is a symbolic link: it can point outside the run directory.
    """
    if checkpoint.is_symlink():
        return
    for module in sorted(os.scandir(checkpoint), key=lambda entry: entry.name):
        if not module.is_dir(follow_symlinks=False):
            continue
        for entry in sorted(os.scandir(module.path), key=lambda entry: entry.name):
            if layout.is_export_leftover(entry.name) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def clear_checkpoint(checkpoint: Path, log: Log) -> None:
    """Remove what killed exports left in a checkpoint; one that was killed while it replaced another is undone.

    What cannot be removed is logged, and tried again at the next start.
    """
    try:
        targets = {
            path.with_name(name)
            for path in leftovers_in(checkpoint)
            if (name := layout.export_of(path.name))
        }
        for target in sorted(targets):
            clear_leftovers(target, log)
    except OSError as error:
        log(f"could not remove the leftovers of an interrupted export in {checkpoint}: {error}")


def clear_leftovers(target: Path, log: Log) -> None:
    """Remove what killed exports to *target* left next to it, and undo a replacement that was interrupted.

    Raises OSError.
    """
    name = re.escape(target.name)
    for entry in sorted(os.listdir(target.parent)):
        match = re.fullmatch(rf"\.{name}\.(staging|previous)-[0-9a-f]{{32}}", entry)
        if match is None:
            continue
        path = target.parent / entry
        is_only_export = match[1] == "previous" and not os.path.lexists(target)
        if is_only_export and is_abandoned(path, after_seconds=_REPLACED_SECONDS):
            # The kill was between two renames, where the file system cannot swap directories.
            os.rename(path, target)
            log(f"restored {target}: an earlier export was interrupted while replacing it")
        elif not is_only_export and is_abandoned(path):
            log(f"removing {path}, left by an interrupted export")
            commit.discard(path)
