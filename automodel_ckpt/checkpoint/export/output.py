"""The files of an export while they are written: cloned, past the page cache, or through it, whichever goes."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.checkpoint.files.direct import (
    DIRECT_FROM_BYTES,
    SECTOR_BYTES,
    bypass_page_cache,
)
from automodel_ckpt.checkpoint.files.durable_file import preallocate
from automodel_ckpt.durable_io import naming, write_all

# FICLONERANGE of linux/fs.h: descriptor and start of the source, length, start in the target.
_CLONE = 0x4020940D
# What says "not this way, for these two files"; anything else (EIO, ENOSPC) is a failure.
_NOT_THIS_WAY = {
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
    """Bytes of the output, at *target* and as many as *nbytes*, that stand unchanged at *start* of an open file."""

    source: int
    start: int
    target: int
    nbytes: int


def create_output(path: Path, header: bytes, nbytes: int, donor: int | None) -> tuple[int, bool]:
    """A new file of *nbytes* that begins with *header*: a descriptor, to be fsynced and closed, and whether it can take
    over blocks of the open file *donor*.

    Where it cannot, its space is reserved now, so that a full disk shows before anything is moved. Raises OSError
    naming the file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with naming(path):
            os.ftruncate(descriptor, nbytes)
            clones = donor is not None and _clone(Clonable(donor, 0, 0, SECTOR_BYTES), descriptor)
            if not clones:
                preallocate(descriptor, nbytes)
            write_all(descriptor, memoryview(header), 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, clones


class Output:
    """A file made by :func:`create_output`, open for writing from several threads.

    What is written must lie in memory as it does in the file, counted in sectors: O_DIRECT asks for that. A file system
    that does not take O_DIRECT gets one write at a time: more only wait for each other inside the kernel.
    """

    def __init__(self, path: Path, *, clones: bool) -> None:
        self._path, self._clones = path, clones
        self._one_writer = threading.Lock()
        self._plain = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        if os.fstat(self._plain).st_size >= DIRECT_FROM_BYTES:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            self._direct = descriptor if bypass_page_cache(descriptor, True) else None
            if self._direct is None:
                os.close(descriptor)

    def close(self) -> None:
        """Close it; what was written is durable only after an fsync."""
        os.close(self._plain)
        if self._direct is not None:
            os.close(self._direct)

    def write(self, data: memoryview, at: int, unchanged: Iterable[Clonable]) -> None:
        """Write all of *data* at byte *at*; of the *unchanged* bytes whole blocks are cloned, where that goes.

        Raises OSError naming the file.
        """
        with naming(self._path):
            done = 0
            for start, stop in self._cloned(unchanged):
                self._put(data[done : start - at], at + done)
                done = stop - at
            self._put(data[done:], at + done)

    def _cloned(self, unchanged: Iterable[Clonable]) -> Iterable[tuple[int, int]]:
        for whole in unchanged if self._clones else ():
            skip = -whole.target % SECTOR_BYTES
            nbytes = (whole.nbytes - skip) // SECTOR_BYTES * SECTOR_BYTES
            part = Clonable(whole.source, whole.start + skip, whole.target + skip, nbytes)
            if nbytes > 0 and part.start % SECTOR_BYTES == 0 and _clone(part, self._plain):
                yield part.target, part.target + nbytes

    def _put(self, data: memoryview, at: int) -> None:
        """Whole sectors past the page cache; the others are shared with a neighbour and go through it."""
        head = min(-at % SECTOR_BYTES, len(data))
        middle = (len(data) - head) // SECTOR_BYTES * SECTOR_BYTES
        if self._direct is None or not middle:
            self._put_plain(data, at)
            return
        self._put_plain(data[:head], at)
        self._put_direct(data[head : head + middle], at + head)
        self._put_plain(data[head + middle :], at + head + middle)

    def _put_direct(self, data: memoryview, at: int) -> None:
        while data and self._direct is not None and at % SECTOR_BYTES == 0:
            try:
                count = os.pwrite(self._direct, data, at)
            except OSError as error:
                # Some file systems take the flag and refuse the write.
                if error.errno != errno.EINVAL:
                    raise
                break
            data, at = data[count:], at + count
        self._put_plain(data, at)

    def _put_plain(self, data: memoryview, at: int) -> None:
        if data:
            with self._one_writer:
                write_all(self._plain, data, at)


def _clone(part: Clonable, target: int) -> bool:
    try:
        fcntl.ioctl(
            target, _CLONE, struct.pack("qQQQ", part.source, part.start, part.nbytes, part.target)
        )
    except OSError as error:
        if error.errno not in _NOT_THIS_WAY:
            raise
        return False
    return True
