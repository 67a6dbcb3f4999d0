"""The files that a node has of a save to the memory of several nodes. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from automodel_ckpt.base.durable_io import fsync_directory, walk
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.errors import CheckpointUnusable

SAVE = ".save"
"""The file in each published directory with the digest of the checkpoint's manifest, which only some nodes have."""
RECEIVING = ".receiving-"
"""How the names of files that are being received begin."""
_NO_PARTS = frozenset({SAVE, f".{SAVE}", f".{layout.MANIFEST}"})
"""Files that are not of the checkpoint: the record, and what a killed process leaves of it or of the manifest."""
SET_ASIDE = ".unusable-"
"""The prefix of checkpoints that the nodes of a start do not have completely."""
EARLIER_LOGS = ".earlier-logs-"
"""The prefix of directories with the logs of a generation of the run. The generation's number follows."""
_SAVE_BYTES = 256


def mark_save(directory: Path, digest: str) -> None:
    """Record in *directory* which save its files are of, by the *digest* of the manifest. Raises OSError."""
    commit.write_by_rename(directory / SAVE, digest.encode())


def save_digest(directory: Path) -> tuple[str | None, bool]:
    """The digest of the save that the files in *directory* are of, and whether its manifest is among them."""
    with contextlib.suppress(OSError, CheckpointUnusable):
        return Summary.read(directory).digest, True
    with contextlib.suppress(OSError, CheckpointUnusable):
        return read_safely(directory, SAVE, limit=_SAVE_BYTES).decode("ascii", "replace"), False
    return None, False


def is_of_save(directory: Path) -> bool:
    """Whether a save has written *directory*: it has a manifest or the record of a save, or nothing yet.

    False for a link, which a user has created, whatever its target is.
    """
    if directory.is_symlink():
        return False
    if any(os.path.lexists(directory / file) for file in (layout.MANIFEST, SAVE)):
        return True
    with contextlib.suppress(OSError):
        # A process that was killed may leave the temporary file of the record.
        return _NO_PARTS.issuperset(os.listdir(directory))
    return False


def set_aside(path: Path) -> None:
    """Rename a checkpoint, or what this node has of it, so that it is not found. Raises OSError."""
    _remove(path.with_name(SET_ASIDE + path.name))
    os.rename(path, path.with_name(SET_ASIDE + path.name))
    fsync_directory(path.parent)


def bring_back(directory: Path) -> None:
    """Undo :func:`set_aside` for all checkpoints in *directory* if their names are free. Raises OSError."""
    for path in _set_aside_in(directory):
        target = path.with_name(path.name.removeprefix(SET_ASIDE))
        if not os.path.lexists(target):
            os.rename(path, target)


def saves_set_aside(directory: Path) -> list[Summary]:
    """The checkpoints in *directory* that were set aside and have a manifest, but no links."""
    found = []
    for path in _set_aside_in(directory):
        if path.is_symlink():
            continue
        with contextlib.suppress(OSError, CheckpointUnusable):
            found.append(Summary.read(path))
    return found


def remove_set_aside(directory: Path, kept: str = "") -> list[str]:
    """Remove the checkpoints in *directory* that were set aside, except the one with the digest *kept*.

    If none is kept, logs of earlier generations are removed, too. Returns the names of the checkpoints. Raises OSError.
    """
    removed = []
    if not kept:
        for entry in list(os.scandir(directory)):
            number = entry.name.removeprefix(EARLIER_LOGS)
            if number != entry.name and number.isdecimal():
                _remove(Path(entry.path))
    for path in _set_aside_in(directory):
        if kept and not path.is_symlink() and save_digest(path)[0] == kept:
            continue
        _remove(path)
        removed.append(path.name.removeprefix(SET_ASIDE))
    return removed


def _set_aside_in(directory: Path) -> list[Path]:
    found = []
    for entry in list(os.scandir(directory)):
        name = entry.name.removeprefix(SET_ASIDE)
        if name != entry.name and layout.parse_checkpoint_name(name) is not None:
            found.append(Path(entry.path))
    return found


def _remove(path: Path) -> None:
    if os.path.lexists(path):
        commit.discard(commit.withdraw(path))


def files_below(directory: Path) -> Iterator[str]:
    """Yield the complete files of a save below *directory*, by their paths relative to it; not the rank manifests.

    Raises OSError for a directory that cannot be read.
    """
    for folder, directories, files in walk(directory):
        if layout.PARTS in directories:
            directories.remove(layout.PARTS)
        for file in files:
            if not file.startswith(RECEIVING) and file not in _NO_PARTS:
                yield str(Path(folder, file).relative_to(directory))
