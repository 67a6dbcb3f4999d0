"""Write large files past the page cache (O_DIRECT): aligned memory blocks, and a stream that writes them.

A disk request lists its memory by page, and a few hundred ordinary pages fill a request, so that a large one is split.
Blocks are therefore in huge pages where the system has them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from concurrent.futures import Future
from pathlib import Path

from automodel_ckpt.base.durable_io import write_all
from automodel_ckpt.checkpoint.files.threads import CallingThread, started_pool

BLOCK_BYTES = 4 << 20
SECTOR_BYTES = 4096
# Below this the page cache is as fast, and setting up costs more than it saves.
DIRECT_FROM_BYTES = 8 << 20
_HUGE_PAGE_BYTES = 2 << 20


def block_of(nbytes: int) -> memoryview:
    """Private zeroed memory of *nbytes* bytes, aligned for O_DIRECT; untouched pages use no memory.

    It begins at a page. From 2 MiB on huge pages are requested: since Linux 6.7 a mapping of whole huge pages begins
    at one; older kernels have them in the middle.
    """
    huge = nbytes >= _HUGE_PAGE_BYTES
    size = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES if huge else nbytes
    # MAP_PRIVATE: else it would count as memory that others share.
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)[:nbytes]


def begins_at_a_sector(memory: memoryview) -> bool:
    """Whether *memory* is aligned for O_DIRECT; false for read-only memory, because its address is unknown."""
    if memory.readonly or not memory:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) % SECTOR_BYTES == 0


def bypass_page_cache(descriptor: int, bypass: bool) -> bool:
    """Set or clear O_DIRECT. Returns False if that changes nothing or is not supported."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if bypass else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return wanted != flags


class Meter:
    """Counts the bytes that this process has written to new files, for progress reports."""

    def __init__(self) -> None:
        self.nbytes = 0


METER = Meter()


class DirectStream:
    """Buffers consecutive writes to a file in two blocks: one is written to disk while the other is filled.

    Whole sectors bypass the page cache where the file system supports it. The ends of a byte range
    are written through the cache, because other ranks may share their sectors. The caller fsyncs and closes
    *descriptor*.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        try:
            # A second descriptor: partial sectors go through the page cache, with the first one.
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            self._direct = -1
        self._blocks = [block_of(BLOCK_BYTES) for _ in range(2)]
        self._pending: list[Future[None] | None] = [None, None]
        self._current = 0
        # The current block holds bytes low .. high of the file's BLOCK_BYTES bytes from base.
        self._base = 0
        self._low = 0
        self._high = 0
        self._disk = started_pool(1, "direct-write") or CallingThread()

    @property
    def end(self) -> int:
        """The file offset in bytes where the present byte range ends."""
        return self._base + self._high

    def write(self, data: memoryview, start: int) -> None:
        """Write all of *data* at byte *start*, asynchronously.

        A whole aligned block is written directly from *data*, which must not change before :meth:`close`.
        """
        if start != self.end:
            self._submit(self._blocks[self._current])
            # O_DIRECT needs an aligned offset. Bytes before *low* may belong to another rank.
            self._base = start // SECTOR_BYTES * SECTOR_BYTES
            self._low = self._high = start - self._base
        if not self._high and len(data) == BLOCK_BYTES and begins_at_a_sector(data):
            self._high = len(data)
            self._submit(data)
            return
        while data:
            taken = min(len(data), BLOCK_BYTES - self._high)
            self._blocks[self._current][self._high : self._high + taken] = data[:taken]
            self._high += taken
            data = data[taken:]
            if self._high == BLOCK_BYTES:
                self._submit(self._blocks[self._current])

    def close(self, *, finish: bool) -> None:
        """Write the rest if *finish*, and wait for writes in progress. Durable only after an fsync."""
        try:
            if finish:
                self._submit(self._blocks[self._current])
                # Errors of the last two writes are raised here; otherwise they would be lost.
                self._wait(0)
                self._wait(1)
        finally:
            try:
                # Before the close: a write in progress would go to another file that gets this
                # descriptor.
                self._disk.end()
            finally:
                if self._direct >= 0:
                    os.close(self._direct)

    def _submit(self, block: memoryview) -> None:
        if self._high > self._low:
            pending = self._disk.submit(self._to_disk, block, self._base, self._low, self._high)
            self._pending[self._current] = pending
            self._current = 1 - self._current
            # The other block must be on disk before it is filled again.
            self._wait(self._current)
        self._base += self._high
        self._low = 0
        self._high = 0

    def _wait(self, index: int) -> None:
        pending = self._pending[index]
        self._pending[index] = None
        if pending is not None:
            pending.result()

    def _to_disk(self, block: memoryview, base: int, low: int, high: int) -> None:
        inner = min(high, -(-low // SECTOR_BYTES) * SECTOR_BYTES)
        last = high // SECTOR_BYTES * SECTOR_BYTES
        reached = self._past_cache(block, base, inner, last)
        # The rest is written through the page cache: its sectors can contain other data.
        write_all(self._descriptor, block[low:inner], base + low)
        write_all(self._descriptor, block[reached:high], base + reached)

    def _past_cache(self, block: memoryview, base: int, first: int, last: int) -> int:
        """Write whole sectors ``first .. last`` directly; return the offset from which the page cache must be used."""
        # A short write may end within a sector, where O_DIRECT cannot continue.
        while first < last and self._direct >= 0 and first % SECTOR_BYTES == 0:
            try:
                first += os.pwrite(self._direct, block[first:last], base + first)
            except OSError as error:
                # Some file systems accept the flag and reject the write.
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)
                self._direct = -1
        return first
