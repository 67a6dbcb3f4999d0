"""Read the files of a checkpoint for an export: from the page cache what it has, with O_DIRECT the rest.

Bytes that are not in the page cache are read faster past it, into aligned blocks (``files/direct.py``).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import OrderedDict
from pathlib import Path

from automodel_ckpt.checkpoint.files.direct import (
    SECTOR_BYTES,
    begins_at_a_sector,
    bypass_page_cache,
)
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.errors import CheckpointUnusable

_MAX_OPEN = 64
_CACHEFUL_BYTES = 256 << 10
"""What is copied from the page cache in one call: it fits into the processor's cache."""
# For fewer bytes, the question whether they are cached costs more than the answer saves.
_ASK_FROM_BYTES = 64 << 10
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class Inputs:
    """The files below *root* that one thread reads, opened when they are needed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: OrderedDict[str, _Input] = OrderedDict()

    def close(self) -> None:
        for file in self._open.values():
            file.close()

    def read(self, file: str, start: int, memory: memoryview) -> None:
        """Fill *memory* with the bytes from *start*. Raises :class:`CheckpointUnusable` if the file ends before."""
        source = self._input(file)
        done = 0
        try:
            while done < len(memory):
                count = source.read(start + done, memory[done:])
                if count == 0:
                    raise _unreadable(self._root / file, start + done, "the file ends here")
                done += count
        except OSError as error:
            raise _unreadable(self._root / file, start + done, str(error.strerror)) from error

    def _input(self, file: str) -> _Input:
        if file not in self._open:
            if len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            # Opened twice: a duplicated descriptor would share the flag O_DIRECT.
            self._open[file] = _Input(open_safely(self._root, file), open_safely(self._root, file))
        self._open.move_to_end(file)
        return self._open[file]


class _Input:
    """One file: a descriptor that reads through the page cache, and one with O_DIRECT, if the file system has it."""

    def __init__(self, cached: int, direct: int) -> None:
        self._cached, self._direct = cached, direct
        self._is_direct = bypass_page_cache(direct, True)
        os.posix_fadvise(cached, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def close(self) -> None:
        os.close(self._cached)
        os.close(self._direct)

    def read(self, start: int, memory: memoryview) -> int:
        """Read some bytes into *memory*. Returns their number: 0 only at the end of the file."""
        if self._is_direct and len(memory) >= _ASK_FROM_BYTES:
            try:
                if count := self._read_directly(start, memory):
                    return count
            except OSError as error:
                # Some file systems accept the flags and reject the read.
                if error.errno not in _UNSUPPORTED:
                    raise
                self._is_direct = False
        # One large request for the disk, which is then copied in parts.
        os.posix_fadvise(self._cached, start, len(memory), os.POSIX_FADV_WILLNEED)
        return os.preadv(self._cached, [memory[:_CACHEFUL_BYTES]], start)

    def _read_directly(self, start: int, memory: memoryview) -> int:
        """Read what is in the page cache, or if nothing is, whole sectors past it. Returns 0 where neither works."""
        with contextlib.suppress(BlockingIOError):
            # Linux 5.9 and 5.10 can return 0 for bytes that are not in the page cache.
            part = [memory[:_CACHEFUL_BYTES]]
            if count := os.preadv(self._cached, part, start, os.RWF_NOWAIT):
                return count
        if start % SECTOR_BYTES or not begins_at_a_sector(memory):
            return 0
        whole = len(memory) // SECTOR_BYTES * SECTOR_BYTES
        return os.preadv(self._direct, [memory[:whole]], start)


def _unreadable(path: Path, start: int, why: str) -> CheckpointUnusable:
    return CheckpointUnusable(
        "a slice cannot be read",
        where=str(path),
        value=f"at byte {start}: {why}",
        hint="restore the file from another copy, or use another checkpoint",
    )
