"""Fills the files of a plan: every source byte is read once, checked, put in its place, cast, digested and written.

Threads take the blocks of all files in order. Reading, casting and writing go on side by side; digesting is done in
turn, block after block, because a digest takes its bytes in order (it is ten times as fast as the rest). Processes
share the tensors by their bytes, each with threads of its own. Buffers are all that is held: some megabytes a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from automodel_ckpt.checkpoint.digests import digest_from
from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
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
from automodel_ckpt.checkpoint.files.direct import SECTOR_BYTES, block_of
from automodel_ckpt.checkpoint.slices import Slice, intersection, row_major_boxes
from automodel_ckpt.errors import SaveFailed

# A read can be four times what it becomes: F64 to BF16.
_SCRATCH_BYTES = 4 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Workers:
    """How many processes work at once, and how many threads each has."""

    num_procs: int = 1
    num_threads: int = 5

    def run(
        self,
        function: Callable[[Sequence[ByteRange], int], Written],
        shares: Sequence[Sequence[ByteRange]],
    ) -> list[Written]:
        """Call *function* on every share, each in a process of its own; the first exception is raised.

        With several processes function and shares are pickled, and the calling process is forked: it must not have
        threads of its own.
        """
        if len(shares) <= 1:
            return [function(share, self.num_threads) for share in shares]
        import multiprocessing

        context = multiprocessing.get_context("fork")
        try:
            with ProcessPoolExecutor(len(shares), context, _die_with_parent) as executor:
                return _results(
                    [executor.submit(function, share, self.num_threads) for share in shares]
                )
        except BrokenExecutor as error:
            raise SaveFailed(
                "a worker process was killed",
                where="consolidation",
                value=f"one of {len(shares)}",
                hint="look for a memory limit in the system's log; use fewer processes",
            ) from error


def _results(futures: Sequence[Future[Written]]) -> list[Written]:
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def _die_with_parent() -> None:
    """A worker must not outlive a killed parent: it would wait for work for ever (PR_SET_PDEATHSIG, Linux)."""
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
    """What one process wrote. *damaged* slices are not what was saved; then the output is worth nothing."""

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

    *clones* says of each file whether blocks can be cloned into it. Stops at the first slice whose digest differs.
    Raises OSError naming the file, and :class:`CheckpointUnusable` for a source that is too short.
    """
    with contextlib.ExitStack() as stack:
        outputs = {}
        for byte_range in share:
            outputs[byte_range.file] = output = Output(
                staging / byte_range.file, clones=clones[byte_range.file]
            )
            stack.callback(output.close)
        run = _Run(root, outputs, blocks(share))
        total = sum(byte_range.stop - byte_range.start for byte_range in share)
        run.by_threads(max(1, min(num_threads, total // BLOCK_BYTES)))
    return run.written


class _Stopped(Exception):
    """Another thread failed."""


class _Turns:
    """Lets threads through in the order of their blocks' numbers."""

    def __init__(self) -> None:
        self._next, self._stopped, self._change = 0, False, threading.Condition()

    @contextlib.contextmanager
    def turn(self, number: int) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: self._stopped or self._next == number)
            if self._stopped:
                raise _Stopped
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
        self._root, self._outputs, self._todo = root, outputs, todo
        self._taking = threading.Lock()
        self._checking, self._digesting = _Turns(), _Turns()
        self._digests: dict[tuple[str, int], xxhash.xxh3_128] = {}
        self._failure: BaseException | None = None

    def by_threads(self, count: int) -> None:
        """Returns when all blocks are written. Raises what went wrong first."""
        others = [
            threading.Thread(target=self._work, name=f"consolidate-{n}") for n in range(1, count)
        ]
        for thread in others:
            thread.start()
        self._work()
        for thread in others:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            with _Sources(self._root) as sources:
                while (block := self._take()) is not None:
                    self._fill(block, sources)
        except _Stopped:
            pass
        except BaseException as failure:
            self._failure = self._failure or failure
            self._stop()

    def _take(self) -> Block | None:
        with self._taking:
            return next(self._todo, None)

    def _stop(self) -> None:
        self._checking.stop()
        self._digesting.stop()

    def _fill(self, block: Block, sources: _Sources) -> None:
        data, parts = sources.read(block)
        with self._checking.turn(block.number):
            for segment, pieces in parts:
                self._check(block.file, segment, pieces)
        if not all(segment.as_is for segment in block.segments):
            self._convert(block, data, parts)
        with self._digesting.turn(block.number):
            for segment in block.segments:
                if not segment.as_is:
                    self._digest(block, segment, data)
        self._outputs[block.file].write(data, block.start, sources.clonable(block))

    def _check(
        self, file: str, segment: Segment, pieces: Sequence[tuple[Read, memoryview]]
    ) -> None:
        """Digest what was read; a slice that is complete must be the one that was saved."""
        at = segment.start
        for read, data in pieces:
            key = (f"{file}:{segment.tensor.fqn}:{read.piece.file}", read.piece.start)
            if not read.at:
                self._digests[key] = xxhash.xxh3_128()
            self._digests[key].update(data)
            at += read.nbytes
            if read.is_last:
                found = digest_from(self._digests.pop(key))
                if read.piece.digest not in (None, found):
                    self.written.damaged.append(read.piece)
                    self._stop()
                    raise _Stopped
                if segment.as_is:
                    self.written.parts.append(
                        Digested(file, at - read.piece.nbytes, read.piece.nbytes, found)
                    )

    def _digest(self, block: Block, segment: Segment, data: memoryview) -> None:
        """Digest what a tensor that is not copied as it is became."""
        key = (f"{block.file}:{segment.tensor.fqn}", -1)
        if not segment.first:
            self._digests[key] = xxhash.xxh3_128()
        self._digests[key].update(data[segment.start - block.start : segment.stop - block.start])
        nbytes = segment.tensor.nbytes
        if segment.last * DTYPE_BITS[segment.tensor.dtype] // 8 == nbytes:
            found = digest_from(self._digests.pop(key))
            self.written.parts.append(Digested(block.file, segment.stop - nbytes, nbytes, found))

    @staticmethod
    def _convert(
        block: Block,
        data: memoryview,
        parts: Sequence[tuple[Segment, Sequence[tuple[Read, memoryview]]]],
    ) -> None:
        for segment, pieces in parts:
            if not segment.as_is:
                place(
                    segment, pieces, data[segment.start - block.start : segment.stop - block.start]
                )


class _Sources:
    """A thread's open files and buffers: bytes of slices, laid out as the output has them."""

    def __init__(self, root: Path) -> None:
        self._inputs = Inputs(root)
        self._block, self._scratch = block_of(BLOCK_BYTES + SECTOR_BYTES), block_of(_SCRATCH_BYTES)

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        self._inputs.close()

    def read(
        self, block: Block
    ) -> tuple[memoryview, list[tuple[Segment, list[tuple[Read, memoryview]]]]]:
        """The block's bytes, in memory as in the file (counted in sectors), and of each segment what was read: in its
        place there, or beside it where it has to be put in place or cast."""
        skip = block.start % SECTOR_BYTES
        data = self._block[skip : skip + block.stop - block.start]
        parts, used = [], 0
        for segment in block.segments:
            pieces, at = [], segment.start - block.start
            for read in segment.reads:
                if segment.as_is:
                    target, at = data[at : at + read.nbytes], at + read.nbytes
                else:
                    target, used = self._scratch[used : used + read.nbytes], used + read.nbytes
                self._inputs.read(read.piece.file, read.piece.start + read.at, target)
                pieces.append((read, target))
            parts.append((segment, pieces))
        return data, parts

    def clonable(self, block: Block) -> Iterator[Clonable]:
        """What the block holds of files unchanged."""
        for segment in block.segments:
            at = segment.start
            for read in segment.reads if segment.as_is else ():
                yield Clonable(
                    self._inputs.descriptor(read.piece.file),
                    read.piece.start + read.at,
                    at,
                    read.nbytes,
                )
                at += read.nbytes


def place(segment: Segment, pieces: Sequence[tuple[Read, memoryview]], out: memoryview) -> None:
    """Put the elements that were read of each slice where they belong in *out*, the segment's bytes, and cast them."""
    import numpy as np

    from automodel_ckpt.checkpoint.tensors.float_cast import cast_into, storage_dtype

    tensor = segment.tensor.stored
    source, target = tensor.dtype, segment.tensor.dtype
    held = storage_dtype(source, DTYPE_BITS[source])
    arrays = [(read.piece.box, np.frombuffer(data, held)) for read, data in pieces]
    result = np.frombuffer(out, storage_dtype(target, DTYPE_BITS[target]))
    taken = [0] * len(arrays)
    for box in row_major_boxes(tensor.shape, segment.first, segment.last):
        values, result = result[: box.numel].reshape(box.sizes), result[box.numel :]
        for number, (piece, array) in enumerate(arrays):
            common = intersection(piece, box) if tensor.shape else box
            if common is not None:
                begin, taken[number] = taken[number], taken[number] + common.numel
                part = array[begin : taken[number]].reshape(common.sizes)
                # The ellipsis makes it a view even where there are no dimensions.
                place_in: tuple[Any, ...] = (*common.within(box), ...)
                cast_into(part, source, target, values[place_in])
