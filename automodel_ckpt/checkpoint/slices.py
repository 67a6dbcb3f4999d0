"""Slices: the data type that all of this package shares. A slice is a box of a tensor and its bytes in a file.

Save, load, reshard, verify and consolidate are all operations on slices: which bytes of one slice are which bytes
of another (:func:`overlap`), and whether a set of slices makes up a tensor exactly (:func:`tiling_fault`). Everything
here is pure: no files are touched, no torch is imported. Tensors are row-major (C order) throughout, as in safetensors
and in contiguous torch tensors; offsets and sizes count elements, starts and lengths of runs count bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS

MAX_CUT_DIMENSIONS = 5
MAX_EXTENTS = 2**59
"""The largest product of a shape's dimensions, zeros not counted: 2**63 bytes at 16 bytes an element."""
# Slices among which two that overlap are looked for by name; there can be a hundred thousand.
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
        """Where its elements are in an array of those of *outer*, which holds it."""
        triples = zip(self.offsets, self.sizes, outer.offsets, strict=True)
        return tuple(
            slice(offset - origin, offset - origin + size) for offset, size, origin in triples
        )


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of the tensor *fqn*, stored row-major in *file* at bytes ``start .. start + nbytes``.

    *file* is relative to the checkpoint (or to the bare directory it was found in). *dtype* is a safetensors code.
    *digest* is that of the slice's own bytes, row-major, or None where the source has none. The bytes of an
    *interleaved* slice are at their positions in the whole tensor, which begins at *start*; then all slices of the
    tensor are interleaved.
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

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A whole tensor: its global *shape*, and the slices that make it up."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)

    @property
    def box(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)


@dataclass(frozen=True, slots=True)
class Run:
    """*nbytes* consecutive bytes, at *source* within one box's bytes and at *target* within another's."""

    source: int
    target: int
    nbytes: int


def nbytes_of(dtype: str, sizes: Sequence[int]) -> int:
    """Bytes of a row-major box of that safetensors dtype."""
    return math.prod(sizes) * DTYPE_BITS[dtype] // 8


def whole_tensor(fqn: str, dtype: str, shape: tuple[int, ...], file: str, start: int) -> Tensor:
    """A tensor that is stored in a file as one slice, without a digest."""
    nbytes = nbytes_of(dtype, shape)
    return Tensor(
        fqn, dtype, shape, (Slice(fqn, dtype, (0,) * len(shape), shape, file, start, nbytes),)
    )


def counts(value: object) -> tuple[int, ...] | None:
    """A shape or offsets as a file of another program holds them; None for anything else."""
    if not isinstance(value, list | tuple) or not all(
        type(item) is int and 0 <= item < 2**63 for item in value
    ):
        return None
    return tuple(value)


def flat_index(index: Sequence[int], shape: Sequence[int]) -> int:
    """The number of the element at *index* of a row-major tensor of that shape."""
    at = 0
    for position, extent in zip(index, shape, strict=True):
        at = at * extent + position
    return at


