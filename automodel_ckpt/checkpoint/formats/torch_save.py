"""PyTorch DCP's own format: ``__{rank}_0.distcp`` files and a ``.metadata`` that torch's ``FileSystemReader`` reads.

We write it ourselves, because torch's writer fsyncs ``.metadata`` before it is flushed, keeps no digests, and publishes
in place. Each item of a ``.distcp`` file is one ``torch.save`` archive: a zip. Its record ``data/0`` holds the
tensor's raw bytes, uncompressed. Their position is in the manifest, so that our own reader needs neither the archive
nor the pickle in ``.metadata``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.formats.planning import TreeLayout, TreePlan, located, ordered
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.parts.sharding import RegularSlices, Sharding
from automodel_ckpt.checkpoint.parts.slices import Box
from automodel_ckpt.checkpoint.parts.tree import Blob, Tree
from automodel_ckpt.checkpoint.pickles.dcp_metadata import Columns, DcpLocation, DcpMetadata
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
    boxes_of = functools.cache(_stored_boxes)
    # The bytes before the data in the archives of a tensor's slices, and all but the data.
    added_bytes = functools.cache(partial(_added_bytes, boxes_of))
    table = tree.table
    bounds, files, starts, nbytes = ([0], *[[]] * 3) if table is None else _rows_of(table, boxes_of)
    if table is not None:
        # torch's reader looks for the files beside .metadata.
        names = [metadata.file_number(os.path.basename(file)) for file in table.files]
        files = np.array(names, np.int64)[files]
    for fqn, tensor in tree.tensors.items():
        slices = tensor.slices
        assert isinstance(slices, RegularSlices)
        boxes = boxes_of(slices.sharding, slices.shape)
        heads, others = added_bytes(slices.sharding, slices.shape, slices.dtype)
        here = slice(bounds[slices.number], bounds[slices.number + 1])
        items = files[here], starts[here] - heads, nbytes[here] + others
        columns = Columns(boxes.offsets, boxes.sizes, *items)
        metadata.add_columns(plan.paths.get(fqn, (fqn,)), tensor.dtype, tensor.shape, columns)
    for fqn, blob in tree.objects.items():
        location = DcpLocation(os.path.basename(blob.file), blob.start, blob.nbytes)
        metadata.add_value(plan.paths.get(fqn, (fqn,)), location)
    return metadata.to_bytes()


class _Boxes(NamedTuple):
    """The stored boxes of a tensor, in the order of the coordinates of its mesh: arrays of the distances of their ranks
    from the first one, of the positions of their first elements, and of their shapes."""

    ranks: Any
    offsets: Any
    sizes: Any


def _stored_boxes(sharding: Sharding, shape: tuple[int, ...]) -> _Boxes:
    ranks: list[int] = []
    boxes: list[Box] = []
    for coordinate in sharding.coordinates():
        box = sharding.box(shape, coordinate)
        # An empty part of a tensor that is partitioned is not stored.
        if not (sharding.split and 0 in box.sizes):
            ranks.append(sharding.offset(coordinate))
            boxes.append(box)
    form = (len(boxes), len(shape))
    offsets = np.array([box.offsets for box in boxes], np.int64).reshape(form)
    sizes = np.array([box.sizes for box in boxes], np.int64).reshape(form)
    return _Boxes(np.array(ranks, np.int64), offsets, sizes)


def _added_bytes(
    boxes_of: Callable[[Sharding, tuple[int, ...]], _Boxes],
    sharding: Sharding,
    shape: tuple[int, ...],
    dtype: str,
) -> tuple[Any, Any]:
    sizes = boxes_of(sharding, shape).sizes
    archives = [described_archive(dtype, tuple(row)) for row in sizes.tolist()]
    heads = np.array([len(archive.head) for archive in archives], np.int64)
    return heads, heads + np.array([len(archive.tail) for archive in archives], np.int64)


def _rows_of(
    table: SliceTable, boxes_of: Callable[[Sharding, tuple[int, ...]], _Boxes]
) -> tuple[Any, Any, Any, Any]:
    """Read all slices of a table with tensors in files of one rank each: (bounds, files, starts, nbytes).

    The slices of tensor n have the indices ``bounds[n] .. bounds[n + 1]``, in the order of their coordinates. *files*
    are indices into the files of the table. Raises :class:`CheckpointUnusable` if a rank has other slices than its
    tensors.
    """
    boxes = [boxes_of(tensor.sharding, tensor.shape) for tensor in table.tensors]
    bounds = np.cumsum([0, *(len(each.ranks) for each in boxes)])
    pairs = list(zip(table.tensors, boxes, strict=True))
    ranks = np.concatenate([box.ranks + tensor.first for tensor, box in pairs])
    nbytes = np.concatenate(
        [box.sizes.prod(axis=1) * DTYPE_BITS[tensor.dtype] // 8 for tensor, box in pairs]
    )
    parts = np.repeat([tensor.part for tensor in table.tensors], np.diff(bounds))
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
    return bounds, files, starts, nbytes
