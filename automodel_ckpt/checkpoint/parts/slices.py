"""Slices, the data type that the whole package uses. A slice is an index range of a tensor and its bytes in a file.

Save, load, reshard, verify and consolidate are operations on slices: which bytes two slices have in common
(:func:`overlap`), and whether slices tile a tensor (:func:`tiling_fault`). All functions are pure: they access no files
and import no torch. Tensors are row-major (C order) throughout, as in safetensors and in contiguous torch tensors;
offsets and sizes count elements, starts and lengths of runs count bytes.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.type_aliases import Shape


@dataclass(frozen=True, slots=True)
class Box:
    """An index range of a tensor: elements ``offsets[d] .. offsets[d] + sizes[d]`` in every dimension d."""

    offsets: Shape
    sizes: Shape

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
    *digest* is computed from the slice's bytes, row-major. It is None when the source has no digests. The bytes of an
    *interleaved* slice are located at their positions in the whole tensor, which begins at *start*. If one slice of a
    tensor is interleaved, all of them are.

    A slice of another program's file can have *strides*: the distance of neighbors in each dimension, in elements. Its
    first element is at *start*, and *nbytes* is the size of its elements, not of the byte range that they are in.
    ``tensors/box_reader.py`` reads it. Such a slice is not interleaved and has no digest.
    """

    fqn: str
    dtype: str
    offsets: Shape
    sizes: Shape
    file: str
    start: int
    nbytes: int
    digest: str | None = None
    interleaved: bool = False
    strides: Shape | None = None

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
    shape: Shape
    slices: tuple[Slice, ...] | ComputedSlices

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)

    @property
    def box(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)

    def renamed(self, fqn: str) -> Tensor:
        """Return the same tensor under another name."""
        if not isinstance(self.slices, tuple):
            return replace(self, fqn=fqn, slices=self.slices.renamed(fqn))
        slices = tuple(replace(stored, fqn=fqn) for stored in self.slices)
        return replace(self, fqn=fqn, slices=slices)

    def overlapping(self, box: Box) -> Iterator[Slice]:
        """Yield the slices that share elements with *box*; of interleaved ones the whole tensor as one slice."""
        found = iter(contiguous_slices(self))
        if not isinstance(self.slices, tuple) and not self.slices.interleaved:
            found = self.slices.overlapping(box)
        for stored in found:
            # Most loads read the slices that were saved.
            is_same = stored.offsets == box.offsets and stored.sizes == box.sizes
            if (is_same and stored.nbytes) or intersection(stored.box, box) is not None:
                yield stored


TensorMap = Mapping[str, Tensor]
"""Described tensors by name."""
TensorDict = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """*nbytes* consecutive bytes, at *source* within one box's bytes and at *target* within another's."""

    source: int
    target: int
    nbytes: int


def nbytes_of(dtype: str, sizes: Sequence[int]) -> int:
    """Return the bytes of a box with a safetensors dtype."""
    return math.prod(sizes) * DTYPE_BITS[dtype] // 8


def whole_tensor(fqn: str, dtype: str, shape: Shape, file: str, start: int) -> Tensor:
    """Describe a tensor that is stored in a file as one slice, without a digest."""
    return Tensor(fqn, dtype, shape, (whole_slice(fqn, dtype, shape, file, start),))


def whole_slice(fqn: str, dtype: str, shape: Shape, file: str, start: int) -> Slice:
    """Describe a tensor in one byte range of a file as a slice, without a digest."""
    return Slice(fqn, dtype, (0,) * len(shape), shape, file, start, nbytes_of(dtype, shape))


def digests_of(tensor: Tensor) -> dict[object, str | None]:
    """Map the offsets and sizes of each slice of *tensor* to its digest."""
    return {(stored.offsets, stored.sizes): stored.digest for stored in tensor.slices}


