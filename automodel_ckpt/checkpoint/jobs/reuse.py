"""Incremental saves: a new checkpoint shares unchanged files with an earlier one. Imports no torch.

A format stores the tensors that do not train in separate files. Such a file becomes a hard link to the file of the same
name in an earlier checkpoint if the digest of what the save would write, computed from memory, equals the digest in
that checkpoint's manifest. Otherwise it is written. A shared file is never opened for writing, and each checkpoint
stays complete when the others are removed.

The earlier file is not read again: it may have been damaged on the disk since it was written. Therefore a file is
shared only while it is younger than a day, and :attr:`Previous.avoid` can name a checkpoint that must stay independent.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.base.durable_io import fsync_file
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import METER, FileRecord
from automodel_ckpt.checkpoint.files.safe_open import begins_with
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.slices import Slice
from automodel_ckpt.checkpoint.parts.tree import FileContents, FileSlice, size_problem
from automodel_ckpt.errors import CheckpointUnusable

MAX_AGE_SECONDS = 86400.0
"""A file that is older is written anew, so that damage on the disk does not pass to all later checkpoints."""


@dataclass(frozen=True, slots=True)
class Previous:
    """A published checkpoint of the same run. A save may share its unchanged files.

    Files that it shares with the checkpoint *avoid* are not shared once more. Both are absolute paths.
    """

    root: str
    avoid: str | None = None


def links_are_supported(previous: Path, staging: Path) -> bool:
    """Whether a file of the checkpoint *previous* can be hard-linked into a staging directory."""
    probe = staging / layout.PARTS / f".probe-{uuid.uuid4().hex}"
    try:
        os.link(previous / layout.MANIFEST, probe, follow_symlinks=False)
        os.unlink(probe)
    except OSError:
        return False
    return True


class ReusableFiles:
    """The files of a previous checkpoint that a save compares with what it would write."""

    def __init__(self, previous: Previous, manifest: Manifest) -> None:
        self._root = Path(previous.root)
        self._avoid = None if previous.avoid is None else Path(previous.avoid)
        self._manifest = manifest
        self._contents: FileContents | None = None

    @classmethod
    def open(cls, previous: Previous | None) -> ReusableFiles | None:
        """Read the manifest of *previous*. Returns None when there is none, or when it cannot be read any more."""
        if previous is None:
            return None
        try:
            return cls(previous, Manifest.read(Path(previous.root)))
        except CheckpointUnusable:
            # It was removed meanwhile: everything is written.
            return None

    def record(self, file: str) -> FileRecord | None:
        """The size and digest of a file of the previous checkpoint. Returns None when it cannot be shared."""
        record = self._manifest.files.get(file)
        if record is None or size_problem(self._root, file, record) is not None:
            return None
        try:
            status = os.lstat(self._root / file)
        except OSError:
            return None
        # A clock that was set back makes a file look younger than it is, but not forever.
        if not 0 <= time.time() - status.st_mtime <= MAX_AGE_SECONDS:
            return None
        if self._avoid is not None:
            with contextlib.suppress(OSError):
                other = os.lstat(self._avoid / file)
                if (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino):
                    return None
        return record

    def link(self, file: str, record: FileRecord, staging: Path) -> bool:
        """Link *file* of the previous checkpoint, which has this *record*, below *staging*. False if that fails."""
        target = staging / file
        try:
            os.link(self._root / file, target, follow_symlinks=False)
            if size_problem(staging, file, record) is not None:
                os.unlink(target)
                return False
            # It is durable as part of its checkpoint, unless a user copied that without flushing it.
            fsync_file(target)
        except OSError:
            # EMLINK, EXDEV, EPERM, or the checkpoint was removed: the file is written instead.
            with contextlib.suppress(OSError):
                os.unlink(target)
            return False
        METER.nbytes += record.size
        return True

    def same_file(self, file: str, header: bytes, slices: Sequence[Slice]) -> FileRecord | None:
        """The record of a file of the previous checkpoint that consists of *header* and *slices*; None for any other.

        The slices have the digests of what a save would write.
        """
        record = self.record(file)
        # An empty slice has no bytes.
        filled = {stored for stored in slices if stored.nbytes}
        if record is None or {one.stored for one in self.slices_of(file)} != filled:
            return None
        if len(header) + sum(stored.nbytes for stored in filled) != record.size:
            return None
        # No digest in the manifest covers the header alone.
        return record if begins_with(self._root, file, header) else None

    def slices_of(self, file: str) -> Sequence[FileSlice]:
        """The slices of a file of the previous checkpoint that are not empty; none where their table is damaged."""
        # A damaged table of an earlier checkpoint must not prevent saves: nothing of it is shared.
        with contextlib.suppress(CheckpointUnusable):
            if self._contents is None:
                self._contents = FileContents(self._manifest.trees.values())
            return self._contents.slices(file)
        return ()
