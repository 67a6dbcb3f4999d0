"""The layouts hf and adapter: Hugging Face files that all ranks write together, each rank its slices.

From the shapes, dtypes and slices of all ranks, each rank computes the same files (header bytes, position of every
key), so that each can write its slices at their final offsets without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from automodel_ckpt.checkpoint.export.plan import MAX_FILE_BYTES, OutputFile, plan_files
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.formats.planning import TreePlan
from automodel_ckpt.checkpoint.formats.safetensors import values_job
from automodel_ckpt.checkpoint.formats.tree_layout import TreeLayout, positioned
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, Job, SharedFileJob
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
from automodel_ckpt.checkpoint.sources.opening import FINISHED
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed

NAME = FINISHED


@dataclass(frozen=True, slots=True)
class FilePosition:
    """The position of a tensor in the files: under *key*, in *dtype*, from byte *start* of *file*.

    *file* is relative to the checkpoint. *is_copy* marks an additional position of a tensor.
    """

    key: str
    dtype: str
    file: str
    start: int
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The files of a *directory*, and the positions of each stored tensor, by its FQN.

    *interleaved* names the tensors with a slice that is not one contiguous byte range of the whole tensor. *reusable*
    names the files, relative to the directory, with only tensors that do not train. *warnings* are for the user.
    """

    directory: str
    files: tuple[OutputFile, ...]
    positions: Mapping[str, tuple[FilePosition, ...]]
    interleaved: frozenset[str]
    warnings: tuple[str, ...] = ()
    reusable: frozenset[str] = frozenset()

    def tree_layout(self, tensors: Mapping[str, Tensor]) -> TreeLayout:
        """The regular *tensors* and their copies at their positions."""
        own: dict[str, Tensor] = {}
        copies: dict[str, Tensor] = {}
        for fqn, tensor in tensors.items():
            for position in self.positions.get(fqn, ()):
                name = position.key if position.is_copy else fqn
                where = Position(position.file, position.start, fqn in self.interleaved)
                target = copies if position.is_copy else own
                target[name] = positioned(tensor, name, position.dtype, where)
        return TreeLayout(own, copies)

    def entry(self, tensor: Tensor, box: Box, position: FilePosition) -> Tensor:
        """The manifest entry of the slice *box* of *tensor* at *position*, without digest."""
        name = position.key if position.is_copy else tensor.fqn
        dtype = position.dtype
        is_interleaved = tensor.fqn in self.interleaved
        start = position.start
        # An interleaved slice has the start of the whole tensor (see `Slice`).
        if not is_interleaved and box.numel:
            start += flat_index(box.offsets, tensor.shape) * DTYPE_BITS[dtype] // 8
        stored = Slice(
            name,
            dtype,
            box.offsets,
            box.sizes,
            position.file,
            start,
            nbytes_of(dtype, box.sizes),
            None,
            is_interleaved,
        )
        return Tensor(name, dtype, tensor.shape, (stored,))


def lay_out_tensors(
    tensors: Mapping[str, Tensor],
    directory: str,
    *,
    tied: Mapping[str, str] | None = None,
    maps: BaseMaps | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    untrained: Mapping[str, str] | None = None,
) -> FileLayout:
    """The files for all ranks' *tensors*, by FQN (their slices' files and starts do not count).

    *tied* and *maps* decide names, tying, dtypes and split as in an export (:func:`plan_files`); without maps each
    tensor keeps its name and dtype. *untrained* has the kind of each tensor that does not train;
    those of each kind are stored in separate files.

    Raises :class:`CheckpointUnusable` where names or shapes are not those of the base.
    """
    # All ranks must get the same files and offsets, or they overwrite each other's slices. Nothing
    # here may depend on the rank or on the order of a set.
    files, warnings = plan_files(
        tensors,
        tied or {},
        maps or BaseMaps(),
        max_file_bytes=max_file_bytes,
        where=directory,
        kinds=untrained,
    )
    reusable: set[str] = set()
    for file in files:
        # All tensors of a file have the same kind.
        if file.tensors and file.tensors[0].stored.fqn in (untrained or {}):
            reusable.add(file.name)
    interleaved = {tensor.fqn for tensor in tensors.values() if not _is_contiguous(tensor)}
    positions = _positions(files, directory)
    return FileLayout(
        directory, files, positions, frozenset(interleaved), warnings, frozenset(reusable)
    )


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
            position = FilePosition(tensor.fqn, tensor.dtype, path, start)
            found.setdefault(tensor.stored.fqn, []).append(position)
    return {fqn: _mark_copies(fqn, positions) for fqn, positions in found.items()}


def _mark_copies(fqn: str, positions: list[FilePosition]) -> tuple[FilePosition, ...]:
    """The positions, first that of the tensor's own key; the others are marked as copies."""
    first, *others = sorted(positions, key=lambda position: position.key != fqn)
    copies = [replace(position, is_copy=True) for position in others]
    return (first, *copies)


def lay_out(
    plan: TreePlan,
    directory: str,
    maps: BaseMaps,
    tied: Mapping[str, str],
    untrained: Mapping[str, str] | None = None,
) -> FileLayout:
    """The files of a partitioned plan in *directory*. The arguments are those of :func:`lay_out_tensors`.

    Raises :class:`SaveFailed` where they do not match the base.
    """
    try:
        return lay_out_tensors(
            plan.all_tensors(), directory, tied=tied, maps=maps, untrained=untrained
        )
    except CheckpointUnusable as error:
        raise SaveFailed.all_of(error.problems) from error


def plan_jobs(plan: TreePlan, rank: int, file_layout: FileLayout) -> Iterator[Job]:
    """The jobs of *rank* for a tree; rank 0 creates the files."""
    yield from shared_file_jobs(plan, rank, file_layout)
    yield from values_job(plan, layout.objects_file(plan.directory, rank))


def shared_file_jobs(plan: TreePlan, rank: int, file_layout: FileLayout) -> Iterator[SharedFileJob]:
    """The jobs of *rank* for the tensors of a tree. A tensor's data is fetched once, however many positions it has."""
    chunks: dict[str, list[Chunk]] = {}
    for tensor in plan.tensors():
        data = plan.fetch(tensor)
        (local,) = tensor.slices
        for position in file_layout.positions.get(tensor.fqn, ()):
            entry = file_layout.entry(tensor, local.box, position)
            chunk = Chunk(
                entry.slices[0].start,
                data,
                entry,
                dtype=tensor.dtype,
                is_copy=position.is_copy,
            )
            chunks.setdefault(position.file, []).append(chunk)
    for file in file_layout.files:
        path = f"{file_layout.directory}/{file.name}"
        mine = sorted(chunks.get(path, ()), key=lambda chunk: chunk.start)
        # Rank 0 writes every header, also of a file in which it has no slice.
        header = file.header if rank == 0 else None
        if mine or header is not None:
            is_reusable = file.name in file_layout.reusable
            yield SharedFileJob(path, file.nbytes, mine, plan.name, header, is_reusable)
