"""Read the files of a checkpoint for an export: through the page cache what it contains, with O_DIRECT the rest.

Bytes that are not in the page cache are read faster into preallocated, aligned blocks (``files/direct.py``). Bytes that
are in it are only copied in memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import OrderedDict
from pathlib import Path

from automodel_ckpt.checkpoint.files.direct import (
    SECTOR_BYTES,
    begins_at_a_sector,
    block_of,
    bypass_page_cache,
)
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.errors import CheckpointUnusable

# For fewer bytes, the question whether they are cached costs more than the answer saves.
_ASK_FROM_BYTES = 64 << 10
_CACHEFUL_BYTES = 256 << 10
_BOUNCE_BYTES = 2 << 20
_MAX_OPEN = 64
# One page in this many bytes is checked: the kernel reads ahead, and evicts, in units of about this size.
_SAMPLED_BYTES = 512 << 10
_MAP_FAILED = ctypes.c_void_p(-1).value


class Inputs:
    """The files below *root* that one thread reads, opened when they are needed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: OrderedDict[str, _Input] = OrderedDict()
        self._bounce = block_of(_BOUNCE_BYTES)

    def close(self) -> None:
        for file in self._open.values():
            file.close()

    def descriptor(self, file: str) -> int:
        """Return a descriptor for reading. It is closed when many other files have been opened."""
        return self._input(file).cached

    def read(self, file: str, start: int, memory: memoryview) -> None:
        """Fill *memory* with the bytes from *start*. Raises :class:`CheckpointUnusable` if the file ends before."""
        source = self._input(file)
        try:
            count = 0
            if len(memory) >= _ASK_FROM_BYTES and not source.is_cached(start, len(memory)):
                count = source.read_past_cache(start, memory, self._bounce)
            count += source.read_cached(start + count, memory[count:])
        except OSError as error:
            raise _unreadable(self._root / file, start, str(error.strerror)) from error
        if count < len(memory):
            raise _unreadable(self._root / file, start + count, "the file ends here")

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
        self.cached = cached
        self._direct = direct
        os.posix_fadvise(cached, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._is_direct = bypass_page_cache(direct, True)
        self._map = _Map(cached)

    def close(self) -> None:
        self._map.close()
        os.close(self.cached)
        os.close(self._direct)

    def is_cached(self, start: int, nbytes: int) -> bool:
        """Whether these bytes seem to be in the page cache, by a sample of their pages. True if that is unknown."""
        if not self._is_direct or start + nbytes > self._map.nbytes:
            return True
        return all(map(self._map.is_in_memory, range(start, start + nbytes, _SAMPLED_BYTES)))

    def read_past_cache(self, start: int, memory: memoryview, bounce: memoryview) -> int:
        """Read with O_DIRECT. Returns the number of bytes read; the rest must be read through the page cache.

        O_DIRECT needs offset, length and memory aligned to sectors. Other reads go through the buffer *bounce*.
        """
        is_aligned = start % SECTOR_BYTES == 0 and len(memory) % SECTOR_BYTES == 0
        if is_aligned and begins_at_a_sector(memory):
            return self._read_direct(start, memory)
        done = 0
        # Direct reads take whole sectors: those of the bytes that are missing, as many as the bounce buffer holds.
        last = -(-(start + len(memory)) // SECTOR_BYTES) * SECTOR_BYTES
        while done < len(memory):
            first = (start + done) // SECTOR_BYTES * SECTOR_BYTES
            skip = start + done - first
            num_read = self._read_direct(first, bounce[: last - first])
            count = min(num_read - skip, len(memory) - done)
            if count <= 0:
                break
            memory[done : done + count] = bounce[skip : skip + count]
            done += count
        return done

    def _read_direct(self, start: int, memory: memoryview) -> int:
        done = 0
        while done < len(memory) and self._is_direct:
            try:
                count = os.preadv(self._direct, [memory[done:]], start + done)
            except OSError as error:
                # Some file systems accept the flag and reject the read.
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False
                break
            done += count
            # The end of the file, or of what can be read at an aligned offset.
            if count == 0 or count % SECTOR_BYTES:
                break
        return done

    def read_cached(self, start: int, memory: memoryview) -> int:
        """Read through the page cache. Returns the number of bytes read: fewer only at the end of the file."""
        if memory:
            # One large request for the disk, which is then copied in parts that fit into the processor's cache.
            os.posix_fadvise(self.cached, start, len(memory), os.POSIX_FADV_WILLNEED)
        done = 0
        while done < len(memory):
            count = os.preadv(self.cached, [memory[done : done + _CACHEFUL_BYTES]], start + done)
            if count == 0:
                break
            done += count
        return done


class _Map:
    """Asks the kernel which pages of a file are in the page cache (mincore(2), Linux).

    The file is mapped for the question and never read through the map: a truncated file would raise SIGBUS.
    """

    def __init__(self, descriptor: int) -> None:
        self.nbytes = os.fstat(descriptor).st_size
        self._library = ctypes.CDLL(None)
        # By default ctypes returns a C int, which truncates the address.
        self._library.mmap.restype = ctypes.c_void_p
        address = self._library.mmap(
            None,
            ctypes.c_size_t(self.nbytes),
            mmap.PROT_READ,
            mmap.MAP_PRIVATE,
            descriptor,
            ctypes.c_int64(0),
        )
        self._address = None if address == _MAP_FAILED else address
        self._mincore = self._library.mincore
        self._mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._state = (ctypes.c_ubyte * 1)()

    def is_in_memory(self, at: int) -> bool:
        """Whether the page with byte *at* is in memory. True if that is unknown."""
        if self._address is None:
            return True
        page = at // mmap.PAGESIZE * mmap.PAGESIZE
        failed = self._mincore(self._address + page, mmap.PAGESIZE, self._state)
        return bool(failed) or bool(self._state[0] & 1)

    def close(self) -> None:
        if self._address is not None:
            self._library.munmap(ctypes.c_void_p(self._address), ctypes.c_size_t(self.nbytes))


def _unreadable(path: Path, start: int, why: str) -> CheckpointUnusable:
    return CheckpointUnusable(
        "a slice cannot be read",
        where=str(path),
        value=f"at byte {start}: {why}",
        hint="restore the file from another copy, or use another checkpoint",
    )
