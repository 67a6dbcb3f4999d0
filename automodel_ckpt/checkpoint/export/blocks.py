"""Which source bytes fill which byte range of an output file. Pure functions: no file is opened.

An output file is filled in blocks of fixed size, from front to back. Both a tensor and each of its slices store their
elements in row-major order. Therefore the elements of a slice that belong to one block are contiguous in the slice, and
block after block each slice is read once, from front to back, however the tensor was sharded. So one pass is enough to
copy, assemble, cast and digest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from automodel_ckpt.checkpoint.export.plan import ExportTensor, OutputFile
from automodel_ckpt.checkpoint.parts.slices import (
    Box,
    Slice,
    contiguous_slices,
    flat_index,
    nbytes_of,
)

BLOCK_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes ``at .. at + nbytes`` of the slice *stored*, counted from its beginning."""

    stored: Slice
    at: int
    nbytes: int

    @property
    def is_last(self) -> bool:
        """Whether the read ends where the slice ends."""
        return self.at + self.nbytes == self.stored.nbytes


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``first .. last`` of a tensor, which fill bytes ``start .. stop`` of the output file.

    If *as_is*, the concatenated reads are those bytes. Otherwise elements have to be reordered or cast.
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
    """Divide all tensors into at most *count* consecutive shares of about equal bytes. No tensor is divided."""
    total = 0
    for file in files:
        total += sum(tensor.nbytes for tensor in file.tensors)
    tensors_by_file: list[dict[str, list[tuple[ExportTensor, int]]]] = [{} for _ in range(count)]
    done = 0
    for file in files:
        for tensor, start in file.placed():
            # A tensor belongs to the share in which its middle byte is.
            middle = done + tensor.nbytes // 2
            number = min(count - 1, middle * count // max(total, 1))
            tensors_by_file[number].setdefault(file.name, []).append((tensor, start))
            done += tensor.nbytes
    found: list[list[ByteRange]] = []
    for tensors_of in tensors_by_file:
        share = [ByteRange(name, tuple(tensors)) for name, tensors in tensors_of.items()]
        if share:
            found.append(share)
    return found


def blocks(byte_ranges: Iterable[ByteRange]) -> Iterator[Block]:
    """Yield the blocks of a process in the order of their bytes, each with the reads that fill it."""
    number = 0
    for byte_range in byte_ranges:
        tensors = _elements_of(byte_range)
        current = next(tensors, None)
        start = byte_range.start
        while start < byte_range.stop:
            # Blocks end at multiples of BLOCK_BYTES of the file, so that only the first one can be unaligned.
            stop = min((start // BLOCK_BYTES + 1) * BLOCK_BYTES, byte_range.stop)
            segments = []
            while current is not None and current.start < stop:
                begin = max(start, current.start)
                end = min(stop, current.stop)
                segments.append(current.segment(begin, end))
                if current.stop > stop:
                    break
                current = next(tensors, None)
            yield Block(number, byte_range.file, start, stop, tuple(segments))
            number += 1
            start = stop


def _elements_of(byte_range: ByteRange) -> Iterator[_Elements]:
    for tensor, start in byte_range.tensors:
        if tensor.nbytes:
            yield _Elements(tensor, start)


@dataclass(frozen=True, slots=True)
class _StoredSlice:
    """A slice, and the numbers of its first and last element in the row-major tensor."""

    first: int
    last: int
    stored: Slice
    box: Box


class _Elements:
    """A tensor that begins at byte *start* of an output file, and the reads of any range of its elements."""

    def __init__(self, tensor: ExportTensor, start: int) -> None:
        self.tensor = tensor
        self.start = start
        self.stop = start + tensor.nbytes
        shape = tensor.stored.shape
        self._slices: list[_StoredSlice] = []
        for stored in contiguous_slices(tensor.stored):
            if stored.nbytes:
                box = stored.box
                first = flat_index(box.offsets, shape)
                self._slices.append(_StoredSlice(first, _last_element(box, shape), stored, box))
        self._slices.sort(key=lambda entry: entry.first)
        self._firsts = [entry.first for entry in self._slices]
        is_cast = tensor.dtype != tensor.stored.dtype
        self.as_is = not is_cast and all(_is_contiguous(entry) for entry in self._slices)

    def segment(self, start: int, stop: int) -> Segment:
        """Return the elements that fill bytes ``start .. stop`` of the output file."""
        itemsize = nbytes_of(self.tensor.dtype, ())
        # Exact: blocks and tensors begin at multiples of the item size, because headers are padded
        # to 4096 bytes and wide dtypes come first (plan.py).
        first = (start - self.start) // itemsize
        last = (stop - self.start) // itemsize
        reads = tuple(self._reads(first, last))
        return Segment(self.tensor, start, stop, first, last, reads, self.as_is)

    def _reads(self, first: int, last: int) -> Iterator[Read]:
        itemsize = nbytes_of(self.tensor.stored.dtype, ())
        shape = self.tensor.stored.shape
        begin = 0
        if self.as_is:
            # Contiguous slices do not overlap, so only the one before can extend into the range.
            begin = max(0, bisect_left(self._firsts, first) - 1)
        end = bisect_left(self._firsts, last)
        for entry in self._slices[begin:end]:
            if entry.last < first:
                continue
            at = elements_before(entry.box, shape, first)
            stop = elements_before(entry.box, shape, last)
            if stop > at:
                yield Read(entry.stored, at * itemsize, (stop - at) * itemsize)


def _is_contiguous(entry: _StoredSlice) -> bool:
    return entry.last - entry.first + 1 == entry.box.numel


def _last_element(box: Box, shape: Sequence[int]) -> int:
    index = [offset + size - 1 for offset, size in zip(box.offsets, box.sizes, strict=True)]
    return flat_index(index, shape)


def elements_before(box: Box, shape: Sequence[int], flat: int) -> int:
    """Return how many elements of *box* precede element number *flat* of a row-major tensor of that *shape*."""
    if flat >= math.prod(shape):
        return box.numel
    count = 0
    # The elements of the tensor, and of the box, in one index of the current dimension.
    inner = math.prod(shape)
    within = box.numel
    for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True):
        # Neither is 0: for an empty tensor the function has returned, and empty slices are omitted.
        inner //= extent
        within //= size
        index, flat = divmod(flat, inner)
        if index < offset:
            return count
        if index >= offset + size:
            return count + size * within
        count += (index - offset) * within
    return count
