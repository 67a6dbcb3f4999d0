"""Slices, the data type that the whole package uses. A slice is an index range of a tensor and its bytes in a file.

Save, load, reshard, verify and consolidate are operations on slices: which bytes two slices have in common
(:func:`overlap`), and whether slices tile a tensor (:func:`tiling_fault`). All functions are pure: they access no files
and import no torch. Tensors are row-major (C order) throughout, as in safetensors
and in contiguous torch tensors; offsets and sizes count elements, starts and lengths of runs count bytes.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS

MAX_DIMENSIONS = 64
# _corners() visits 2**n corners of each box that is partitioned in n dimensions.
MAX_CUT_DIMENSIONS = 5
MAX_EXTENTS = 2**59
"""The largest product of a shape's dimensions, zeros not counted: 2**63 bytes at 16 bytes an element."""
# Number of slices that are compared to report two that overlap. A tensor can have a hundred thousand.
_COMPARED = 1000


@dataclass(frozen=True, slots=True)
class Box:
    """An index range of a tensor: elements ``offsets[d] .. offsets[d] + sizes[d]`` in every dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this box in an array of the elements of *outer*, which contains it."""
        index = []
        for offset, size, origin in zip(self.offsets, self.sizes, outer.offsets, strict=True):
            start = offset - origin
            index.append(slice(start, start + size))
        return tuple(index)


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of the tensor *fqn*, stored row-major in *file* at bytes ``start .. start + nbytes``.

    *file* is relative to the checkpoint (or to the bare directory it was found in). *dtype* is a safetensors code.
    *digest* is that of the slice's bytes, row-major; None if the source has no digests. The bytes of an *interleaved*
    slice are located at their positions in the whole tensor, which begins at *start*. If one slice of a tensor is
    interleaved, all of them are.

    A slice of another program's file can have *strides*: the distance of neighbors in each dimension, in elements. Its
    first element is at *start*, and *nbytes* is the size of its elements, not of the byte range that they are in.
    ``tensors/strided.py`` reads it. Such a slice is not interleaved and has no digest.
    """

    fqn: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    nbytes: int
    digest: str | None = None
    interleaved: bool = False
    strides: tuple[int, ...] | None = None

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)

    @property
    def row_bytes(self) -> int:
        """The distance in the file of neighbors in the first dimension, in bytes. Not for an interleaved slice."""
        itemsize = DTYPE_BITS[self.dtype] // 8
        if self.strides is not None:
            return self.strides[0] * itemsize
        return math.prod(self.sizes[1:]) * itemsize


class ComputedSlices(Sequence[Slice]):
    """The slices of a tensor that are not in memory: each is computed when it is needed."""

    interleaved: bool
    whole: Slice | None
    """The whole tensor as one slice, without a digest, where it is one byte range of a file; None where it is not."""

    @abstractmethod
    def renamed(self, fqn: str) -> ComputedSlices:
        """Return the same slices of a tensor of another name."""

    @abstractmethod
    def overlapping(self, box: Box) -> Iterator[Slice]:
        """Yield the slices that share elements with *box*, and no or few others."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: its global *shape*, and the slices that tile it.

    A tensor of a large checkpoint can have thousands of slices, which are computed while they are read
    (:class:`ComputedSlices`): code that needs some of them calls :meth:`overlapping`.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...] | ComputedSlices

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)

    @property
    def box(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)

    def renamed(self, fqn: str) -> Tensor:
        """Return the same tensor under another name."""
        if isinstance(self.slices, ComputedSlices):
            return replace(self, fqn=fqn, slices=self.slices.renamed(fqn))
        slices = tuple(replace(stored, fqn=fqn) for stored in self.slices)
        return replace(self, fqn=fqn, slices=slices)

    def overlapping(self, box: Box) -> Iterator[Slice]:
        """Yield the slices that share elements with *box*; of interleaved ones the whole tensor as one slice."""
        found: Iterator[Slice] = iter(contiguous_slices(self))
        if isinstance(self.slices, ComputedSlices) and not self.slices.interleaved:
            found = self.slices.overlapping(box)
        for stored in found:
            if intersection(stored.box, box) is not None:
                yield stored


@dataclass(frozen=True, slots=True)
class Run:
    """*nbytes* consecutive bytes, at *source* within one box's bytes and at *target* within another's."""

    source: int
    target: int
    nbytes: int


def nbytes_of(dtype: str, sizes: Sequence[int]) -> int:
    """Return the bytes of a box with a safetensors dtype."""
    return math.prod(sizes) * DTYPE_BITS[dtype] // 8


