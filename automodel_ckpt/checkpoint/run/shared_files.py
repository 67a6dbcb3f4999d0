"""How many bytes the checkpoints of a run take together: they can share files by hard links. Imports no torch."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

Inode = tuple[int, int]
"""Device and number of a file; equal for all its names."""


def repeated_bytes(checkpoints: Sequence[Path]) -> int:
    """Return the bytes that the sizes of *checkpoints* count more than once: shared files take their bytes once."""
    counts: Counter[Inode] = Counter()
    repeated = 0
    for checkpoint in checkpoints:
        for _, status in _files(checkpoint):
            if status.st_nlink > 1:
                inode = (status.st_dev, status.st_ino)
                repeated += status.st_size if counts[inode] else 0
                counts[inode] += 1
    return repeated


def freed_bytes(checkpoints: Sequence[Path]) -> list[int]:
    """Return the bytes that the removal of each of *checkpoints* frees, if they are removed in this order.

    A file is freed with its last name.
    """
    removed: Counter[Inode] = Counter()
    freed: list[int] = []
    for checkpoint in checkpoints:
        num_bytes = 0
        for _, status in _files(checkpoint):
            inode = (status.st_dev, status.st_ino)
            removed[inode] += 1
            if removed[inode] >= status.st_nlink:
                num_bytes += status.st_size
        freed.append(num_bytes)
    return freed


def _files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the regular files below a directory. Links are not followed; what disappears meanwhile is skipped."""
    for parent, _, names in os.walk(directory):
        for name in names:
            path = Path(parent, name)
            try:
                status = os.lstat(path)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield path, status
