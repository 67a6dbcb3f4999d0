"""Slices, the data type that the whole package uses. A slice is an index range of a tensor and its bytes in a file.

Save, load, reshard, verify and consolidate are operations on slices: which bytes two slices have in common
(:func:`overlap`). All functions are pure: they access no files and import no torch. Tensors are row-major (C order)
throughout, as in safetensors and in contiguous torch tensors; offsets and sizes count elements, starts and lengths of
runs count bytes.

The slices of a regular sharding are a formula instead of a list (:class:`Sharding`). ``fully_shard``, tensor
parallelism and their combinations make such shardings: the ranks of a device mesh partition dimensions of the tensor
into chunks by the rule of ``torch.chunk``. The chunk of n ranks is ``ceil(size / n)`` elements; the last chunks may be
shorter or empty.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.type_aliases import MAX_DIMENSIONS, Shape


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


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: its global *shape*, and the slices that tile it.

    A tensor of a large checkpoint can have thousands of slices, which are computed while they are read
    (:class:`RegularSlices`): code that needs some of them calls :meth:`overlapping`.
    """

    fqn: str
    dtype: str
    shape: Shape
    slices: tuple[Slice, ...] | RegularSlices

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)

    @property
    def box(self) -> Box:
        return whole_box(self.shape)

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


def contiguous_slices(tensor: Tensor) -> tuple[Slice, ...] | RegularSlices:
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


MAX_EXTENTS = 2**59
"""The largest product of a shape's dimensions, zeros not counted: 2**63 bytes at 16 bytes an element."""


def shape_fault(shape: Sequence[int]) -> str | None:
    """Return why no program can have a tensor with this shape; None when one can.

    Strides are computed from the dimensions even where one of them is 0, so that an empty tensor can overflow too.
    """
    if math.prod(max(extent, 1) for extent in shape) > MAX_EXTENTS:
        return f"the dimensions {list(shape)} are larger than any tensor can have"
    return None


# ---------------------------------------------------------------- regular shardings


MAX_RANKS = 1 << 24
"""The largest mesh that is read from a checkpoint."""

