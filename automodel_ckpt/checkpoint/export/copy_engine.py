"""Fill the output files of an export: read slices, compare them with their digests, assemble, cast, digest and write.

Threads take whole tensors. A tensor is written from front to back, one box after the other. Both a tensor and its
slices store their elements in row-major order, and a box is a contiguous range of the tensor. Therefore the elements of
a slice in a box follow those in the box before, and each slice is read once, from front to back, however the tensor was
sharded. Memory is limited to buffers of some megabytes per thread.
A file is read from the page cache as far as it is there, and the rest with O_DIRECT.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from automodel_ckpt.base.durable_io import naming, write_all
from automodel_ckpt.checkpoint.export.plan import ExportTensor, OutputFile
from automodel_ckpt.checkpoint.files.digests import digest_from
from automodel_ckpt.checkpoint.files.direct import (
    DIRECT_FROM_BYTES,
    SECTOR_BYTES,
    begins_at_a_sector,
    block_of,
    bypass_page_cache,
)
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.durable_file import reserve_range
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.checkpoint.files.threads import CallingThread, started_pool
from automodel_ckpt.checkpoint.parts.slices import (
    Box,
    Slice,
    contiguous_slices,
    flat_index,
    intersection,
    is_one_run,
)
from automodel_ckpt.checkpoint.tensors.box_reader import boxes
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


BLOCK_BYTES = 2 << 20
# A block can be read from up to four times its bytes: F64 cast to BF16.
_SCRATCH_BYTES = 4 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Digested:
    """Bytes ``start .. start + nbytes`` of an output file, and their digest."""

    file: str
    start: int
    nbytes: int
    digest: str


class DamagedSlice(Exception):
    """The bytes of the slice *stored* do not have its digest: the output must not be used."""

    def __init__(self, stored: Slice) -> None:
        super().__init__(stored.fqn)
        self.stored = stored


@dataclass(frozen=True, slots=True)
class _Task:
    """A tensor to write from byte *start* of an output file on."""

    file: str
    tensor: ExportTensor
    start: int


def copy(
    root: Path,
    staging: Path,
    files: Iterable[OutputFile],
    num_threads: int,
) -> list[Digested]:
    """Fill *files* under *staging* from the slices under *root*. Returns the digests of the byte ranges of all tensors.

    Raises :class:`DamagedSlice` for the first slice with another digest, OSError with the file's name, and
    :class:`CheckpointUnusable` for a source that is too short.
    """
    tasks: list[_Task] = []
    outputs: dict[str, Output] = {}
    stopped = threading.Event()
    failures: list[BaseException] = []

    def work(task: _Task) -> list[Digested]:
        copier = copiers.pop()
        try:
            return copier.copy(task, outputs[task.file])
        except _Stopped:
            raise
        except BaseException as failure:
            failures.append(failure)
            stopped.set()
            raise
        finally:
            copiers.append(copier)

    with contextlib.ExitStack() as stack:
        for file in files:
            outputs[file.name] = Output(staging / file.name)
            stack.callback(outputs[file.name].close)
            for tensor, start in file.placed():
                if tensor.nbytes:
                    tasks.append(_Task(file.name, tensor, start))
        # The largest first, so that all threads end at about the same time.
        tasks.sort(key=lambda task: -task.tensor.nbytes)
        total = sum(task.tensor.nbytes for task in tasks)
        count = max(1, min(num_threads, total // BLOCK_BYTES))
        copiers = [
            _Copier(root, stack.enter_context(contextlib.closing(Inputs(root))), stopped)
            for _ in range(count)
        ]
        pool = (started_pool(count, "consolidate") if count > 1 else None) or CallingThread()
        # Before the files are closed.
        stack.callback(pool.end, stopped.set)
        try:
            results = [pool.submit(work, task) for task in tasks]
            return [each for result in results for each in result.result()]
        except _Stopped:
            raise failures[0] from None
        except BaseException:
            # Also an interruption: the threads must end before it is raised.
            stopped.set()
            raise


class _Stopped(Exception):
    """Another thread failed."""


@dataclass(slots=True)
class _Part:
    """A slice of a tensor, which begins at element number *first* of it, and what was read of it so far."""

    stored: Slice
    first: int
    hashed: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    num_read: int = 0

    @property
    def is_complete(self) -> bool:
        return self.num_read == self.stored.nbytes


class _Copier:
    """The buffers of a thread, with which it copies one tensor after another."""

    def __init__(self, root: Path, inputs: Inputs, stopped: threading.Event) -> None:
        self._root, self._inputs, self._stopped = root, inputs, stopped
        self._block = block_of(BLOCK_BYTES + SECTOR_BYTES)
        self._scratch = block_of(_SCRATCH_BYTES)

    def copy(self, task: _Task, output: Output) -> list[Digested]:
        """Write the tensor of *task*; return the digests of its byte ranges."""
        tensor = task.tensor
        shape = tensor.stored.shape
        itemsize = DTYPE_BITS[tensor.dtype] // 8
        parts = _parts_of(tensor)
        # Then the output consists of the bytes of the slices, which need no second digest.
        as_is = tensor.dtype == tensor.stored.dtype and all(
            is_one_run(part.stored.box, shape) for part in parts
        )
        digests: list[Digested] = []
        hashed = xxhash.xxh3_128()
        at = task.start
        for box in boxes(shape, BLOCK_BYTES // itemsize):
            if self._stopped.is_set():
                raise _Stopped
            # O_DIRECT: the bytes have the same offset within a sector in memory as in the file.
            skip = at % SECTOR_BYTES
            out = self._block[skip : skip + box.numel * itemsize]
            first = (at - task.start) // itemsize
            for part in list(parts):
                if part.first >= first + box.numel:
                    break
                common = intersection(part.stored.box, box)
                if common is None:
                    continue
                if as_is:
                    begin = (flat_index(common.offsets, shape) - first) * itemsize
                    self._read(part, out[begin : begin + common.numel * itemsize])
                else:
                    self._place(part, common, box, tensor, out)
                if part.is_complete:
                    parts.remove(part)
                    digest = _checked_digest(part)
                    start = task.start + part.first * itemsize
                    digests.append(Digested(task.file, start, part.stored.nbytes, digest))
            if not as_is:
                hashed.update(out)
            output.write(out, at)
            at += len(out)
        if as_is:
            return digests
        return [Digested(task.file, task.start, tensor.nbytes, digest_from(hashed))]

    def _read(self, part: _Part, memory: memoryview) -> None:
        """Fill *memory* with the next bytes of a slice."""
        stored = part.stored
        if stored.strides is None:
            self._inputs.read(stored.file, stored.start + part.num_read, memory)
        else:
            from automodel_ckpt.checkpoint.tensors.stored import read_row_major

            first = part.num_read * 8 // DTYPE_BITS[stored.dtype]
            read_row_major(self._root, stored, first, memory)
        part.hashed.update(memory)
        part.num_read += len(memory)

    def _place(
        self, part: _Part, common: Box, box: Box, tensor: ExportTensor, out: memoryview
    ) -> None:
        """Read the elements *common* of a slice, and put them, cast, into *out*, the elements of *box*."""
        import numpy as np

        from automodel_ckpt.checkpoint.tensors.float_cast import cast_into, storage_dtype

        source, target = tensor.stored.dtype, tensor.dtype
        data = self._scratch[: common.numel * DTYPE_BITS[source] // 8]
        self._read(part, data)
        values = np.frombuffer(data, storage_dtype(source, DTYPE_BITS[source]))
        result = np.frombuffer(out, storage_dtype(target, DTYPE_BITS[target])).reshape(box.sizes)
        # The ellipsis makes the result a view even without dimensions.
        position: tuple[Any, ...] = (*common.within(box), ...)
        cast_into(values.reshape(common.sizes), source, target, result[position])


def _parts_of(tensor: ExportTensor) -> list[_Part]:
    """The slices of a tensor that have bytes, in the order of their first elements."""
    parts = [
        _Part(stored, flat_index(stored.offsets, tensor.stored.shape))
        for stored in contiguous_slices(tensor.stored)
        if stored.nbytes
    ]
    return sorted(parts, key=lambda part: part.first)


def _checked_digest(part: _Part) -> str:
    """The digest of a slice that was read. Raises :class:`DamagedSlice` if it is not the stored one."""
    digest = digest_from(part.hashed)
    if part.stored.digest is not None and part.stored.digest != digest:
        raise DamagedSlice(part.stored)
    return digest