def is_one_run(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether the box's bytes are consecutive in a row-major tensor of that shape."""
    return box.numel == 0 or len(list(itertools.islice(overlap(box, _whole(shape), 1), 2))) == 1


def row_major_boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """Elements ``first .. last`` of a row-major tensor as boxes, in their order, as few as possible."""
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    (row, skipped), (stop, rest) = divmod(first, inner), divmod(last, inner)
    if row == stop:
        yield from _row(row, shape, skipped, rest)
        return
    if skipped:
        yield from _row(row, shape, skipped, inner)
        row += 1
    if row < stop:
        yield Box((row, *(0 for _ in shape[1:])), (stop - row, *shape[1:]))
    yield from _row(stop, shape, 0, rest)


def _row(row: int, shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    for box in row_major_boxes(shape[1:], first, last):
        yield Box((row, *box.offsets), (1, *box.sizes))


def in_one_piece(tensor: Tensor) -> tuple[Slice, ...]:
    """The contiguous byte ranges of a tensor in files: its slices or, where they are interleaved, the whole tensor."""
    if not any(piece.interleaved for piece in tensor.slices):
        return tensor.slices
    first = tensor.slices[0]
    return whole_tensor(tensor.fqn, tensor.dtype, tensor.shape, first.file, first.start).slices


def runs_in_file(piece: Slice, shape: tuple[int, ...]) -> Iterator[Run]:
    """The byte ranges of a slice: ``source`` is an offset in the file, ``target`` one in the slice's own bytes."""
    if not piece.interleaved:
        yield Run(piece.start, 0, piece.nbytes)
        return
    for run in overlap(_whole(shape), piece.box, DTYPE_BITS[piece.dtype] // 8):
        yield Run(piece.start + run.source, run.target, run.nbytes)


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def intersection(a: Box, b: Box) -> Box | None:
    """The box common to both, or None where they share no element. Two scalars share their element."""
    starts = tuple(map(max, a.offsets, b.offsets))
    stops = tuple(
        min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def overlap(source: Box, target: Box, itemsize: int) -> Iterator[Run]:
    """The runs of bytes common to both boxes, in row-major order, each as long as it can be.

    ``itemsize`` is bytes per element. Yields nothing where the boxes share no element.
    """
    if source == target and source.numel:
        yield Run(0, 0, source.numel * itemsize)
        return
    common = intersection(source, target)
    if common is None:
        return
    inner = _contiguous_dims(common, source, target)
    outer = len(common.sizes) - inner
    # The innermost dimensions that both boxes hold entirely, and one more that may be partial, form one run.
    length = math.prod(common.sizes[max(outer - 1, 0) :]) * itemsize
    source_strides, target_strides = (
        _strides(source.sizes, itemsize),
        _strides(target.sizes, itemsize),
    )
    source_base = _dot(source_strides, common.offsets, source.offsets)
    target_base = _dot(target_strides, common.offsets, target.offsets)
    for index in itertools.product(*(range(size) for size in common.sizes[: max(outer - 1, 0)])):
        at_source = source_base + sum(
            i * stride for i, stride in zip(index, source_strides, strict=False)
        )
        at_target = target_base + sum(
            i * stride for i, stride in zip(index, target_strides, strict=False)
        )
        yield Run(at_source, at_target, length)


def _contiguous_dims(common: Box, source: Box, target: Box) -> int:
    """How many trailing dimensions both boxes hold in full, so that they are contiguous in both."""
    count = 0
    for size, in_source, in_target in zip(
        reversed(common.sizes), reversed(source.sizes), reversed(target.sizes), strict=True
    ):
        if not size == in_source == in_target:
            break
        count += 1
    return count


def _strides(sizes: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides, stride = [], itemsize
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _dot(strides: Sequence[int], at: Sequence[int], origin: Sequence[int]) -> int:
    return sum(stride * (a - o) for stride, a, o in zip(strides, at, origin, strict=True))


def shape_fault(shape: Sequence[int]) -> str | None:
    """Why no program can hold a tensor of that shape, or None.

    Strides are computed from the dimensions even where one of them is 0, so that an empty tensor can overflow too.
    """
    if math.prod(max(extent, 1) for extent in shape) > MAX_EXTENTS:
        return f"the dimensions {list(shape)} are larger than any tensor can have"
    return None


def tiling_fault(boxes: Sequence[Box], shape: tuple[int, ...]) -> str | None:
    """Why the boxes do not make up a tensor of that shape exactly once, or None where they do.

    Checked: rank and bounds of every box, no two share an element, and together they hold all of them. An empty
    tensor is made up by any number of empty boxes, none included; a scalar needs exactly one.
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
    have, want = sum(box.numel for box in filled), math.prod(shape)
    if not filled and not want:
        return None
    if have < want:
        return f"{want - have} of {want} elements are not in any slice"
    cut = [d for d, extent in enumerate(shape) if any(box.sizes[d] != extent for box in filled)]
    if len(cut) > MAX_CUT_DIMENSIONS:
        return f"its slices partition {len(cut)} dimensions, more than {MAX_CUT_DIMENSIONS}"
    if _corners(filled, cut) == _corners([_whole(shape)], cut):
        return None
    if clash := _first_clash(filled[:_COMPARED]):
        a, b = clash
        return f"the slices at {list(a.offsets)} and {list(b.offsets)} overlap"
    return "two slices overlap"


def interleaving_fault(tensor: Tensor) -> str | None:
    """Why the tensor's slices cannot be interleaved as they say, or None."""
    places = {(piece.file, piece.start, piece.interleaved) for piece in tensor.slices}
    if len(places) > 1 and any(piece.interleaved for piece in tensor.slices):
        return "some of its slices are interleaved, in one place, and others are not there"
    return None


def _corners(boxes: Sequence[Box], dims: Sequence[int]) -> dict[tuple[int, ...], int]:
    """How often each corner occurs, upper ends counted against lower ones: equal for two sets of boxes exactly where
    they cover the same elements equally often (it is the mixed difference of the number of boxes at each element)."""
    found: dict[tuple[int, ...], int] = {}
    for box in boxes:
        ends = [((box.offsets[d], 1), (box.offsets[d] + box.sizes[d], -1)) for d in dims]
        for corner in itertools.product(*ends):
            at = tuple(place for place, _ in corner)
            sign = math.prod(sign for _, sign in corner)
            found[at] = found.get(at, 0) + sign
    return {at: count for at, count in found.items() if count}


def _first_clash(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, if any: a sweep along the first dimension over the boxes still open."""
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets):
        if box.offsets:
            open_boxes = [o for o in open_boxes if o.offsets[0] + o.sizes[0] > box.offsets[0]]
        for other in open_boxes:
            if intersection(other, box) is not None:
                return other, box
        open_boxes.append(box)
    return None
