"""Moving much data past the page cache: blocks of memory as disks like them, and a stream that writes them.

A request to the disk names its memory piece by piece, and a piece is a page: of ordinary pages a few hundred fill a
request, so that a large one is cut up. Blocks therefore stand in huge pages where the system has them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from automodel_ckpt.on_disk import write_all

BLOCK_BYTES = 4 << 20
SECTOR_BYTES = 4096
# Below this the page cache is as fast, and setting up costs more than it saves.
DIRECT_FROM_BYTES = 8 << 20
_HUGE_PAGE_BYTES = 2 << 20


def block_of(nbytes: int) -> memoryview:
    """Private memory of that size, all zero, as O_DIRECT asks of memory; what is never touched takes none.

    It begins at a page. Where *nbytes* fill a huge one the kernel is asked for those: Linux begins a mapping of whole
    huge pages at one since 6.7, an older one has them in the middle.
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
    """Whether O_DIRECT takes this memory; of memory that cannot be written it is not known, which counts as no."""
    if memory.readonly or not memory:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) % SECTOR_BYTES == 0


def bypass_page_cache(descriptor: int, bypass: bool) -> bool:
    """Set or clear O_DIRECT; False where that changes nothing or cannot be."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if bypass else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return wanted != flags


class Meter:
    """Counts the bytes that this process has written to new files, for whoever shows how far a save is."""

    def __init__(self) -> None:
        self.nbytes = 0


METER = Meter()


class DirectStream:
    """Gathers consecutive writes to a file into two blocks; while one goes to disk the other fills.

    Whole sectors go past the page cache, where the file system allows it; the ends of a stretch, whose sectors others
    may share, through it, and through *descriptor*, which stays the caller's to fsync and close.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            self._direct = -1
        self._blocks = [block_of(BLOCK_BYTES) for _ in range(2)]
        self._pending: list[Future[None] | None] = [None, None]
        self._current = 0
        # The current block holds bytes low .. high of the file's BLOCK_BYTES bytes from base.
        self._base, self._low, self._high = 0, 0, 0
        self._disk = ThreadPoolExecutor(1, "direct-write")

    @property
    def end(self) -> int:
        """Where the present stretch ends."""
        return self._base + self._high

    def write(self, data: memoryview, start: int) -> None:
        """Write all of *data* at byte *start*, by and by. A whole block that is aligned already goes to disk from where
        it stands: it may not change before :meth:`close`."""
        if start != self.end:
            self._submit(self._blocks[self._current])
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
        """Write what is left if *finish*, and wait for what is under way. Durable only after an fsync."""
        try:
            if finish:
                self._submit(self._blocks[self._current])
                self._wait(0)
                self._wait(1)
        finally:
            self._disk.shutdown(wait=True, cancel_futures=True)
            if self._direct >= 0:
                os.close(self._direct)

    def _submit(self, block: memoryview) -> None:
        if self._high > self._low:
            self._pending[self._current] = self._disk.submit(self._to_disk, block, self._base, self._low, self._high)
            self._current = 1 - self._current
            self._wait(self._current)
        self._base, self._low, self._high = self._base + self._high, 0, 0

    def _wait(self, index: int) -> None:
        pending, self._pending[index] = self._pending[index], None
        if pending is not None:
            pending.result()

    def _to_disk(self, block: memoryview, base: int, low: int, high: int) -> None:
        inner = min(high, -(-low // SECTOR_BYTES) * SECTOR_BYTES)
        reached = self._past_cache(block, base, inner, high // SECTOR_BYTES * SECTOR_BYTES)
        write_all(self._descriptor, block[low:inner], base + low)
        write_all(self._descriptor, block[reached:high], base + reached)

    def _past_cache(self, block: memoryview, base: int, first: int, last: int) -> int:
        """Write whole sectors ``first .. last`` directly; returns where the page cache has to take over."""
        while first < last and self._direct >= 0 and first % SECTOR_BYTES == 0:
            try:
                first += os.pwrite(self._direct, block[first:last], base + first)
            except OSError as error:
                # Some file systems take the flag and refuse the write.
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)
                self._direct = -1
        return first
