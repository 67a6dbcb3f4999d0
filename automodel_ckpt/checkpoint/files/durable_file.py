"""Files with size and digest that are durable when they are closed; large ones bypass the page cache (O_DIRECT).

Digests have a stored format: the name of the algorithm, and 32 hexadecimal digits. A disk request lists its memory by
page, and a few hundred ordinary pages fill a request, so that a large one is split. The blocks of a stream are
therefore in huge pages where the system has them. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import xxhash

from automodel_ckpt.base.durable_io import naming, write_all
from automodel_ckpt.checkpoint.files.threads import CallingThread, started_pool

_ALGORITHM = "xxh3_128:"
# Prefix of the Merkle digest of a file that several ranks wrote (parts/verify.py).
OF_SLICES = "xxh3_128_parts:"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size in bytes and the digest of its content."""

    size: int
    digest: str


def digest_of(data: bytes | memoryview) -> str:
    """The XXH3-128 digest of bytes in memory, in the stored format."""
    return _ALGORITHM + xxhash.xxh3_128_hexdigest(data)


def digest_from(hashed: xxhash.xxh3_128) -> str:
    """The digest of all bytes that *hashed* has processed, in the stored format."""
    return _ALGORITHM + hashed.hexdigest()


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