def have_same_digests(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape consist of the same slices with the same digests.

    False if a slice has no digest.
    """
    digests = digests_of(one)
    return None not in digests.values() and digests == digests_of(other)


def counts(value: object) -> Shape | None:
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


def is_one_run(box: Box, shape: Shape) -> bool:
    """Whether the bytes of a box are consecutive in a row-major tensor."""
    if box.numel == 0:
        return True
    first_runs = list(itertools.islice(overlap(box, whole_box(shape), 1), 2))
    return len(first_runs) == 1


def row_major_boxes(shape: Shape, first: int, last: int) -> Iterator[Box]:
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


def _row(row: int, shape: Shape, first: int, last: int) -> Iterator[Box]:
    for box in row_major_boxes(shape[1:], first, last):
        yield Box((row, *box.offsets), (1, *box.sizes))


# The elements of a box.
_BLOCK_ELEMENTS = 256 << 10


def boxes(shape: Shape, num_elements: int = _BLOCK_ELEMENTS) -> Iterator[Box]:
    """Yield boxes of at most *num_elements* that tile a tensor of that *shape*, in row-major order."""
    # Dimensions that fit are complete in every box, so that a box is one run of bytes.
    num_elements, inner = max(1, num_elements), 1
    for extent in reversed(shape):
        if inner * extent > num_elements:
            break
        inner *= extent
    numel = math.prod(shape)
    step = num_elements // max(inner, 1) * max(inner, 1)
    for first in range(0, numel, step):
        yield from row_major_boxes(shape, first, min(first + step, numel))


def is_interleaved(tensor: Tensor) -> bool:
    """Whether the slices of a tensor are interleaved in one place of a file."""
    if not isinstance(tensor.slices, tuple):
        return tensor.slices.interleaved
    return any(stored.interleaved for stored in tensor.slices)


def contiguous_slices(tensor: Tensor) -> tuple[Slice, ...] | ComputedSlices:
    """Return the contiguous byte ranges of a tensor: its slices, or the whole tensor if they are interleaved."""
    if not is_interleaved(tensor):
        return tensor.slices
    first = tensor.slices[0]
    return (whole_slice(tensor.fqn, tensor.dtype, tensor.shape, first.file, first.start),)


def runs_in_file(stored: Slice, shape: Shape) -> Iterator[Run]:
    """Yield the byte ranges of a slice: ``source`` is the offset in the file, ``target`` that in the slice's bytes."""
    if stored.strides is not None:
        raise ValueError(f"{stored.fqn} is strided: its elements are in no byte ranges")
    if not stored.interleaved:
        yield Run(stored.start, 0, stored.nbytes)
        return
    for run in overlap(whole_box(shape), stored.box, DTYPE_BITS[stored.dtype] // 8):
        yield Run(stored.start + run.source, run.target, run.nbytes)


def whole_box(shape: Shape) -> Box:
    """The box of all elements of a tensor."""
    return Box((0,) * len(shape), shape)


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box that both have in common; None when they share no element. Two scalars share their element."""
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
    common = intersection(source, target)
    if common is None:
        return
    # The innermost dimensions that both boxes contain entirely, and one more that may be partial, form one run.
    num_looped = len(common.sizes)
    for size, in_source, in_target in zip(
        reversed(common.sizes), reversed(source.sizes), reversed(target.sizes), strict=True
    ):
        num_looped -= 1
        if not size == in_source == in_target:
            break
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


def _strides(sizes: Sequence[int], itemsize: int) -> Shape:
    strides = []
    stride = itemsize
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _dot(strides: Sequence[int], at: Sequence[int], origin: Sequence[int]) -> int:
    return sum(stride * (a - o) for stride, a, o in zip(strides, at, origin, strict=True))


# _corners() visits 2**n corners of each box that is partitioned in n dimensions.
MAX_CUT_DIMENSIONS = 5
MAX_EXTENTS = 2**59
"""The largest product of a shape's dimensions, zeros not counted: 2**63 bytes at 16 bytes an element."""


def shape_fault(shape: Sequence[int]) -> str | None:
    """Return why no program can have a tensor with this shape; None when one can.

    Strides are computed from the dimensions even where one of them is 0, so that an empty tensor can overflow too.
    """
    if math.prod(max(extent, 1) for extent in shape) > MAX_EXTENTS:
        return f"the dimensions {list(shape)} are larger than any tensor can have"
    return None


def tiling_fault(boxes: Sequence[Box], shape: Shape) -> str | None:
    """Return why the boxes do not tile a tensor; None when they do.

    Checks the number of dimensions and the bounds of every box, that no two boxes share an element, and that they
    contain all elements. Any number of empty boxes, or none, tile an empty tensor; exactly one tiles a scalar.
    """
    if fault := shape_fault(shape):
        return fault
    if len(boxes) == 1 and boxes[0] == whole_box(shape) and min(shape, default=0) >= 0:
        return None
    for box in boxes:
        if fault := _bounds_fault(box, shape):
            return fault
    filled = [box for box in boxes if box.numel]
    have = sum(box.numel for box in filled)
    want = math.prod(shape)
    if not filled and not want:
        return None
    if have < want:
        return f"{want - have} of {want} elements are not in any slice"
    # Only the dimensions that a slice partitions: each further one would double the corners.
    cut = []
    for dim, extent in enumerate(shape):
        if any(box.sizes[dim] != extent for box in filled):
            cut.append(dim)
    if len(cut) > MAX_CUT_DIMENSIONS:
        return f"its slices partition {len(cut)} dimensions, more than {MAX_CUT_DIMENSIONS}"
    # The number of elements alone proves nothing: a gap and an overlap can cancel.
    if _corners(filled, cut) == _corners([whole_box(shape)], cut):
        return None
    return "two slices overlap"


def _bounds_fault(box: Box, shape: Shape) -> str | None:
    """Return why a box is not within a tensor's shape; None when it is."""
    if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
        return f"a slice has {len(box.sizes)} dimensions, the tensor {len(shape)}"
    for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True):
        if offset < 0 or size < 0 or offset + size > extent:
            return f"the slice at {list(box.offsets)} of size {list(box.sizes)} exceeds the shape {list(shape)}"
    return None


def interleaving_fault(slices: Sequence[Slice]) -> str | None:
    """Return why the interleaved *slices* of a tensor are inconsistent; None when they are not."""
    places = {(stored.file, stored.start, stored.interleaved) for stored in slices}
    if len(places) > 1 and any(interleaved for _, _, interleaved in places):
        return "some of its slices are interleaved, in one place, and others are not there"
    return None


def _corners(boxes: Sequence[Box], dims: Sequence[int]) -> dict[Shape, int]:
    """Count how often each corner occurs, with opposite signs for lower and upper ends of dimensions.

    The counts are the mixed difference of the number of boxes at each element. They are therefore equal for two sets of
    boxes if and only if both cover the same elements equally often.
    """
    found: dict[Shape, int] = {}
    for box in boxes:
        ends = []
        for dim in dims:
            low = box.offsets[dim]
            high = low + box.sizes[dim]
            ends.append(((low, 1), (high, -1)))
        for corner in itertools.product(*ends):
            at = tuple(position for position, _ in corner)
            sign = math.prod(sign for _, sign in corner)
            found[at] = found.get(at, 0) + sign
    return {at: count for at, count in found.items() if count}
