"""The layouts hf and adapter: Hugging Face files that all ranks write together, each rank its slices.

:mod:`automodel_ckpt.checkpoint.writing.placement` computes the files from all ranks' plans, equally on every rank.
This module plans which bytes a rank writes to which position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.formats.planning import DTYPE_CODES, TreePlan
from automodel_ckpt.checkpoint.formats.safetensors import values_job
from automodel_ckpt.checkpoint.slices import Box, Slice, Tensor, nbytes_of
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.checkpoint.sources.opening import FINISHED
from automodel_ckpt.checkpoint.writing.jobs import Job
from automodel_ckpt.checkpoint.writing.placement import Placement, place
from automodel_ckpt.checkpoint.writing.shared_files import SharedFileChunk, SharedFileJob
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed

NAME = FINISHED


@dataclass(frozen=True, slots=True)
class Naming:
    """How files that the ranks write together are named and split; rank 0's values are sent to all ranks.

    The fields are arguments of :func:`~automodel_ckpt.checkpoint.writing.placement.place`.
    """

    maps: BaseMaps = field(default_factory=BaseMaps)
    tied: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] | None = None
    one_file: str | None = None


def all_tensors(plan: TreePlan) -> dict[str, Tensor]:
    """The tensors of a global plan with the slices of all ranks, not yet in a file."""
    tensors = {}
    for fqn, stored in plan.metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            dtype = DTYPE_CODES[stored.properties.dtype]
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
            slices = (
                Slice(fqn, dtype, b.offsets, b.sizes, "", 0, nbytes_of(dtype, b.sizes))
                for b in boxes
            )
            tensors[fqn] = Tensor(fqn, dtype, tuple(stored.size), tuple(slices))
    return tensors


def placement_of(plan: TreePlan, directory: str, naming: Naming) -> Placement:
    """The files of a global plan in *directory*. Raises :class:`SaveFailed` where they do not match the base."""
    try:
        return place(
            all_tensors(plan),
            directory,
            tied=naming.tied,
            maps=naming.maps,
            keys=naming.keys,
            one_file=naming.one_file,
        )
    except CheckpointUnusable as error:
        raise SaveFailed.all_of(error.problems) from error


def plan_jobs(plan: TreePlan, rank: int, placement: Placement) -> Iterator[Job]:
    """The jobs of *rank* for a tree with a fixed placement; rank 0 creates the files."""
    yield from shared_file_jobs(plan, rank, placement)
    yield from values_job(plan, layout.objects_file(plan.directory, rank))


def shared_file_jobs(plan: TreePlan, rank: int, placement: Placement) -> Iterator[SharedFileJob]:
    """The jobs of *rank* for the tensors of a tree. A tensor's data is fetched once, however many positions it has."""
    pieces: dict[str, list[SharedFileChunk]] = {
        f"{placement.directory}/{file.name}": [] for file in placement.files
    }
    for share in plan.tensors():
        tensor = Tensor(share.fqn, share.dtype, share.shape, ())
        box = Box(share.offsets, share.sizes)
        data = plan.fetching(share)
        for where in placement.places.get(share.fqn, ()):
            entry = placement.entry(tensor, box, where)
            pieces[where.file].append(SharedFileChunk(entry, data, share.dtype, where.copy))
    for file in placement.files:
        path = f"{placement.directory}/{file.name}"
        # Rank 0 writes every header, also of a file in which it has no slice.
        header = file.header if rank == 0 else None
        if pieces[path] or header is not None:
            ordered = sorted(pieces[path], key=lambda piece: piece.entry.slices[0].start)
            yield SharedFileJob(path, file.nbytes, ordered, plan.name, header)
