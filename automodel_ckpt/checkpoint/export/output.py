"""Writing the files of an export: with O_DIRECT, or through the page cache where that does not work."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from automodel_ckpt.base.durable_io import naming, write_all
from automodel_ckpt.checkpoint.files.direct import (
    DIRECT_FROM_BYTES,
    SECTOR_BYTES,
    bypass_page_cache,
)
from automodel_ckpt.checkpoint.files.durable_file import reserve_range


def create_output(path: Path, header: bytes, nbytes: int) -> int:
    """Create a file of *nbytes* that begins with *header*.

    Returns its descriptor, which the caller fsyncs and closes. The file's space is reserved, so that a full disk is
    detected before the copy. Raises OSError with the file's name.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with naming(path):
            os.ftruncate(descriptor, nbytes)
            reserve_range(descriptor, 0, nbytes)
            write_all(descriptor, memoryview(header), 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Output:
    """A file made by :func:`create_output`, open for writing from several threads.

    Data must have the same offset within a sector in memory as in the file, which O_DIRECT requires. Through the page
    cache, one thread writes at a time: more would only wait for the file's lock in the kernel.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
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

    def write(self, data: memoryview, at: int) -> None:
        """Write all of *data* at byte *at*. Raises OSError with the file's name."""
        with naming(self._path):
            # The ends share a sector with other data and use the page cache.
            head = min(-at % SECTOR_BYTES, len(data))
            middle = (len(data) - head) // SECTOR_BYTES * SECTOR_BYTES
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
