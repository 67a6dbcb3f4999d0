"""Writing the files of an export: by cloning blocks, with O_DIRECT, or through the page cache, whichever works."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.base.durable_io import naming, write_all
from automodel_ckpt.checkpoint.files.direct import (
    DIRECT_FROM_BYTES,
    SECTOR_BYTES,
    bypass_page_cache,
)
from automodel_ckpt.checkpoint.files.durable_file import preallocate

# FICLONERANGE of linux/fs.h: descriptor and start of the source, length, start in the target.
_CLONE = 0x4020940D
# These errors mean that these two files cannot share blocks. Any other (EIO, ENOSPC) is a failure.
_CANNOT_CLONE = {
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.EPERM,
    errno.ETXTBSY,
}


@dataclass(frozen=True, slots=True)
class Clonable:
    """*nbytes* bytes at *target* in the output that are equal to those at *start* of the open file *source*."""

    source: int
    start: int
    target: int
    nbytes: int


def create_output(path: Path, header: bytes, nbytes: int, donor: int | None) -> tuple[int, bool]:
    """Create a file of *nbytes* that begins with *header*.

    Returns its descriptor, which the caller fsyncs and closes, and whether blocks of the open file *donor* can be
    cloned into it. If they cannot, the file's space is reserved now, so that a full disk is detected before the copy.
    Raises OSError with the file's name.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with naming(path):
            os.ftruncate(descriptor, nbytes)
            clones = False
            if donor is not None:
                # A trial with the first sector, which the header overwrites.
                clones = _clone(Clonable(donor, 0, 0, SECTOR_BYTES), descriptor)
            if not clones:
                preallocate(descriptor, nbytes)
            write_all(descriptor, memoryview(header), 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, clones


class Output:
    """A file made by :func:`create_output`, open for writing from several threads.

    Data must have the same offset within a sector in memory as in the file, which O_DIRECT requires. Through the page
    cache, one thread writes at a time: more would only wait for the file's lock in the kernel.
    """

    def __init__(self, path: Path, *, clones: bool) -> None:
        self._path = path
        self._clones = clones
        self._one_writer = threading.Lock()
        self._cached = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        if os.fstat(self._cached).st_size >= DIRECT_FROM_BYTES:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            if bypass_page_cache(descriptor, True):
                self._direct = descriptor
            else:
                os.close(descriptor)

    def close(self) -> None:
        """Close the file. The data is durable only after an fsync."""
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    def write(self, data: memoryview, at: int, unchanged: Iterable[Clonable]) -> None:
        """Write all of *data* at byte *at*. Blocks of the *unchanged* bytes are cloned if the file system can.

        Raises OSError with the file's name.
        """
        with naming(self._path):
            done = 0
            # The ranges are in ascending order: the bytes between two of them are written.
            for start, stop in self._cloned_ranges(unchanged):
                self._put(data[done : start - at], at + done)
                done = stop - at
            self._put(data[done:], at + done)

    def _cloned_ranges(self, unchanged: Iterable[Clonable]) -> Iterator[tuple[int, int]]:
        """Clone what can be cloned, and yield ``start, stop`` in the output of each range that was."""
        if not self._clones:
            return
        for clonable in unchanged:
            # Only complete sectors can be shared, at an aligned offset of both files.
            skip = -clonable.target % SECTOR_BYTES
            nbytes = _complete_sectors(clonable.nbytes - skip)
            start = clonable.start + skip
            target = clonable.target + skip
            if nbytes <= 0 or start % SECTOR_BYTES != 0:
                continue
            if _clone(Clonable(clonable.source, start, target, nbytes), self._cached):
                yield target, target + nbytes

    def _put(self, data: memoryview, at: int) -> None:
        """Write complete sectors with O_DIRECT. The ends share a sector with other data and use the page cache."""
        head = min(-at % SECTOR_BYTES, len(data))
        middle = _complete_sectors(len(data) - head)
        if self._direct is None or middle == 0:
            self._put_cached(data, at)
            return
        tail = head + middle
        self._put_cached(data[:head], at)
        self._put_direct(data[head:tail], at + head)
        self._put_cached(data[tail:], at + tail)

    def _put_direct(self, data: memoryview, at: int) -> None:
        # A short write can end within a sector: the rest then goes through the page cache.
        while data and self._direct is not None and at % SECTOR_BYTES == 0:
            try:
                count = os.pwrite(self._direct, data, at)
            except OSError as error:
                # Some file systems accept the flag and reject the write.
                if error.errno != errno.EINVAL:
                    raise
                break
            data = data[count:]
            at += count
        self._put_cached(data, at)

    def _put_cached(self, data: memoryview, at: int) -> None:
        if data:
            with self._one_writer:
                write_all(self._cached, data, at)


def _complete_sectors(nbytes: int) -> int:
    """Round *nbytes* down to a multiple of the sector size."""
    return nbytes // SECTOR_BYTES * SECTOR_BYTES


def _clone(part: Clonable, target: int) -> bool:
    """Share the blocks of *part* with the open file *target*. Returns False if these files cannot share blocks."""
    argument = struct.pack("qQQQ", part.source, part.start, part.nbytes, part.target)
    try:
        fcntl.ioctl(target, _CLONE, argument)
    except OSError as error:
        if error.errno not in _CANNOT_CLONE:
            raise
        return False
    return True
