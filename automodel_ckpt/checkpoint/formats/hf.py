"""The layouts hf and adapter: Hugging Face files that all ranks write together, each rank its slices.

From the shapes, dtypes and slices of all ranks, each rank computes the same files (header bytes, position of every
key), so that each can write its slices at their final offsets without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from automodel_ckpt.checkpoint.export.plan import BaseMaps, OutputFile, make_plan
from automodel_ckpt.checkpoint.files.type_aliases import Texts
from automodel_ckpt.checkpoint.formats.planning import TreeLayout, TreePlan, values_job
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.parts.sharding import Position, RegularSlices
from automodel_ckpt.checkpoint.parts.slices import Tensor, TensorDict, is_one_run
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed

NAME = "hf"


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The files of a *directory*, and all tensors and their copies at their positions in the files.

    *copies_of* has the names of a tensor's copies, by its FQN.
    """

    directory: str
    files: tuple[OutputFile, ...]
    tree: TreeLayout
    copies_of: Mapping[str, tuple[str, ...]]


def lay_out(plan: TreePlan, directory: str, maps: BaseMaps, tied: Texts) -> FileLayout:
    """The files of an assigned plan in *directory*. Each tensor keeps its dtype.

    *tied* and *maps*, which have no dtypes, decide names, tying and split as in an export (:func:`make_plan`). Raises
    :class:`SaveFailed` where names or shapes differ from the base.
    """
    # All ranks must get the same files and offsets, or they overwrite each other's slices. Nothing
    # here may depend on the rank or on the order of a set.
    tensors = plan.assignment.tensors
    try:
        files = make_plan(tensors, tied, maps, where=directory).files
    except CheckpointUnusable as error:
        raise SaveFailed.all_of(error.problems) from error
    positions: dict[str, dict[str, Position]] = {}
    for file in files:
        for exported, start in file.placed():
            fqn = exported.stored.fqn
            where = Position(f"{directory}/{file.name}", start, not _is_contiguous(tensors[fqn]))
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
    return FileLayout(directory, files, TreeLayout(own, copies), copies_of)


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


def plan_jobs(plan: TreePlan, rank: int, file_layout: FileLayout) -> Iterator[FileJob]:
    """The jobs of *rank* for a tree; rank 0 creates the files."""
    chunks: dict[str, list[Chunk]] = {}
    for tensor in file_layout.tree.of_rank(rank):
        # Fetched once, however many positions it has.
        data = plan.fetch(tensor)
        copies = [file_layout.tree.copies[key] for key in file_layout.copies_of[tensor.fqn]]
        for target in (file_layout.tree.tensors[tensor.fqn], *copies):
            stored = _regular(target).of_rank(rank)
            assert stored is not None
            entry = replace(target, slices=(stored,))
            is_copy = target.fqn != tensor.fqn
            chunks.setdefault(stored.file, []).append(
                Chunk(stored.start, data, entry, is_copy=is_copy)
            )
    for file in file_layout.files:
        path = f"{file_layout.directory}/{file.name}"
        mine = sorted(chunks.get(path, ()), key=lambda chunk: chunk.start)
        # Rank 0 writes every header, also of a file in which it has no slice.
        if rank == 0:
            mine.insert(0, Chunk(0, file.header))
        if mine:
            yield FileJob(path, mine, plan.name, file.nbytes, is_shared=True)
    yield from values_job(plan, rank)
