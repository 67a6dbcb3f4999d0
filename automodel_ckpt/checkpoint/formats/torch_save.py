"""PyTorch DCP's own format: ``__{rank}_0.distcp`` files and a ``.metadata`` that torch's ``FileSystemReader`` reads.

We write it ourselves, because torch's writer fsyncs ``.metadata`` before it is flushed, keeps no digests, and publishes
in place. Each item of a ``.distcp`` file is one ``torch.save`` archive: a zip whose record ``data/0`` holds the
tensor's raw bytes, uncompressed. Their position is in the manifest, so that our own reader needs neither the archive
nor the pickle in ``.metadata``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.formats.planning import TreePlan, located
from automodel_ckpt.checkpoint.formats.tree_layout import TreeLayout, ordered
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.parts.manifest import Blob, Tree
from automodel_ckpt.checkpoint.parts.sharding import RegularSlices
from automodel_ckpt.checkpoint.parts.slice_columns import BoxesOf, columns_of
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.pickles.dcp_metadata import (
    DcpChunk,
    DcpLocation,
    DcpMetadata,
    Extents,
    Items,
)
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import described_archive

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
    """The chunks of a tensor whose slices are listed."""
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
    """The chunks of the regular tensors of a *tree*, whose slices are read from its table as arrays."""

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