Coordinate = tuple[int, ...]
"""The position of a rank in a mesh: one index for each dimension of the mesh."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The slices of a tensor on a mesh of ranks, one for each rank, at most.

    The rank at coordinate c of the mesh has the number ``first + sum(c[i] * strides[i])``, where *first* depends on the
    tensor. *split* has, for each partitioned dimension of the tensor, the dimensions of the mesh that partition it, the
    outermost first: with (0, (1, 0)), dimension 0 is divided among mesh dimension 1, and each chunk among mesh
    dimension 0. Every dimension of the mesh occurs exactly once. Without a split, the mesh has no dimension, and one
    rank stores the whole tensor.
    """

    mesh: Shape = ()
    strides: Shape = ()
    split: tuple[tuple[int, Shape], ...] = ()

    def fault(self) -> str | None:
        """Return why this is not a sharding; None when it is one."""
        used = [mesh_dim for _, mesh_dims in self.split for mesh_dim in mesh_dims]
        dims = [dim for dim, _ in self.split]
        if len(self.mesh) != len(self.strides) or sorted(used) != list(range(len(self.mesh))):
            return "its mesh has dimensions that do not partition the tensor exactly once"
        if dims != sorted(set(dims)) or not all(mesh_dims for _, mesh_dims in self.split):
            return "its split dimensions are not in order"
        if len(self.mesh) > MAX_DIMENSIONS or min(self.mesh, default=1) < 1:
            return f"its mesh {list(self.mesh)} is impossible"
        # Multiplied one by one: the product of many sizes could have millions of digits.
        num_ranks = 1
        for size in self.mesh:
            num_ranks *= size
            if num_ranks > MAX_RANKS:
                return f"its mesh has more than {MAX_RANKS} ranks"
        return self._strides_fault()

    def _strides_fault(self) -> str | None:
        """Return why two coordinates could have the same rank; None when that is excluded."""
        reached = 0
        dims = [dim for dim, size in enumerate(self.mesh) if size > 1]
        for dim in sorted(dims, key=lambda dim: self.strides[dim]):
            if self.strides[dim] <= reached:
                return "two coordinates of its mesh have the same rank"
            reached += (self.mesh[dim] - 1) * self.strides[dim]
        return None

    def offset(self, coordinate: Coordinate) -> int:
        """Return the distance of the rank at *coordinate* from the first rank."""
        return sum(map(int.__mul__, coordinate, self.strides))

    def box(self, shape: Sequence[int], coordinate: Coordinate) -> Box:
        """Return the box of a tensor of *shape* at *coordinate*; it may be empty."""
        offsets = [0] * len(shape)
        sizes = list(shape)
        for dim, mesh_dims in self.split:
            for mesh_dim in mesh_dims:
                begin, size = _chunk(sizes[dim], self.mesh[mesh_dim], coordinate[mesh_dim])
                offsets[dim] += begin
                sizes[dim] = size
        return Box(tuple(offsets), tuple(sizes))

    def num_stored(self, shape: Sequence[int]) -> int:
        """Return the number of coordinates with a stored box, without visiting them."""
        total = 1
        for dim, mesh_dims in self.split:
            total *= _num_filled(shape[dim], [self.mesh[each] for each in mesh_dims])
        # A dimension that is not partitioned can be empty, too.
        return total if not self.split or 0 not in shape else 0

    def coordinates(self) -> Iterator[Coordinate]:
        """Yield all coordinates of the mesh, the last dimension fastest."""
        yield from itertools.product(*(range(size) for size in self.mesh))

    def overlapping(self, shape: Sequence[int], box: Box) -> Iterator[Coordinate]:
        """Yield the coordinates of boxes that may share elements with *box*, without visiting the others."""
        ranges = [range(size) for size in self.mesh]
        for dim, mesh_dims in self.split:
            # Only the outermost division is used: the inner ones are visited completely.
            outer = mesh_dims[0]
            chunk = -(-shape[dim] // self.mesh[outer])
            if chunk:
                first = box.offsets[dim] // chunk
                last = (box.offsets[dim] + max(box.sizes[dim], 1) - 1) // chunk
                ranges[outer] = range(first, min(last + 1, self.mesh[outer]))
        yield from itertools.product(*ranges)


# Kept: tens of thousands of tensors have a few shapes and shardings.
@functools.lru_cache(maxsize=4096)
def _stored_box(sharding: Sharding, shape: Shape, coordinate: Coordinate) -> Box | None:
    """Return the box that is stored at *coordinate*; None for an empty part of a tensor that is partitioned."""
    box = sharding.box(shape, coordinate)
    return None if sharding.split and 0 in box.sizes else box


@functools.lru_cache(maxsize=4096)
def _coordinate(sharding: Sharding, offset: int) -> Coordinate | None:
    """Return the coordinate of the rank at distance *offset* from the first rank, or None outside the mesh."""
    if offset < 0:
        return None
    found = [0] * len(sharding.mesh)
    # The widest stride first; the strides are nested (see _strides_fault).
    for dim in sorted(range(len(found)), key=lambda dim: -sharding.strides[dim]):
        if sharding.mesh[dim] > 1:
            found[dim] = min(offset // sharding.strides[dim], sharding.mesh[dim] - 1)
            offset -= found[dim] * sharding.strides[dim]
    return tuple(found) if offset == 0 else None


def _chunk(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Return (first element, elements) of chunk *index* of *size* elements."""
    chunk = -(-size // num_chunks)
    begin = min(index * chunk, size)
    return begin, min(chunk, size - begin)


def _num_filled(size: int, counts: Sequence[int]) -> int:
    """Return how many of the nested chunks of *size* elements are not empty."""
    if size == 0:
        return 0
    if not counts:
        return 1
    chunk = -(-size // counts[0])
    # All chunks are equal but the last one.
    full, rest = divmod(size, chunk)
    return full * _num_filled(chunk, counts[1:]) + _num_filled(rest, counts[1:])


def smallest_split(
    mesh: Sequence[int], strides: Sequence[int], split: Sequence[tuple[int, Shape]]
) -> tuple[Sharding, Shape]:
    """Return the sharding by the dimensions of *mesh* that *split* names, and the offsets of its replicas.

    The other dimensions of the mesh replicate the tensor. Each offset is the distance of the first rank of a replica
    from the first rank of the mesh.
    """
    used = sorted(mesh_dim for _, mesh_dims in split for mesh_dim in mesh_dims)
    own_split = tuple((dim, tuple(map(used.index, mesh_dims))) for dim, mesh_dims in split)
    others = [dim for dim in range(len(mesh)) if dim not in used]
    sharding, replicas = (
        Sharding(tuple(mesh[dim] for dim in dims), tuple(strides[dim] for dim in dims), of_dims)
        for dims, of_dims in ((used, own_split), (others, ()))
    )
    return sharding, tuple(map(replicas.offset, replicas.coordinates()))


class Record(NamedTuple):
    """What a save wrote of a slice: its file, its first byte in it, and the digest of its bytes."""

    file: str
    start: int
    digest: str


class Records(Protocol):
    """The records of regular slices."""

    def record(self, number: int, rank: int) -> Record:
        """Return the record of the slice that *rank* stores of the tensor *number*."""
        ...


class Position(NamedTuple):
    """Where a tensor is in a file that several ranks write: from byte *start* on, row-major."""

    file: str
    start: int
    interleaved: bool


@dataclass(frozen=True, slots=True, eq=False)
class RegularSlices(Sequence[Slice]):
    """The slices of a tensor with a regular *sharding*. Its mesh begins at the rank *first*.

    The slices are in files of the ranks, or at a common *position*. *part* numbers the file of a rank, if it stores the
    tensors of a tree in several. *records* has what a save wrote of the tensor *number*; None before the save.
    """

    fqn: str
    dtype: str
    shape: Shape
    sharding: Sharding
    first: int
    part: int = 0
    position: Position | None = None
    number: int = -1
    records: Records | None = None

    @property
    def interleaved(self) -> bool:
        return self.position is not None and self.position.interleaved

    @property
    def whole(self) -> Slice | None:
        """The whole tensor as one slice, without a digest; None where it is not one byte range of a file."""
        if self.position is None:
            return None
        file, start, _ = self.position
        return whole_slice(self.fqn, self.dtype, self.shape, file, start)

    def renamed(self, fqn: str) -> RegularSlices:
        """Return the same slices of a tensor of another name."""
        return replace(self, fqn=fqn)

    def overlapping(self, box: Box) -> Iterator[Slice]:
        """Yield the slices that share elements with *box*, and no or few others."""
        yield from self._at(self.sharding.overlapping(self.shape, box))

    def of_rank(self, rank: int) -> Slice | None:
        """Return the slice that *rank* stores; None when it stores none."""
        box = self.box_of_rank(rank)
        return None if box is None else self._slice(box, rank)

    def box_of_rank(self, rank: int) -> Box | None:
        """Return the box of the slice that *rank* stores; None when it stores none."""
        coordinate = _coordinate(self.sharding, rank - self.first)
        return None if coordinate is None else _stored_box(self.sharding, self.shape, coordinate)

    def _at(self, coordinates: Iterable[Coordinate]) -> Iterator[Slice]:
        """Yield the slices that are stored at *coordinates*."""
        for coordinate in coordinates:
            box = _stored_box(self.sharding, self.shape, coordinate)
            if box is not None:
                yield self._slice(box, self.first + self.sharding.offset(coordinate))

    def _slice(self, box: Box, rank: int) -> Slice:
        """Return the slice with *box*, which *rank* stores."""
        file, start, digest = "", 0, None
        if self.records is not None:
            file, start, digest = self.records.record(self.number, rank)
        if self.position is not None:
            file, start, _ = self.position
            if not self.interleaved and box.numel:
                start += flat_index(box.offsets, self.shape) * DTYPE_BITS[self.dtype] // 8
        return Slice(
            self.fqn,
            self.dtype,
            box.offsets,
            box.sizes,
            file,
            start,
            nbytes_of(self.dtype, box.sizes),
            digest,
            self.interleaved,
        )

    def __iter__(self) -> Iterator[Slice]:
        yield from self._at(self.sharding.coordinates())

    def __len__(self) -> int:
        return self.sharding.num_stored(self.shape)

    def __getitem__(self, index: Any) -> Any:
        return next(iter(self)) if index == 0 and len(self) else tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash((self.fqn, self.dtype, self.shape))
