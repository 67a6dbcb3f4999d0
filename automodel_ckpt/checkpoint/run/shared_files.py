"""How many bytes the checkpoints of a run take together: they can share files by hard links. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path


def repeated_bytes(checkpoints: Sequence[Path]) -> int:
    """Return the bytes that the sizes of *checkpoints* count more than once: shared files take their bytes once."""
    seen: set[tuple[int, int]] = set()
    repeated = 0
    for status in (status for checkpoint in checkpoints for status in _files(checkpoint)):
        inode = (status.st_dev, status.st_ino)
        repeated += status.st_size if inode in seen else 0
        seen.add(inode)
    return repeated


def freed_bytes(checkpoints: Sequence[Path]) -> list[int]:
    """Return the bytes that the removal of each of *checkpoints* frees, if they are removed in this order.

    A file is freed with its last name.
    """
    removed: Counter[tuple[int, int]] = Counter()
    freed: list[int] = []
    for checkpoint in checkpoints:
        freed.append(0)
        for status in _files(checkpoint):
            inode = (status.st_dev, status.st_ino)
            removed[inode] += 1
            if removed[inode] >= status.st_nlink:
                freed[-1] += status.st_size
    return freed


def _files(directory: Path) -> Iterator[os.stat_result]:
    """Yield the status of the regular files below a directory. What disappears meanwhile is skipped."""
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                if stat.S_ISREG(status.st_mode):
                    yield status
