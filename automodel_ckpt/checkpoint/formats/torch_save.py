"""PyTorch DCP's own format: ``__{rank}_0.distcp`` files and a ``.metadata`` that torch's ``FileSystemReader`` reads.

We write it ourselves, because torch's writer fsyncs ``.metadata`` before it is flushed, keeps no digests, and publishes
in place. Each item of a ``.distcp`` file is one ``torch.save`` archive: a zip. Its record ``data/0`` holds the
tensor's raw bytes, uncompressed. Their position is in the manifest, so that our own reader needs neither the archive
nor the pickle in ``.metadata``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Shape
from automodel_ckpt.checkpoint.formats.planning import TreeLayout, TreePlan, located, ordered
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.parts.sharding import Sharding
from automodel_ckpt.checkpoint.parts.slices import nbytes_of
from automodel_ckpt.checkpoint.parts.tree import Blob, Tree
from automodel_ckpt.checkpoint.pickles.dcp_metadata import Columns, DcpLocation, DcpMetadata
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import described_archive

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.slice_table import SliceTable


NAME = "torch_save"


def lay_out(plan: TreePlan) -> TreeLayout:
    """The order of an assigned plan's tensors in the files of each rank."""
    return ordered(plan.assignment.tensors.values())


def plan_jobs(plan: TreePlan, rank: int, tree_layout: TreeLayout) -> Iterator[FileJob]:
    """The jobs of *rank* for a tree, which has this layout."""
    file = layout.distcp_file(plan.directory, rank)
    chunks = []
    end = 0
    for fqn, data in plan.values(rank):
        chunks.append(Chunk(end, data, Blob(fqn, file, end, len(data), "")))
        end += len(data)
    for tensor in tree_layout.of_rank(rank):
        (stored,) = tensor.slices
        archive = described_archive(tensor.dtype, stored.sizes)
        # Head, data, tail: an archive of torch.save around the tensor's raw bytes.
        data_start = end + len(archive.head)
        tail_start = data_start + stored.nbytes
        entry = located(tensor, file, data_start)
        chunks.append(Chunk(end, archive.head))
        chunks.append(Chunk(data_start, plan.fetch(tensor), entry))
        chunks.append(Chunk(tail_start, archive.tail))
        end = tail_start + len(archive.tail)
    yield FileJob(file, chunks, plan.name, end)


def metadata_of(plan: TreePlan, tree: Tree) -> bytes:
    """A tree's ``.metadata`` for torch's reader. *tree* has the records of all slices in its table.

    Raises :class:`CheckpointUnusable` if a rank has other slices than its tensors.
    """
    metadata = DcpMetadata()
    if tree.table is not None:
        _add_tensors(metadata, plan, tree.table)
    for fqn, blob in tree.objects.items():
        location = DcpLocation(os.path.basename(blob.file), blob.start, blob.nbytes)
        metadata.add_value(plan.paths.get(fqn, (fqn,)), location)
    return metadata.to_bytes()


class _Items(NamedTuple):
    """The stored slices of a tensor, in the order of the coordinates of its mesh, as arrays.

    They are the distances of their ranks from the first one, the positions of their first elements, their shapes, their
    bytes, and the bytes of their archives before the data and without the data.
    """

    ranks: Any
    offsets: Any
    sizes: Any
    nbytes: Any
    head_bytes: Any
    added_bytes: Any


def _items_of(sharding: Sharding, shape: Shape, dtype: str) -> _Items:
    ranks = []
    boxes = []
    for coordinate in sharding.coordinates():
        box = sharding.box(shape, coordinate)
        # An empty part of a tensor that is partitioned is not stored.
        if not (sharding.split and 0 in box.sizes):
            ranks.append(sharding.offset(coordinate))
            boxes.append(box)
    archives = [described_archive(dtype, box.sizes) for box in boxes]
    form = (len(boxes), len(shape))
    head_bytes = np.array([len(archive.head) for archive in archives], np.int64)
    return _Items(
        np.array(ranks, np.int64),
        np.array([box.offsets for box in boxes], np.int64).reshape(form),
        np.array([box.sizes for box in boxes], np.int64).reshape(form),
        np.array([nbytes_of(dtype, box.sizes) for box in boxes], np.int64),
        head_bytes,
        head_bytes + np.array([len(archive.tail) for archive in archives], np.int64),
    )


def _add_tensors(metadata: DcpMetadata, plan: TreePlan, table: SliceTable) -> None:
    """Add the tensors of a *table*. A rank stores all its slices in one file, in the order of the tensors.

    All slices are read together as arrays: there can be millions.
    """
    items_of = functools.cache(_items_of)
    items = [items_of(tensor.sharding, tensor.shape, tensor.dtype) for tensor in table.tensors]
    ranks = np.concatenate(
        [
            of_tensor.ranks + tensor.first
            for tensor, of_tensor in zip(table.tensors, items, strict=True)
        ]
    )
    segments = table.segments
    segment_of = np.repeat(np.arange(len(segments)), segments["rows"])
    order = np.argsort(ranks, kind="stable")
    if not np.array_equal(ranks[order], segments["rank"][segment_of]):
        raise table.damaged("a rank stored other slices than planned")
    nbytes = np.concatenate([of_tensor.nbytes for of_tensor in items])[order]
    starts = np.cumsum(table.all_rows()["gap"] + nbytes) - nbytes
    # The first row of each segment begins where the segment does.
    first_rows = np.cumsum(segments["rows"]) - segments["rows"]
    starts += (segments["start"].astype(np.int64) - starts[first_rows])[segment_of]
    # torch's reader looks for the files beside .metadata.
    names = [metadata.file_number(os.path.basename(file)) for file in table.files]
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    files = np.array(names, np.int64)[segments["file"][segment_of]][place_of]
    starts = starts[place_of]
    end = 0
    for tensor, of_tensor in zip(table.tensors, items, strict=True):
        begin, end = end, end + len(of_tensor.ranks)
        columns = Columns(
            of_tensor.offsets,
            of_tensor.sizes,
            files[begin:end],
            starts[begin:end] - of_tensor.head_bytes,
            of_tensor.nbytes + of_tensor.added_bytes,
        )
        path = plan.paths.get(tensor.fqn, (tensor.fqn,))
        metadata.add_columns(path, tensor.dtype, tensor.shape, columns)
