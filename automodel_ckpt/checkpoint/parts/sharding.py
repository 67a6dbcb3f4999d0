"""Regular shardings: which rank stores which box of a tensor, as a formula instead of a list.

Pure functions, without file access; imports no torch. A regular sharding is what ``fully_shard``, tensor parallelism
and their combinations make: the ranks of a device mesh partition dimensions of the tensor into chunks by the rule of
``torch.chunk``. The chunk of n ranks is ``ceil(size / n)`` elements; the last chunks may be shorter or empty.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import MAX_DIMENSIONS
from automodel_ckpt.checkpoint.files.type_aliases import Shape
from automodel_ckpt.checkpoint.parts.slices import (
    Box,
    ComputedSlices,
    Slice,
    flat_index,
    nbytes_of,
    whole_slice,
)

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
class RegularSlices(ComputedSlices):
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
    def interleaved(self) -> bool:  # type: ignore[override]
        return self.position is not None and self.position.interleaved

    @property
    def whole(self) -> Slice | None:  # type: ignore[override]
        if self.position is None:
            return None
        file, start, _ = self.position
        return whole_slice(self.fqn, self.dtype, self.shape, file, start)

    def renamed(self, fqn: str) -> RegularSlices:
        return replace(self, fqn=fqn)

    def overlapping(self, box: Box) -> Iterator[Slice]:
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
