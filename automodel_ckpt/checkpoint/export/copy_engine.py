"""Fills the files of a plan: every source byte is read once, verified, put in position, cast, digested and written.

Threads take the blocks of all files in order. They read, cast and write in parallel, and digest in order, block after
block, because a digest takes its bytes in order (it is ten times as fast as the rest). Processes divide the tensors by
their bytes, and each has threads. Memory is limited to buffers of some megabytes per thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from automodel_ckpt.base.forks import freeze_in_forked_processes
from automodel_ckpt.checkpoint.export.blocks import (
    BLOCK_BYTES,
    Block,
    ByteRange,
    Read,
    Segment,
    blocks,
)
from automodel_ckpt.checkpoint.export.input import Inputs
from automodel_ckpt.checkpoint.export.output import Clonable, Output
from automodel_ckpt.checkpoint.files.digests import digest_from
from automodel_ckpt.checkpoint.files.direct import SECTOR_BYTES, block_of
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.threads import started_pool
from automodel_ckpt.checkpoint.parts.slices import Slice, intersection, row_major_boxes
from automodel_ckpt.errors import SaveFailed

# A block can be read from up to four times its bytes: F64 cast to BF16.
_SCRATCH_BYTES = 4 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Workers:
    """The number of processes, and of threads in each."""

    num_procs: int = 1
    num_threads: int = 5

    def run(
        self,
        function: Callable[[Sequence[ByteRange], int], Written],
        shares: Sequence[Sequence[ByteRange]],
    ) -> list[Written]:
        """Call *function* on every share, each in a separate process. Raises the first exception.

        With several processes, function and shares are pickled, and the calling process is forked. It must not have
        other threads: a lock that one of them holds would stay locked in the child forever.
        """
        if len(shares) <= 1:
            return [function(share, self.num_threads) for share in shares]
        import multiprocessing

        freeze_in_forked_processes()
        context = multiprocessing.get_context("fork")
        try:
            with ProcessPoolExecutor(len(shares), context, _begin_worker) as executor:
                futures = [executor.submit(function, share, self.num_threads) for share in shares]
                return [future.result() for future in futures]
        except BrokenExecutor as error:
            raise SaveFailed(
                "a worker process was killed",
                where="consolidation",
                value=f"one of {len(shares)}",
                hint="look for a memory limit in the system's log; use fewer processes",
            ) from error


def _begin_worker() -> None:
    """Have the kernel kill this worker when its parent dies: it would wait for work forever (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Digested:
    """Bytes ``start .. start + nbytes`` of an output file, and their digest."""

    file: str
    start: int
    nbytes: int
    digest: str


@dataclass(slots=True)
class Written:
    """The parts of the output that one process wrote. If there are *damaged* slices, the output must not be used."""

    parts: list[Digested] = field(default_factory=list)
    damaged: list[Slice] = field(default_factory=list)


def copy(
    root: Path,
    staging: Path,
    clones: Mapping[str, bool],
    share: Sequence[ByteRange],
    num_threads: int,
) -> Written:
    """Fill a process's share of the output files under *staging* from the slices under *root*.

    *clones* maps each file to whether blocks can be cloned into it. Stops at the first slice whose digest differs.
    Raises OSError with the file's name, and :class:`CheckpointUnusable` for a source that is too short.
    """
    with contextlib.ExitStack() as stack:
        outputs: dict[str, Output] = {}
        for byte_range in share:
            name = byte_range.file
            outputs[name] = Output(staging / name, clones=clones[name])
            stack.callback(outputs[name].close)
        run = _Run(root, outputs, blocks(share))
        total = sum(byte_range.stop - byte_range.start for byte_range in share)
        run.by_threads(max(1, min(num_threads, total // BLOCK_BYTES)))
    return run.written


class _Stopped(Exception):
    """Another thread failed."""


class _Turns:
    """Lets threads enter a section in the order of their blocks' numbers."""

    def __init__(self) -> None:
        self._next = 0
        self._stopped = False
        self._change = threading.Condition()

    @contextlib.contextmanager
    def turn(self, number: int) -> Iterator[None]:
        with self._change:
            # A block that skips its turn would block all later ones.
            self._change.wait_for(lambda: self._stopped or self._next == number)
            if self._stopped:
                raise _Stopped
        # No finally: after an exception no later block may enter. `stop` ends the threads that
        # wait.
        yield
        with self._change:
            self._next += 1
            self._change.notify_all()

    def stop(self) -> None:
        with self._change:
            self._stopped = True
            self._change.notify_all()


class _Run:
    """One process's pass over its blocks."""

    def __init__(self, root: Path, outputs: Mapping[str, Output], todo: Iterator[Block]) -> None:
        self.written = Written()
        self._root = root
        self._outputs = outputs
        self._todo = todo
        self._taking = threading.Lock()
        # Two sections, so that one thread can verify a block while another digests the one before.
        self._checking = _Turns()
        self._digesting = _Turns()
        self._digests: dict[tuple[str, int], xxhash.xxh3_128] = {}
        self._failure: BaseException | None = None

    def by_threads(self, count: int) -> None:
        """Write all blocks with at most *count* threads, this one included. Raises the first failure."""
        others = started_pool(count - 1, "consolidate") if count > 1 else None
        try:
            if others is not None:
                for _ in range(1, count):
                    others.submit(self._work)
            self._work()
        except BaseException:
            self._stop()
            raise
        finally:
            if others is not None:
                # Those that have not begun are not needed: no block is left.
                others.end(self._stop)
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            with _Sources(self._root) as sources:
                while (block := self._take()) is not None:
                    self._fill(block, sources)
        except _Stopped:
            pass
        # Also KeyboardInterrupt: the other threads must end before it is raised.
        except BaseException as failure:
            self._failure = self._failure or failure
            self._stop()

    def _take(self) -> Block | None:
        # Two threads must not advance one generator at the same time: Python raises ValueError.
        with self._taking:
            return next(self._todo, None)

    def _stop(self) -> None:
        self._checking.stop()
        self._digesting.stop()

    def _fill(self, block: Block, sources: _Sources) -> None:
        data, parts = sources.read(block)
        with self._checking.turn(block.number):
            for segment, reads in parts:
                self._check(block.file, segment, reads)
        self._convert(block, data, parts)
        with self._digesting.turn(block.number):
            for segment in block.segments:
                if not segment.as_is:
                    self._digest(block, segment, data)
        self._outputs[block.file].write(data, block.start, sources.clonable(block))

    def _check(self, file: str, segment: Segment, reads: Sequence[tuple[Read, memoryview]]) -> None:
        """Digest the bytes that were read. Stop all threads if a complete slice does not have its digest."""
        at = segment.start
        for read, data in reads:
            stored = read.stored
            # A stored tensor can be exported under several names, so the name is part of the key.
            key = (f"{file}:{segment.tensor.fqn}:{stored.file}", stored.start)
            if read.at == 0:
                self._digests[key] = xxhash.xxh3_128()
            self._digests[key].update(data)
            at += read.nbytes
            if not read.is_last:
                continue
            digest = digest_from(self._digests.pop(key))
            if stored.digest is not None and stored.digest != digest:
                self.written.damaged.append(stored)
                self._stop()
                raise _Stopped
            if segment.as_is:
                # The output has the same bytes: they need no second digest.
                part = Digested(file, at - stored.nbytes, stored.nbytes, digest)
                self.written.parts.append(part)

    def _digest(self, block: Block, segment: Segment, data: memoryview) -> None:
        """Digest the output bytes of a tensor that was reordered or cast."""
        # Another thread uses the dict in the other section at the same time. No slice begins at -1,
        # so that the keys differ.
        key = (f"{block.file}:{segment.tensor.fqn}", -1)
        if segment.first == 0:
            self._digests[key] = xxhash.xxh3_128()
        self._digests[key].update(_bytes_of(segment, block, data))
        nbytes = segment.tensor.nbytes
        bytes_so_far = segment.last * DTYPE_BITS[segment.tensor.dtype] // 8
        if bytes_so_far == nbytes:
            digest = digest_from(self._digests.pop(key))
            self.written.parts.append(Digested(block.file, segment.stop - nbytes, nbytes, digest))

    @staticmethod
    def _convert(
        block: Block,
        data: memoryview,
        parts: Sequence[tuple[Segment, Sequence[tuple[Read, memoryview]]]],
    ) -> None:
        for segment, reads in parts:
            if not segment.as_is:
                place(segment, reads, _bytes_of(segment, block, data))


def _bytes_of(segment: Segment, block: Block, data: memoryview) -> memoryview:
    """Return the bytes of a segment in the *data* of its block."""
    return data[segment.start - block.start : segment.stop - block.start]


class _Sources:
    """A thread's open source files and its buffers."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._inputs = Inputs(root)
        self._block = block_of(BLOCK_BYTES + SECTOR_BYTES)
        self._scratch = block_of(_SCRATCH_BYTES)

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        self._inputs.close()

    def read(
        self, block: Block
    ) -> tuple[memoryview, list[tuple[Segment, list[tuple[Read, memoryview]]]]]:
        """Read the sources of a block.

        Returns the block's buffer, and for each segment its reads with their bytes: in the buffer if they are copied as
        they are, otherwise in a second buffer, from which :func:`place` fills the first.
        """
        # O_DIRECT: the bytes have the same offset within a sector in memory as in the file.
        skip = block.start % SECTOR_BYTES
        data = self._block[skip : skip + block.stop - block.start]
        parts = []
        used = 0
        for segment in block.segments:
            at = segment.start - block.start
            reads = []
            for read in segment.reads:
                if segment.as_is:
                    target = data[at : at + read.nbytes]
                    at += read.nbytes
                else:
                    target = self._scratch[used : used + read.nbytes]
                    used += read.nbytes
                self._read(read, target)
                reads.append((read, target))
            parts.append((segment, reads))
        return data, parts

    def _read(self, read: Read, target: memoryview) -> None:
        stored = read.stored
        if stored.strides is None:
            self._inputs.read(stored.file, stored.start + read.at, target)
            return
        from automodel_ckpt.checkpoint.tensors.strided import read_row_major

        itemsize = DTYPE_BITS[stored.dtype] // 8
        read_row_major(self._root, stored, read.at // itemsize, target)

    def clonable(self, block: Block) -> Iterator[Clonable]:
        """Yield the bytes of the block that are copied unchanged from a file."""
        for segment in block.segments:
            if not segment.as_is:
                continue
            at = segment.start
            for read in segment.reads:
                if read.stored.strides is not None:
                    at += read.nbytes
                    continue
                descriptor = self._inputs.descriptor(read.stored.file)
                yield Clonable(descriptor, read.stored.start + read.at, at, read.nbytes)
                at += read.nbytes


def place(segment: Segment, reads: Sequence[tuple[Read, memoryview]], out: memoryview) -> None:
    """Copy the elements that were read of each slice to their positions in *out*, and cast them.

    *out* is the segment's part of the output.
    """
    import numpy as np

    from automodel_ckpt.checkpoint.tensors.float_cast import cast_into, storage_dtype

    tensor = segment.tensor.stored
    source = tensor.dtype
    target = segment.tensor.dtype
    source_dtype = storage_dtype(source, DTYPE_BITS[source])
    arrays = [np.frombuffer(data, source_dtype) for _, data in reads]
    read_boxes = [read.stored.box for read, _ in reads]
    result = np.frombuffer(out, storage_dtype(target, DTYPE_BITS[target]))
    # The elements of each array that were copied so far: boxes follow in row-major order, as the arrays' elements do.
    taken = [0] * len(arrays)
    for box in row_major_boxes(tensor.shape, segment.first, segment.last):
        values = result[: box.numel].reshape(box.sizes)
        result = result[box.numel :]
        for number, read_box in enumerate(read_boxes):
            # A tensor without dimensions has one element and no box to intersect.
            common = intersection(read_box, box) if tensor.shape else box
            if common is None:
                continue
            begin = taken[number]
            taken[number] += common.numel
            part = arrays[number][begin : taken[number]].reshape(common.sizes)
            # The ellipsis makes the result a view even without dimensions.
            position: tuple[Any, ...] = (*common.within(box), ...)
            cast_into(part, source, target, values[position])
