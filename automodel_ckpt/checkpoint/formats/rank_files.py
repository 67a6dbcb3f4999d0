"""The files of a rank's share of a tree, in three formats. Each plans jobs from an assigned plan (``planning.py``).

``safetensors``: each rank's slices as ordinary tensors in that rank's files, in PyTorch's layout for shards. PyTorch's
``HuggingFaceStorageReader`` and NeMo AutoModel's offline tool read these files: the header's metadata holds
``DCP_SHARDING_INFO`` (per tensor its ``saved_offsets``; here also the ``global_shape``, which theirs lack) and
``DCP_VERSION`` (source: torch/distributed/checkpoint/_hf_utils.py). Bodies begin at a multiple of 4096 bytes.

``torch_save``: PyTorch DCP's own format, ``__{rank}_0.distcp`` files and a ``.metadata`` that torch's
``FileSystemReader`` reads. We write it ourselves, because torch's writer fsyncs ``.metadata`` before it is flushed,
keeps no digests, and publishes in place. Each item of a ``.distcp`` file is one ``torch.save`` archive: a zip. Its
record ``data/0`` holds the tensor's raw bytes, uncompressed. Their position is in the manifest, so that our own reader
needs neither the archive nor the pickle in ``.metadata``.

``hf`` (the layouts hf and adapter): Hugging Face files that all ranks write together, each rank its slices. From the
shapes, dtypes and slices of all ranks, each rank computes the same files (header bytes, position of every key), so that
each can write its slices at their final offsets without communication.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from automodel_ckpt.checkpoint.export.plan import BaseMaps, make_plan
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safetensors_header import shard_header
from automodel_ckpt.checkpoint.files.type_aliases import Shape, Texts
from automodel_ckpt.checkpoint.formats.planning import (
    TreeLayout,
    TreePlan,
    located,
    ordered,
    values_job,
)
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob, archive_chunks
from automodel_ckpt.checkpoint.parts.slices import (
    Position,
    RegularSlices,
    Sharding,
    Tensor,
    TensorDict,
    is_one_run,
    nbytes_of,
)
from automodel_ckpt.checkpoint.parts.tree import Tree
from automodel_ckpt.checkpoint.pickles.dcp_metadata import Columns, DcpLocation, DcpMetadata
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import described_archive
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.slice_table import SliceTable

# ---------------------------------------------------------------- safetensors


SAFETENSORS = "safetensors"
_TRAINED = "model"

_FileKey = tuple[int, str]
"""The number (from 1) of the base's file, and the kind of the tensors."""


@dataclass(frozen=True)
class ShardFiles:
    """How a tree is divided into files; the same on all ranks.

    *file_mapping* has the number (from 1) of the base model's file for each tensor; a rank's tensors are split into the
    same number of files. *untrained* has the kind of each tensor that does not train. Each kind is stored in
    separate files, which can be reused.
    """

    file_mapping: Mapping[str, int] = field(default_factory=dict)
    untrained: Texts = field(default_factory=dict)

    @cached_property
    def num_files(self) -> int:
        """The number of the base's files."""
        return max(self.file_mapping.values(), default=1)

    def key(self, fqn: str) -> _FileKey:
        """The file of a tensor; the last one for a tensor that the base does not have."""
        index = self.file_mapping.get(fqn, self.num_files)
        return index, self.untrained.get(fqn, _TRAINED)

    def name(self, directory: str, rank: int, key: _FileKey) -> str:
        """The file of *rank* with the tensors of *key*."""
        index, kind = key
        # The base's number, also where this rank has slices of some of its files only.
        return layout.shard_file(directory, rank, index, self.num_files, kind=kind)


def lay_out_shards(plan: TreePlan, files: ShardFiles) -> TreeLayout:
    """The order of an assigned plan's tensors in the files of each rank."""
    tensors = plan.assignment.tensors
    keys = {fqn: files.key(fqn) for fqn in tensors}
    numbers = {key: number for number, key in enumerate(sorted(set(keys.values())))}
    parts = {fqn: numbers[key] for fqn, key in keys.items()}
    by_width = sorted(tensors.values(), key=_width)
    return ordered(sorted(by_width, key=lambda tensor: parts[tensor.fqn]), parts.__getitem__)


def _width(tensor: Tensor) -> int:
    # Wider dtypes first: readers view a tensor's bytes in place, at offsets that must be multiples of its item size.
    return -DTYPE_BITS[tensor.dtype]


def shard_jobs(plan: TreePlan, rank: int, files: ShardFiles) -> Iterator[FileJob]:
    """The jobs of *rank* for a tree, which has a layout."""
    by_file: dict[_FileKey, list[Tensor]] = {}
    for tensor in plan.layout.of_rank(rank):
        by_file.setdefault(files.key(tensor.fqn), []).append(tensor)
    for key, tensors in by_file.items():
        file = files.name(plan.directory, rank, key)
        header, starts = shard_header([(each.slices[0], each.shape) for each in tensors])
        chunks = [Chunk(0, header)]
        nbytes = len(header)
        for tensor in tensors:
            entry = located(tensor, file, starts[tensor.fqn])
            chunks.append(Chunk(starts[tensor.fqn], plan.fetch(tensor), entry))
            nbytes += entry.slices[0].nbytes
        yield FileJob(file, chunks, plan.name, nbytes, reusable=key[1] != _TRAINED)
    yield from values_job(plan, rank)