def whole_tensor(fqn: str, dtype: str, shape: tuple[int, ...], file: str, start: int) -> Tensor:
    """Describe a tensor that is stored in a file as one slice, without a digest."""
    return Tensor(fqn, dtype, shape, (whole_slice(fqn, dtype, shape, file, start),))


def whole_slice(fqn: str, dtype: str, shape: tuple[int, ...], file: str, start: int) -> Slice:
    """Describe a tensor in one byte range of a file as a slice, without a digest."""
    return Slice(fqn, dtype, (0,) * len(shape), shape, file, start, nbytes_of(dtype, shape))


def counts(value: object) -> tuple[int, ...] | None:
    """Convert a shape or offsets in a file of another program; None for any other value."""
    if not isinstance(value, list | tuple):
        return None
    # Not isinstance: True is an int, too.
    if not all(type(item) is int and 0 <= item < 2**63 for item in value):
        return None
    return tuple(value)


def flat_index(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the number of the element at *index* in a row-major tensor."""
    number = 0
    for position, extent in zip(index, shape, strict=True):
        number = number * extent + position
    return number


def is_one_run(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether the bytes of a box are consecutive in a row-major tensor."""
    if box.numel == 0:
        return True
    first_runs = list(itertools.islice(overlap(box, _whole(shape), 1), 2))
    return len(first_runs) == 1


def row_major_boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """Divide elements ``first .. last`` of a row-major tensor into as few boxes as possible, in order."""
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    row, skipped = divmod(first, inner)
    stop, rest = divmod(last, inner)
    if row == stop:
        yield from _row(row, shape, skipped, rest)
        return
    if skipped:
        yield from _row(row, shape, skipped, inner)
        row += 1
    if row < stop:
        zeros = (0,) * (len(shape) - 1)
        yield Box((row, *zeros), (stop - row, *shape[1:]))
    yield from _row(stop, shape, 0, rest)


def _row(row: int, shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    for box in row_major_boxes(shape[1:], first, last):
        yield Box((row, *box.offsets), (1, *box.sizes))


def is_interleaved(tensor: Tensor) -> bool:
    """Whether the slices of a tensor are interleaved in one place of a file."""
    if isinstance(tensor.slices, ComputedSlices):
        return tensor.slices.interleaved
    return any(piece.interleaved for piece in tensor.slices)


def contiguous_slices(tensor: Tensor) -> tuple[Slice, ...] | ComputedSlices:
    """Return the contiguous byte ranges of a tensor: its slices, or the whole tensor if they are interleaved."""
    if not is_interleaved(tensor):
        return tensor.slices
    first = tensor.slices[0]
    return (whole_slice(tensor.fqn, tensor.dtype, tensor.shape, first.file, first.start),)


def runs_in_file(piece: Slice, shape: tuple[int, ...]) -> Iterator[Run]:
    """Yield the byte ranges of a slice: ``source`` is the offset in the file, ``target`` that in the slice's bytes."""
    if piece.strides is not None:
        raise ValueError(f"{piece.fqn} is strided: its elements are in no byte ranges")
    if not piece.interleaved:
        yield Run(piece.start, 0, piece.nbytes)
        return
    for run in overlap(_whole(shape), piece.box, DTYPE_BITS[piece.dtype] // 8):
        yield Run(piece.start + run.source, run.target, run.nbytes)


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box that both have in common; None if they share no element. Two scalars share their element."""
    starts = []
    sizes = []
    ranges = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    for a_start, a_size, b_start, b_size in ranges:
        start = max(a_start, b_start)
        size = min(a_start + a_size, b_start + b_size) - start
        if size <= 0:
            return None
        starts.append(start)
        sizes.append(size)
    return Box(tuple(starts), tuple(sizes))


def overlap(source: Box, target: Box, itemsize: int) -> Iterator[Run]:
    """Yield the runs of bytes that both boxes have in common, in row-major order, each as long as possible.

    ``itemsize`` is the bytes per element. Yields nothing if the boxes share no element.
    """
    if source == target and source.numel:
        yield Run(0, 0, source.numel * itemsize)
        return
    common = intersection(source, target)
    if common is None:
        return
    inner = _contiguous_dims(common, source, target)
    outer = len(common.sizes) - inner
    # The innermost dimensions that both boxes contain entirely, and one more that may be partial, form one run.
    num_looped = max(outer - 1, 0)
    length = math.prod(common.sizes[num_looped:]) * itemsize
    source_strides = _strides(source.sizes, itemsize)
    target_strides = _strides(target.sizes, itemsize)
    source_base = _dot(source_strides, common.offsets, source.offsets)
    target_base = _dot(target_strides, common.offsets, target.offsets)
    looped = [range(size) for size in common.sizes[:num_looped]]
    for index in itertools.product(*looped):
        # The strides of the inner dimensions are not used: map() ends with the index.
        at_source = source_base + sum(map(operator.mul, index, source_strides))
        at_target = target_base + sum(map(operator.mul, index, target_strides))
        yield Run(at_source, at_target, length)


def _contiguous_dims(common: Box, source: Box, target: Box) -> int:
    """Count the trailing dimensions that both boxes contain entirely, so that they are contiguous in both."""
    count = 0
    for size, in_source, in_target in zip(
        reversed(common.sizes), reversed(source.sizes), reversed(target.sizes), strict=True
    ):
        if not size == in_source == in_target:
            break
        count += 1
    return count


def _strides(sizes: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides = []
    stride = itemsize
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _dot(strides: Sequence[int], at: Sequence[int], origin: Sequence[int]) -> int:
    return sum(stride * (a - o) for stride, a, o in zip(strides, at, origin, strict=True))


def shape_fault(shape: Sequence[int]) -> str | None:
    """Return why no program can have a tensor with this shape; None if one can.

    Strides are computed from the dimensions even where one of them is 0, so that an empty tensor can overflow too.
    """
    if math.prod(max(extent, 1) for extent in shape) > MAX_EXTENTS:
        return f"the dimensions {list(shape)} are larger than any tensor can have"
    return None


def tiling_fault(boxes: Sequence[Box], shape: tuple[int, ...]) -> str | None:
    """Return why the boxes do not tile a tensor; None if they do.

    Checks the number of dimensions and the bounds of every box, that no two boxes share an element, and that they
    contain all elements. Any number of empty boxes, or none, tile an empty tensor; exactly one tiles a scalar.
    """
    if fault := shape_fault(shape):
        return fault
    if len(boxes) == 1 and boxes[0] == _whole(shape) and min(shape, default=0) >= 0:
        return None
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"a slice has {len(box.sizes)} dimensions, the tensor {len(shape)}"
        for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > extent:
                return f"the slice at {list(box.offsets)} of size {list(box.sizes)} exceeds the shape {list(shape)}"
    filled = [box for box in boxes if box.numel]
    have = sum(box.numel for box in filled)
    want = math.prod(shape)
    if not filled and not want:
        return None
    if have < want:
        return f"{want - have} of {want} elements are not in any slice"
    # Only the dimensions that a slice partitions: each further one would double the corners.
    cut = [d for d, extent in enumerate(shape) if any(box.sizes[d] != extent for box in filled)]
    if len(cut) > MAX_CUT_DIMENSIONS:
        return f"its slices partition {len(cut)} dimensions, more than {MAX_CUT_DIMENSIONS}"
    # The number of elements alone proves nothing: a gap and an overlap can cancel.
    if _corners(filled, cut) == _corners([_whole(shape)], cut):
        return None
    if clash := _first_clash(filled[:_COMPARED]):
        a, b = clash
        return f"the slices at {list(a.offsets)} and {list(b.offsets)} overlap"
    return "two slices overlap"


def interleaving_fault(tensor: Tensor) -> str | None:
    """Return why the interleaved slices of a tensor are inconsistent; None if they are not."""
    if isinstance(tensor.slices, ComputedSlices):
        return None
    places = {(piece.file, piece.start, piece.interleaved) for piece in tensor.slices}
    if len(places) > 1 and any(piece.interleaved for piece in tensor.slices):
        return "some of its slices are interleaved, in one place, and others are not there"
    return None


def _corners(boxes: Sequence[Box], dims: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Count how often each corner occurs, with opposite signs for lower and upper ends of dimensions.

    The counts are the mixed difference of the number of boxes at each element. They are therefore equal for two sets of
    boxes if and only if both cover the same elements equally often.
    """
    found: dict[tuple[int, ...], int] = {}
    for box in boxes:
        ends = [((box.offsets[d], 1), (box.offsets[d] + box.sizes[d], -1)) for d in dims]
        for corner in itertools.product(*ends):
            at = tuple(place for place, _ in corner)
            sign = math.prod(sign for _, sign in corner)
            found[at] = found.get(at, 0) + sign
    return {at: count for at, count in found.items() if count}


def _first_clash(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Find two boxes that share an element, by a sweep along the first dimension; None if there are none."""
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets):
        if box.offsets:
            open_boxes = [o for o in open_boxes if o.offsets[0] + o.sizes[0] > box.offsets[0]]
        for other in open_boxes:
            if intersection(other, box) is not None:
                return other, box
        open_boxes.append(box)
    return None
