"""Find and remove what killed exports leave in a checkpoint.

An export is staged in ``.NAME.staging-HEX`` beside its target ``NAME``, and locked (flock) while it is written. On a
file system that cannot swap directories, the export that is replaced is ``.NAME.previous-HEX`` for a moment. Both can
be as large as the model. They belong to no checkpoint, so a checkpoint that holds them is intact.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.ownership import is_abandoned
from automodel_ckpt.checkpoint.parts import commit

Log = Callable[[str], None]

# A live process replaces an export between two renames, which takes milliseconds.
_REPLACED_SECONDS = 60.0


def clear_checkpoint(checkpoint: Path, log: Log) -> None:
    """Remove what killed exports left in the directories of a checkpoint's modules; one that was killed while it
    replaced another is undone.

    *checkpoint* is no symbolic link, which can point outside the run directory. What cannot be removed is logged, and
    tried again at the next start.
    """
    try:
        modules = [entry for entry in os.scandir(checkpoint) if entry.is_dir(follow_symlinks=False)]
        for module in sorted(modules, key=lambda entry: entry.name):
            names = [
                layout.export_of(entry.name)
                for entry in os.scandir(module.path)
                if entry.is_dir(follow_symlinks=False)
            ]
            for name in sorted({name for name in names if name is not None}):
                clear_leftovers(Path(module.path, name), log)
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