# ---------------------------------------------------------------- torch_save


TORCH_SAVE = "torch_save"


def lay_out_items(plan: TreePlan) -> TreeLayout:
    """The order of an assigned plan's tensors in the files of each rank."""
    return ordered(plan.assignment.tensors.values())


def item_jobs(plan: TreePlan, rank: int) -> Iterator[FileJob]:
    """The jobs of *rank* for a tree, which has a layout."""
    file = layout.distcp_file(plan.directory, rank)
    chunks, end = plan.values(rank, file)
    for tensor in plan.layout.of_rank(rank):
        (stored,) = tensor.slices
        archive = described_archive(tensor.dtype, stored.sizes)
        entry = located(tensor, file, end + len(archive.head))
        chunks += archive_chunks(archive.head, archive.tail, plan.fetch(tensor), entry)
        end += len(archive.head) + stored.nbytes + len(archive.tail)
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
    # torch's reader looks for the files next to .metadata.
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


# ---------------------------------------------------------------- hf


HF = "hf"


def lay_out_hf(plan: TreePlan, maps: BaseMaps, tied: Texts) -> TreeLayout:
    """The files of an assigned plan. Each tensor keeps its dtype.

    *tied* and *maps*, which have no dtypes, decide names, tying and split as in an export (:func:`make_plan`). Raises
    :class:`SaveFailed` where names or shapes differ from the base.
    """
    # All ranks must get the same files and offsets, or they overwrite each other's slices. Nothing
    # here may depend on the rank or on the order of a set.
    tensors = plan.assignment.tensors
    try:
        files = make_plan(tensors, tied, maps, where=plan.directory).files
    except CheckpointUnusable as error:
        raise SaveFailed.all_of(error.problems) from error
    positions: dict[str, dict[str, Position]] = {}
    for file in files:
        for exported, start in file.placed():
            fqn = exported.stored.fqn
            where = Position(
                f"{plan.directory}/{file.name}", start, not _is_contiguous(tensors[fqn])
            )
            positions.setdefault(fqn, {})[exported.fqn] = where
    own = {}
    copies: TensorDict = {}
    copies_of = {}
    for fqn, tensor in tensors.items():
        if fqn in positions:
            # Its own key first.
            first, *others = sorted(positions[fqn], key=lambda key: key != fqn)
            own[fqn] = _positioned(tensor, fqn, positions[fqn][first])
            copies |= {key: _positioned(tensor, key, positions[fqn][key]) for key in others}
            copies_of[fqn] = tuple(others)
    return TreeLayout(own, copies, files, copies_of)


def _positioned(tensor: Tensor, name: str, position: Position) -> Tensor:
    """A tensor under *name*, stored at a position in a file that several ranks write."""
    slices = replace(_regular(tensor), fqn=name, position=position)
    return replace(tensor, fqn=name, slices=slices)


def _regular(tensor: Tensor) -> RegularSlices:
    assert isinstance(tensor.slices, RegularSlices)
    return tensor.slices


def _is_contiguous(tensor: Tensor) -> bool:
    """Whether each slice is one contiguous byte range of the whole tensor."""
    sharding = _regular(tensor).sharding
    # The first slice is the largest in every dimension. The others are shorter in dimensions that it does not contain
    # completely, which does not divide a byte range.
    return is_one_run(sharding.box(tensor.shape, (0,) * len(sharding.mesh)), tensor.shape)


def hf_jobs(plan: TreePlan, rank: int) -> Iterator[FileJob]:
    """The jobs of *rank* for a tree, which has a layout; rank 0 creates the files."""
    layout = plan.layout
    chunks: dict[str, list[Chunk]] = {}
    for tensor in layout.of_rank(rank):
        # Fetched once, however many positions it has.
        data = plan.fetch(tensor)
        copies = [layout.copies[key] for key in layout.copies_of[tensor.fqn]]
        for target in (layout.tensors[tensor.fqn], *copies):
            stored = _regular(target).of_rank(rank)
            assert stored is not None
            entry = replace(target, slices=(stored,))
            is_copy = target.fqn != tensor.fqn
            chunks.setdefault(stored.file, []).append(
                Chunk(stored.start, data, entry, is_copy=is_copy)
            )
    for file in layout.files:
        path = f"{plan.directory}/{file.name}"
        mine = sorted(chunks.get(path, ()), key=lambda chunk: chunk.start)
        # Rank 0 writes every header, also of a file in which it has no slice.
        if rank == 0:
            mine.insert(0, Chunk(0, file.header))
        if mine:
            yield FileJob(path, mine, plan.name, file.nbytes, is_shared=True)
    yield from values_job(plan, rank)
