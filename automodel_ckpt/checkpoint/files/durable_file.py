"""A new file that is durable when it is closed, with its size and digest."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import xxhash

from automodel_ckpt.base.durable_io import naming, write_all
from automodel_ckpt.checkpoint.files.digests import FileRecord, digest_from
from automodel_ckpt.checkpoint.files.direct import (
    BLOCK_BYTES,
    DIRECT_FROM_BYTES,
    METER,
    DirectStream,
)

_READ_BYTES = 8 << 20
_SMALL_BYTES = 64 << 10
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class DurableFile:
    """A new file: written sequentially, digested while written, flushed and fsynced on close.

    As a context manager it is closed unless an exception passes. *nbytes* (may be approximate) reserves disk space
    first, so that a full disk is found before data is written. A file of 8 MiB or more bypasses the page cache where
    the file system supports it, which leaves host memory to others. A failed write or fsync is never retried. Raises
    :class:`OSError` naming the file.
    """

    def __init__(self, path: Path, *, nbytes: int = 0) -> None:
        self.path = path
        self.record: FileRecord | None = None
        self._hash = xxhash.xxh3_128()
        self._small = bytearray()
        self._written = 0
        self._position = 0
        self._stream: DirectStream | None = None
        # O_EXCL: a leftover or a second writer is an error, and their bytes are never mixed.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_EXCL
        self._descriptor = os.open(path, flags, 0o666)
        try:
            with naming(self.path):
                reserve_range(self._descriptor, 0, nbytes)
                if nbytes >= DIRECT_FROM_BYTES:
                    self._stream = DirectStream(self._descriptor, path)
        except OSError:
            os.close(self._descriptor)
            raise

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write and digest all of *data*; returns its length in bytes."""
        view = memoryview(data).cast("B")
        self._written += len(view)
        if len(view) < _SMALL_BYTES:
            # Many writes of a few bytes are combined into one system call.
            self._small += view
            if len(self._small) >= _SMALL_BYTES:
                self._put_small()
        else:
            self._put_small()
            self._put(view)
        return len(view)

    def _put_small(self) -> None:
        data = self._small
        self._small = bytearray()
        self._put(memoryview(data))

    def _put(self, view: memoryview) -> None:
        with naming(self.path):
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                self._hash.update(block)
                if self._stream is not None:
                    self._stream.write(block, self._position)
                else:
                    write_all(self._descriptor, block, self._position)
                self._position += len(block)
                METER.nbytes += len(block)

    def close(self) -> FileRecord:
        """Flush, fsync and close. Returns the file's size and digest."""
        if self.record is None:
            self._put_small()
            # First, so that _abandon() does not close the number again when another file has it.
            descriptor, self._descriptor = self._descriptor, -1
            with naming(self.path):
                try:
                    if self._stream is not None:
                        self._stream.close(finish=True)
                    # The reserved size can be larger than what was written.
                    os.ftruncate(descriptor, self._written)
                    # A failed fsync is not repeated: the kernel may have dropped the data, and a
                    # second call can succeed without it.
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            self.record = FileRecord(self._written, digest_from(self._hash))
        return self.record

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Close the descriptor without an fsync, unless :meth:`close` has closed it."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                if self._stream is not None:
                    self._stream.close(finish=False)
            finally:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def file_record(path: Path) -> FileRecord:
    """Return the size and digest of a regular file, read through a small buffer, which is faster than mapping it."""
    with _opened(path) as descriptor:
        return FileRecord(*digest_range(descriptor, 0, None))


def part_digests(path: Path, sizes: Sequence[int], *, start: int = 0) -> list[str]:
    """Return the digests of consecutive byte ranges of a regular file: *sizes* in bytes, the first from byte *start*.

    A file that is too short has fewer digests than ranges.
    """
    digests = []
    at = start
    with _opened(path) as descriptor:
        for size in sizes:
            found, digest = digest_range(descriptor, at, size)
            if found < size:
                break
            digests.append(digest)
            at += size
    return digests


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    # A link or a pipe in place of the file must be neither followed nor waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield descriptor
    finally:
        os.close(descriptor)


def digest_range(descriptor: int, start: int, nbytes: int | None) -> tuple[int, str]:
    """Digest at most *nbytes* bytes from byte *start* (None: up to the end). Returns (number of bytes, digest)."""
    if nbytes is None:
        nbytes = os.fstat(descriptor).st_size - start
    buffer = memoryview(bytearray(max(0, min(_READ_BYTES, nbytes))))
    hashed = xxhash.xxh3_128()
    done = 0
    while done < nbytes:
        count = os.preadv(descriptor, [buffer[: nbytes - done]], start + done)
        if count == 0:
            break
        hashed.update(buffer[:count])
        done += count
    return done, digest_from(hashed)


def reserve_range(descriptor: int, start: int, nbytes: int) -> bool:
    """Allocate disk space for bytes from *start* on without changing bytes that other processes may have written.

    Returns False where the file system does not support that. Raises OSError if the disk is full.
    """
    if nbytes <= 0:
        return True
    # The system call: where a file system lacks it, the C library's posix_fallocate writes zeros into blocks that it
    # finds empty, which another process may be writing.
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return False
    if fallocate(descriptor, 0, ctypes.c_int64(start), ctypes.c_int64(nbytes)) == 0:
        return True
    code = ctypes.get_errno()
    if code not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code))
    return False
