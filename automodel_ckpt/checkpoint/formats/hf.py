"""The layouts hf and adapter: Hugging Face files that all ranks write together, each rank its slices.

From the shapes, dtypes and slices of all ranks, each rank computes the same files (header bytes, position of every
key), so that each can write its slices at their final offsets without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from automodel_ckpt.checkpoint.export.plan import MAX_FILE_BYTES, OutputFile, make_plan
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.formats.planning import TreePlan
from automodel_ckpt.checkpoint.formats.safetensors import values_job
from automodel_ckpt.checkpoint.formats.tree_layout import TreeLayout, positioned
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.parts.sharding import Position, RegularSlices
from automodel_ckpt.checkpoint.parts.slices import (
    Box,
    Slice,
    Tensor,
    flat_index,
    is_one_run,
    nbytes_of,
)
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.checkpoint.sources.source import FINISHED
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed

NAME = FINISHED


@dataclass(frozen=True, slots=True)
class FilePosition:
    """The position of a tensor in the files: under *key*, from byte *start* of *file*.

    *file* is relative to the checkpoint. *is_copy* marks an additional position of a tensor.
    """

    key: str
    file: str
    start: int
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The files of a *directory*, and the positions of each stored tensor, by its FQN.

    *interleaved* names the tensors with a slice that is not one contiguous byte range of the whole tensor.
    """

    directory: str
    files: tuple[OutputFile, ...]
    positions: Mapping[str, tuple[FilePosition, ...]]
    interleaved: frozenset[str]

    def tree_layout(self, tensors: Mapping[str, Tensor]) -> TreeLayout:
        """The regular *tensors* and their copies at their positions."""
        own: dict[str, Tensor] = {}
        copies: dict[str, Tensor] = {}
        for fqn, tensor in tensors.items():
            for position in self.positions.get(fqn, ()):
                name = position.key if position.is_copy else fqn
                where = Position(position.file, position.start, fqn in self.interleaved)
                target = copies if position.is_copy else own
                target[name] = positioned(tensor, name, where)
        return TreeLayout(own, copies)

    def entry(self, tensor: Tensor, box: Box, position: FilePosition) -> Tensor:
        """The manifest entry of the slice *box* of *tensor* at *position*, without digest."""
        name = position.key if position.is_copy else tensor.fqn
        is_interleaved = tensor.fqn in self.interleaved
        start = position.start
        # An interleaved slice has the start of the whole tensor (see `Slice`).
        if not is_interleaved and box.numel:
            start += flat_index(box.offsets, tensor.shape) * DTYPE_BITS[tensor.dtype] // 8
        stored = Slice(
            name,
            tensor.dtype,
            box.offsets,
            box.sizes,
            position.file,
            start,
            nbytes_of(tensor.dtype, box.sizes),
            None,
            is_interleaved,
        )
        return Tensor(name, tensor.dtype, tensor.shape, (stored,))


def lay_out_tensors(
    tensors: Mapping[str, Tensor],
    directory: str,
    *,
    tied: Mapping[str, str] | None = None,
    maps: BaseMaps | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> FileLayout:
    """The files for all ranks' *tensors*, by FQN (their slices' files and starts do not count).

    *tied* and *maps*, which have no dtypes, decide names, tying and split as in an export (:func:`make_plan`). Each
    tensor keeps its dtype.

    Raises :class:`CheckpointUnusable` where names or shapes differ from the base.
    """
    # All ranks must get the same files and offsets, or they overwrite each other's slices. Nothing
    # here may depend on the rank or on the order of a set.
    plan = make_plan(
        tensors, tied or {}, maps or BaseMaps(), max_file_bytes=max_file_bytes, where=directory
    )
    interleaved = {tensor.fqn for tensor in tensors.values() if not _is_contiguous(tensor)}
    positions = _positions(plan.files, directory)
    return FileLayout(directory, plan.files, positions, frozenset(interleaved))


def _is_contiguous(tensor: Tensor) -> bool:
    """Whether each slice is one contiguous byte range of the whole tensor."""
    if isinstance(tensor.slices, RegularSlices):
        sharding = tensor.slices.sharding
        # The first slice is the largest in every dimension. The others are shorter in dimensions
        # that it does not contain completely, which does not divide a byte range.
        first = sharding.box(tensor.shape, (0,) * len(sharding.mesh))
        return is_one_run(first, tensor.shape)
    return all(is_one_run(stored.box, tensor.shape) for stored in tensor.slices)


def _positions(
    files: tuple[OutputFile, ...], directory: str
) -> dict[str, tuple[FilePosition, ...]]:
    found: dict[str, list[FilePosition]] = {}
    for file in files:
        path = f"{directory}/{file.name}"
        for tensor, start in file.placed():
            position = FilePosition(tensor.fqn, path, start)
            found.setdefault(tensor.stored.fqn, []).append(position)
    return {fqn: _mark_copies(fqn, positions) for fqn, positions in found.items()}


def _mark_copies(fqn: str, positions: list[FilePosition]) -> tuple[FilePosition, ...]:
    """The positions, the one of the tensor's own key first; the others are marked as copies."""
    first, *others = sorted(positions, key=lambda position: position.key != fqn)
    copies = [replace(position, is_copy=True) for position in others]
    return (first, *copies)


def lay_out(plan: TreePlan, directory: str, maps: BaseMaps, tied: Mapping[str, str]) -> FileLayout:
    """The files of a partitioned plan in *directory*. The other arguments are as for :func:`lay_out_tensors`.

    Raises :class:`SaveFailed` where they do not match the base.
    """
    try:
        return lay_out_tensors(plan.assignment.tensors, directory, tied=tied, maps=maps)
    except CheckpointUnusable as error:
        raise SaveFailed.all_of(error.problems) from error


def plan_jobs(plan: TreePlan, rank: int, file_layout: FileLayout) -> Iterator[FileJob]:
    """The jobs of *rank* for a tree; rank 0 creates the files."""
    chunks: dict[str, list[Chunk]] = {}
    for tensor in plan.tensors():
        # Fetched once, however many positions it has.
        data = plan.fetch(tensor)
        (local,) = tensor.slices
        for position in file_layout.positions.get(tensor.fqn, ()):
            entry = file_layout.entry(tensor, local.box, position)
            chunk = Chunk(entry.slices[0].start, data, entry, is_copy=position.is_copy)
            chunks.setdefault(position.file, []).append(chunk)
    for file in file_layout.files:
        path = f"{file_layout.directory}/{file.name}"
        mine = sorted(chunks.get(path, ()), key=lambda chunk: chunk.start)
        # Rank 0 writes every header, also of a file in which it has no slice.
        if rank == 0:
            mine.insert(0, Chunk(0, file.header))
        if mine:
            yield FileJob(path, mine, plan.name, file.nbytes, is_shared=True)
    yield from values_job(plan, layout.objects_file(plan.directory, rank))
