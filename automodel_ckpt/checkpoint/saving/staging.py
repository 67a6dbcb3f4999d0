"""The staging directory of one save: who owns it, and who removes it. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from automodel_ckpt.checkpoint.parts import commit


class Staging:
    """The staging directory of a save; it is created by :meth:`reserve`.

    Rank 0 owns the directory from its creation until its checkpoint is published. Any failure in between, on any rank,
    must end in :meth:`remove`. On other ranks only :attr:`path` is used; but if each node has its own directory, one
    rank of each owns that.
    """

    def __init__(self) -> None:
        self.path = Path()
        self._is_owner = False

    def reserve(self, root: Path, name: str, directories: Iterable[str]) -> Path:
        """Create the directory for the checkpoint *name* below *root*, with empty *directories* in it.

        Raises OSError, and then leaves no directory.
        """
        self.path = commit.reserve(root, name)
        self._is_owner = True
        try:
            for directory in directories:
                (self.path / directory).mkdir()
        except OSError:
            self.remove()
            raise
        return self.path

    def own(self) -> None:
        """Make this rank the owner of the directory :attr:`path` on its node, which it has created."""
        self._is_owner = True

    def remove(self) -> None:
        """Delete the directory, if this rank owns one."""
        if self._is_owner:
            commit.discard(self.path)

    def published(self) -> None:
        """Give up ownership: the directory was renamed to a checkpoint."""
        self._is_owner = False

    @contextlib.contextmanager
    def removed_on_failure(self) -> Iterator[Staging]:
        """Remove the directory when the block ends with any exception."""
        try:
            yield self
        # Not Exception: KeyboardInterrupt and DCP's CheckpointException do not derive from it.
        except BaseException:
            self.remove()
            raise
