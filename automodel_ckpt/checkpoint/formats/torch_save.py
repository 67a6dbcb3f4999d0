"""PyTorch DCP's own format: ``__{rank}_0.distcp`` files and a ``.metadata`` that torch's ``FileSystemReader`` reads.

We write it ourselves, because torch's writer fsyncs ``.metadata`` before it is flushed, keeps no digests, and publishes
in place. Each item of a ``.distcp`` file is one ``torch.save`` archive: a zip. Its record ``data/0`` holds the
tensor's raw bytes, uncompressed. Their position is in the manifest, so that our own reader needs neither the archive
nor the pickle in ``.metadata``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.formats.planning import TreePlan, located
from automodel_ckpt.checkpoint.formats.tree_layout import TreeLayout, ordered
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.parts.manifest import Blob, Tree
from automodel_ckpt.checkpoint.parts.sharding import RegularSlices, Sharding
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.pickles.dcp_metadata import (
    DcpChunk,
    DcpLocation,
    DcpMetadata,
    Extents,
    Items,
)
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import described_archive

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.slice_table import SliceTable


NAME = "torch_save"


def lay_out(plan: TreePlan) -> TreeLayout:
    """The order of an assigned plan's tensors in the files of each rank."""
    return ordered(plan.assignment.tensors.values())


def plan_jobs(plan: TreePlan, rank: int) -> Iterator[FileJob]:
    """The jobs of *rank* for a tree."""
    file = layout.distcp_file(plan.directory, rank)
    chunks: list[Chunk] = []
    end = 0
    for fqn, data in plan.values():
        chunks.append(Chunk(end, data, Blob(fqn, file, end, len(data), "")))
        end += len(data)
    for tensor in plan.tensors():
        (stored,) = tensor.slices
        archive = described_archive(tensor.dtype, stored.sizes)
        # Head, data, tail: an archive of torch.save around the tensor's raw bytes. The tail contains their checksum,
        # which is known only when they are written.
        data_start = end + len(archive.head)
        tail_start = data_start + stored.nbytes
        entry = located(tensor, file, data_start)
        chunks.append(Chunk(end, archive.head))
        chunks.append(Chunk(data_start, plan.fetch(tensor), entry))
        chunks.append(Chunk(tail_start, archive.tail, crc_at=archive.crc_at))
        end = tail_start + len(archive.tail)
    yield FileJob(file, chunks, plan.name, end)


def metadata_of(plan: TreePlan, tree: Tree) -> bytes:
    """A tree's ``.metadata`` for torch's reader."""
    metadata = DcpMetadata(has_paths=plan.nested)
    columns = _Columns(tree, metadata)
    for fqn, tensor in tree.tensors.items():
        path = plan.paths[fqn] if plan.nested else (fqn,)
        if isinstance(tensor.slices, RegularSlices):
            extents, items = columns.of(tensor.slices)
            metadata.add_chunks(path, tensor.dtype, tensor.shape, extents, items)
        else:
            metadata.add_tensor(path, tensor.dtype, tensor.shape, _chunks(tensor))
    for fqn, blob in tree.objects.items():
        path = plan.paths[fqn] if plan.nested else (fqn,)
        metadata.add_value(path, DcpLocation(_file_name(blob.file), blob.start, blob.nbytes))
    return metadata.to_bytes()


def _file_name(file: str) -> str:
    # torch's reader looks for the file beside .metadata.
    return os.path.basename(file)


def _chunks(tensor: Tensor) -> list[DcpChunk]:
    """The chunks of a tensor with listed slices."""
    chunks: list[DcpChunk] = []
    for stored in tensor.slices:
        # torch's reader gets the whole archive, the manifest's entry has only the raw bytes in it.
        archive = described_archive(tensor.dtype, stored.sizes)
        length = len(archive.head) + stored.nbytes + len(archive.tail)
        start = stored.start - len(archive.head)
        location = DcpLocation(_file_name(stored.file), start, length)
        chunks.append(DcpChunk(stored.offsets, stored.sizes, location))
    return chunks


class _Columns:
    """The chunks of the regular tensors of a *tree*. Their slices are read from its table as arrays."""

    def __init__(self, tree: Tree, metadata: DcpMetadata) -> None:
        self._boxes = BoxesOf()
        self._extents: dict[int, Extents] = {}
        self._archives: dict[tuple[int, str], Any] = {}
        if tree.table is not None:
            self._columns = columns_of(tree.table, self._boxes)
            numbers = [metadata.file_number(_file_name(file)) for file in tree.table.files]
            self._files = np.array(numbers, np.int64)[self._columns.files]

    def of(self, slices: RegularSlices) -> tuple[Extents, Items]:
        """The extents and items of a tensor's chunks."""
        boxes = self._boxes(slices.sharding, slices.shape)
        # The boxes are the same object for all tensors of this shape and sharding.
        key = id(boxes)
        if key not in self._extents:
            self._extents[key] = Extents(boxes.offsets(), boxes.sizes())
        extents = self._extents[key]
        if (key, slices.dtype) not in self._archives:
            self._archives[key, slices.dtype] = _added_bytes(slices.dtype, extents.sizes)
        head_bytes, other_bytes = self._archives[key, slices.dtype]
        bounds, _, starts, nbytes = self._columns
        here = slice(bounds[slices.number], bounds[slices.number + 1])
        items = Items(self._files[here], starts[here] - head_bytes, nbytes[here] + other_bytes)
        return extents, items


def _added_bytes(dtype: str, sizes: Any) -> tuple[Any, Any]:
    """The bytes before the data in the archives of tensors of these *sizes*, and all but the data: two arrays."""
    heads: list[int] = []
    others: list[int] = []
    for row in map(tuple, sizes.tolist()):
        archive = described_archive(dtype, row)
        heads.append(len(archive.head))
        others.append(len(archive.head) + len(archive.tail))
    return np.array(heads, np.int64), np.array(others, np.int64)


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
    """The slices of a table. The slices of tensor n have the indices ``bounds[n] .. bounds[n + 1]``, in the order of
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
    """Read all slices of a table with tensors in files of one rank each.

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
