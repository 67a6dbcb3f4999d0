"""The positions of all slices of all ranks in files that the ranks write together. Pure.

From the shapes, dtypes and slices of all ranks, each rank computes the same files (header bytes, position of every
key), so that each can write its slices at their final offsets without communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.export.plan import (
    MAX_FILE_BYTES,
    OutputFile,
    numbered_file,
    plan_files,
)
from automodel_ckpt.checkpoint.slices import Box, Slice, Tensor, flat_index, is_one_run, nbytes_of
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps

_UNLIMITED = 2**63


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a tensor in the files: under *key*, in *dtype*, from byte *start* of *file*.

    *file* is relative to the checkpoint. A *copy* is an additional position of a tensor.
    """

    key: str
    dtype: str
    file: str
    start: int
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The files of a *directory*, and the positions of each stored tensor, by its FQN.

    *interleaved* names the tensors with a slice that is not one contiguous byte range of the whole tensor. *warnings*
    are for the user.
    """

    directory: str
    files: tuple[OutputFile, ...]
    places: Mapping[str, tuple[Place, ...]]
    interleaved: frozenset[str]
    warnings: tuple[str, ...] = ()

    def entry(self, tensor: Tensor, box: Box, place: Place) -> Tensor:
        """The manifest entry of the slice *box* of *tensor* at *place*, without digest."""
        start, interleaved = place.start, tensor.fqn in self.interleaved
        if not interleaved:
            start += (
                flat_index(box.offsets, tensor.shape) * DTYPE_BITS[place.dtype] // 8
                if box.numel
                else 0
            )
        name = place.key if place.copy else tensor.fqn
        nbytes = nbytes_of(place.dtype, box.sizes)
        piece = Slice(
            name, place.dtype, box.offsets, box.sizes, place.file, start, nbytes, None, interleaved
        )
        return Tensor(name, place.dtype, tensor.shape, (piece,))


def place(
    tensors: Mapping[str, Tensor],
    directory: str,
    *,
    tied: Mapping[str, str] | None = None,
    maps: BaseMaps | None = None,
    keys: Mapping[str, str] | None = None,
    one_file: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Placement:
    """The placement of all ranks' *tensors* (their slices' files and starts do not count).

    *tied* and *maps* decide names, tying, dtypes and split as in an export (:func:`plan_files`); without maps each
    tensor keeps its name and dtype. *keys* renames, FQN to key in the file. *one_file* puts everything in a file of
    that name. Raises :class:`CheckpointUnusable` where names or shapes are not those of the base, ValueError where two
    tensors would have one key.
    """
    renamed = {(keys or {}).get(fqn, fqn): tensor for fqn, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        raise ValueError(f"{len(tensors)} tensors would have {len(renamed)} keys in {directory!r}")
    files, warnings = plan_files(
        renamed,
        tied or {},
        maps or BaseMaps(),
        max_file_bytes=_UNLIMITED if one_file else max_file_bytes,
        where=directory,
        file_name=numbered_file if one_file is None else lambda _number, _count: one_file,
    )
    cut = frozenset(
        t.fqn for t in tensors.values() if not all(is_one_run(p.box, t.shape) for p in t.slices)
    )
    return Placement(directory, files, _places(files, directory, keys or {}), cut, warnings)


def _places(
    files: tuple[OutputFile, ...], directory: str, keys: Mapping[str, str]
) -> dict[str, tuple[Place, ...]]:
    places: dict[str, list[Place]] = {}
    for file in files:
        for tensor, start in file.placed():
            found = Place(tensor.fqn, tensor.dtype, f"{directory}/{file.name}", start)
            places.setdefault(tensor.stored.fqn, []).append(found)
    return {fqn: _ordered(keys.get(fqn, fqn), found) for fqn, found in places.items()}


def _ordered(own: str, found: list[Place]) -> tuple[Place, ...]:
    """The positions with that of the tensor's own key first; the others are marked as copies."""
    first, *others = sorted(found, key=lambda place: place.key != own)
    return (first, *(Place(p.key, p.dtype, p.file, p.start, True) for p in others))
