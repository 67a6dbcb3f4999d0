"""Which source bytes fill which byte range of an output file: pure, no file is touched.

An output file is filled in blocks of fixed size, from front to back. A tensor's elements come in row-major order, and
every slice of it holds its elements in that order too: hence the elements of a slice that fall into a block stand in
one piece in the slice, and block after block each slice is read once, front to back, however it was cut. This is what
lets one pass copy, put together, cast and digest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from automodel_ckpt.checkpoint.export.plan import ExportTensor, OutputFile
from automodel_ckpt.checkpoint.slices import Box, Slice, flat_index, in_one_piece, nbytes_of

BLOCK_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes ``at .. at + nbytes`` of a stored slice, counted from its beginning."""

    piece: Slice
    at: int
    nbytes: int

    @property
    def is_last(self) -> bool:
        return self.at + self.nbytes == self.piece.nbytes


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``first .. last`` of a tensor, which fill bytes ``start .. stop`` of the output file.

    *as_is*: the reads, one after the other, are those bytes. Otherwise the elements have to be put in their places, or
    cast.
    """

    tensor: ExportTensor
    start: int
    stop: int
    first: int
    last: int
    reads: tuple[Read, ...]
    as_is: bool


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes ``start .. stop`` of the output file *file*; *number* counts the blocks of one process."""

    number: int
    file: str
    start: int
    stop: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Consecutive tensors of an output file, each with the byte where it begins."""

    file: str
    tensors: tuple[tuple[ExportTensor, int], ...]

    @property
    def start(self) -> int:
        return self.tensors[0][1]

    @property
    def stop(self) -> int:
        tensor, start = self.tensors[-1]
        return start + tensor.nbytes


def shares(files: Sequence[OutputFile], count: int) -> list[list[ByteRange]]:
    """All tensors in at most *count* consecutive shares of about equal bytes; no tensor is divided."""
    total = sum(tensor.nbytes for file in files for tensor in file.tensors) or 1
    found: list[dict[str, list[tuple[ExportTensor, int]]]] = [{} for _ in range(count)]
    done = 0
    for file in files:
        for tensor, start in file.placed():
            share = found[min(count - 1, (done + tensor.nbytes // 2) * count // total)]
            share.setdefault(file.name, []).append((tensor, start))
            done += tensor.nbytes
    return [
        [ByteRange(name, tuple(placed)) for name, placed in share.items()]
        for share in found
        if share
    ]


def blocks(byte_ranges: Iterable[ByteRange]) -> Iterator[Block]:
    """The blocks of a process in the order of their bytes, each with what it is read from."""
    number = 0
    for byte_range in byte_ranges:
        tensors = iter(
            [_Elements(tensor, start) for tensor, start in byte_range.tensors if tensor.nbytes]
        )
        current = next(tensors, None)
        start = byte_range.start
        while start < byte_range.stop:
            stop = min((start // BLOCK_BYTES + 1) * BLOCK_BYTES, byte_range.stop)
            segments = []
            while current is not None and current.start < stop:
                segments.append(current.segment(max(start, current.start), min(stop, current.stop)))
                if current.stop > stop:
                    break
                current = next(tensors, None)
            yield Block(number, byte_range.file, start, stop, tuple(segments))
            number, start = number + 1, stop


class _Elements:
    """A tensor that begins at byte *start* of an output file, ready to be asked for any part."""

    def __init__(self, tensor: ExportTensor, start: int) -> None:
        self.tensor, self.start, self.stop = tensor, start, start + tensor.nbytes
        shape = tensor.stored.shape
        filled = [piece for piece in in_one_piece(tensor.stored) if piece.nbytes]
        found = ((flat_index(p.offsets, shape), _last(p.box, shape), p, p.box) for p in filled)
        self._pieces = sorted(found, key=_first_of)
        self._firsts = [first for first, *_ in self._pieces]
        self.as_is = tensor.dtype == tensor.stored.dtype and all(
            last - first + 1 == box.numel for first, last, _, box in self._pieces
        )

    def segment(self, start: int, stop: int) -> Segment:
        itemsize = nbytes_of(self.tensor.dtype, ())
        first, last = (start - self.start) // itemsize, (stop - self.start) // itemsize
        return Segment(
            self.tensor, start, stop, first, last, tuple(self._reads(first, last)), self.as_is
        )

    def _reads(self, first: int, last: int) -> Iterator[Read]:
        itemsize, shape = nbytes_of(self.tensor.stored.dtype, ()), self.tensor.stored.shape
        # Slices in one piece do not overlap, so that only the one before can reach into the range.
        begin = max(0, bisect_left(self._firsts, first) - 1) if self.as_is else 0
        for _, piece_last, piece, box in self._pieces[begin : bisect_left(self._firsts, last)]:
            if piece_last >= first:
                at, stop = elements_before(box, shape, first), elements_before(box, shape, last)
                if stop > at:
                    yield Read(piece, at * itemsize, (stop - at) * itemsize)


def _first_of(item: tuple[int, int, Slice, Box]) -> int:
    return item[0]


def _last(box: Box, shape: Sequence[int]) -> int:
    return flat_index(
        [offset + size - 1 for offset, size in zip(box.offsets, box.sizes, strict=True)], shape
    )


def elements_before(box: Box, shape: Sequence[int], flat: int) -> int:
    """How many elements of *box* stand before element number *flat* of a row-major tensor of that *shape*."""
    if flat >= math.prod(shape):
        return box.numel
    count, inner, within = 0, math.prod(shape), box.numel
    for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True):
        inner, within = inner // extent, within // size
        index, flat = divmod(flat, inner)
        if index < offset:
            return count
        if index >= offset + size:
            return count + size * within
        count += (index - offset) * within
    return count
