"""The slices of a slice table as arrays. An object for each of millions of slices would take minutes.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.parts.sharding import Sharding

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.slice_table import SliceTable


class RegularBoxes(NamedTuple):
    """The stored boxes of a tensor of *shape* with a regular sharding, in the order of the coordinates of its mesh.

    *ranks* are the distances of their ranks from the first one. *is_stored* is true for each coordinate that has a
    box. *begins* and *lengths* have, for each partitioned dimension, the first element and the number of elements at
    each coordinate, in arrays that can be broadcast to the mesh.
    """

    shape: tuple[int, ...]
    ranks: Any
    is_stored: Any
    begins: Mapping[int, Any]
    lengths: Mapping[int, Any]

    def offsets(self) -> Any:
        """Return the position of the first element of each box: an array, boxes x dimensions."""
        found = np.zeros((len(self.ranks), len(self.shape)), np.int64)
        for dim, begins in self.begins.items():
            found[:, dim] = np.broadcast_to(begins, self.is_stored.shape)[self.is_stored]
        return found

    def sizes(self) -> Any:
        """Return the shape of each box: an array, boxes x dimensions."""
        found = np.empty((len(self.ranks), len(self.shape)), np.int64)
        found[:] = self.shape
        for dim, lengths in self.lengths.items():
            found[:, dim] = np.broadcast_to(lengths, self.is_stored.shape)[self.is_stored]
        return found

    def nbytes(self, dtype: str) -> Any:
        """Return the bytes of each box with a safetensors dtype."""
        return self.sizes().prod(axis=1) * DTYPE_BITS[dtype] // 8


def regular_boxes(sharding: Sharding, shape: tuple[int, ...]) -> RegularBoxes:
    """Return the boxes that the ranks of a mesh store of a tensor of *shape*."""
    ranks: Any = np.zeros((1,) * len(sharding.mesh), np.int64)
    is_stored: Any = np.full((1,) * len(sharding.mesh), not sharding.split or 0 not in shape)
    # One vector for each dimension of the mesh: a hostile checkpoint can have many dimensions and millions of ranks.
    indices: Any = np.indices(sharding.mesh, sparse=True)
    for index, stride in zip(indices, sharding.strides, strict=True):
        ranks = ranks + index * stride
    begins: dict[int, Any] = {}
    lengths: dict[int, Any] = {}
    for dim, mesh_dims in sharding.split:
        begin: Any = np.zeros((1,) * len(sharding.mesh), np.int64)
        length: Any = begin + shape[dim]
        for mesh_dim in mesh_dims:
            # The rule of torch.chunk, as in `Sharding.box`.
            chunk = -(-length // sharding.mesh[mesh_dim])
            first = np.minimum(indices[mesh_dim] * chunk, length)
            begin = begin + first
            length = np.minimum(chunk, length - first)
        begins[dim], lengths[dim] = begin, length
        is_stored = is_stored & (length > 0)
    is_stored = np.broadcast_to(is_stored, ranks.shape)
    return RegularBoxes(shape, ranks[is_stored], is_stored, begins, lengths)


class Columns(NamedTuple):
    """The slices of a table: those of its tensor n have the indices ``bounds[n] .. bounds[n + 1]``, in the order of
    their coordinates.

    *files* are indices into the files of the table, *starts* the first bytes, *nbytes* the lengths. The tensors are in
    files of one rank each.
    """

    bounds: Any
    files: Any
    starts: Any
    nbytes: Any


class BoxesOf:
    """The boxes of tensors; those with the same shape and sharding share one object."""

    def __init__(self) -> None:
        self._known: dict[tuple[Sharding, tuple[int, ...]], RegularBoxes] = {}

    def __call__(self, sharding: Sharding, shape: tuple[int, ...]) -> RegularBoxes:
        key = (sharding, shape)
        if key not in self._known:
            self._known[key] = regular_boxes(sharding, shape)
        return self._known[key]


def columns_of(table: SliceTable, boxes_of: BoxesOf) -> Columns:
    """Read all slices of a table whose tensors are in files of one rank each.

    Raises :class:`CheckpointUnusable` if a rank has other slices than its tensors.
    """
    boxes = [boxes_of(tensor.sharding, tensor.shape) for tensor in table.tensors]
    bounds = np.cumsum([0, *(len(each.ranks) for each in boxes)])
    sizes: dict[tuple[int, str], Any] = {}
    ranks: list[Any] = []
    nbytes: list[Any] = []
    for tensor, box in zip(table.tensors, boxes, strict=True):
        key = (id(box), tensor.dtype)
        if key not in sizes:
            sizes[key] = box.nbytes(tensor.dtype)
        ranks.append(box.ranks + tensor.first)
        nbytes.append(sizes[key])
    parts = np.repeat([tensor.part for tensor in table.tensors], np.diff(bounds))
    return _placed(table, bounds, np.concatenate(ranks), parts, np.concatenate(nbytes))


def _placed(table: SliceTable, bounds: Any, ranks: Any, parts: Any, nbytes: Any) -> Columns:
    """The columns of slices with these *ranks*, *parts* and *nbytes*, which are in the order of the tensors."""
    segments = table.segments
    rows = table.all_rows()
    segment_of = np.repeat(np.arange(len(segments)), segments["rows"])
    # Stable: the rows of a segment are in the order of the tensors.
    order = np.lexsort((parts, ranks))
    expected = segments["rank"][segment_of], segments["part"][segment_of]
    is_planned = len(order) == len(segment_of) and all(
        np.array_equal(of_slices[order], of_rows)
        for of_slices, of_rows in zip((ranks, parts), expected, strict=True)
    )
    if not is_planned:
        raise table.damaged("a rank stored other slices than planned")
    in_order = nbytes[order]
    ends = np.cumsum(rows["gap"] + in_order)
    # Where the segment of each row begins, and what the rows of the segments before it add up to.
    before = np.concatenate([[0], ends])[np.cumsum(segments["rows"]) - segments["rows"]]
    starts = np.empty(len(order), np.int64)
    first = segments["start"].astype(np.int64) - before
    starts[order] = first[segment_of] + ends - in_order
    files = np.empty(len(order), np.int64)
    files[order] = segments["file"][segment_of]
    return Columns(bounds, files, starts, nbytes)
