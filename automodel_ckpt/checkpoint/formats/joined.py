"""Safetensors files that the ranks of a node write together (``checkpoint.files_per_node``).

A safetensors file has one entry for each tensor name. So the slices that its ranks have of a tensor must be consecutive
parts of one box, as those of ``fully_shard`` are: the file has this box, and each rank writes its bytes. Where the
slices of a node make up several such boxes (tensor parallelism on the node), each box is in another file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.parts.sharding import RegularSlices
from automodel_ckpt.checkpoint.parts.slices import Box, Tensor, flat_index, nbytes_of
from automodel_ckpt.checkpoint.sources.shard_header import Entry, shard_header


@dataclass(frozen=True, slots=True)
class JoinedSlice:
    """A *box* that consists of the slices of *ranks*, each of which is one byte range of it, and the byte of the file
    where it begins."""

    box: Box
    ranks: frozenset[int]
    start: int = 0


@dataclass(frozen=True, slots=True)
class JoinedFile:
    """A file of several ranks: its *header*, its size in bytes, and its slices by the names of their tensors."""

    header: bytes
    nbytes: int
    slices: dict[str, JoinedSlice]

    def start_of(self, tensor: Tensor, rank: int) -> int | None:
        """The byte where the one slice of *tensor*, which *rank* has, begins; None if it is not in this file."""
        joined = self.slices.get(tensor.fqn)
        if joined is None or rank not in joined.ranks:
            return None
        (stored,) = tensor.slices
        if stored.nbytes == 0:
            return joined.start
        within = [
            own - first for own, first in zip(stored.offsets, joined.box.offsets, strict=True)
        ]
        return joined.start + flat_index(within, joined.box.sizes) * DTYPE_BITS[tensor.dtype] // 8


def joined_files(tensors: Sequence[Tensor], group: Sequence[int]) -> list[JoinedFile]:
    """The files in which the ranks of a *group* store their slices of regular *tensors*, in this order.

    There are as many files as a tensor has joined slices, at most, and not more than ranks.
    """
    of_file: list[list[tuple[Tensor, JoinedSlice]]] = []
    for tensor in tensors:
        for number, joined in enumerate(joined_slices(tensor, group)):
            if number == len(of_file):
                of_file.append([])
            of_file[number].append((tensor, joined))
    return [_file_of(pairs) for pairs in of_file]


def _file_of(pairs: Sequence[tuple[Tensor, JoinedSlice]]) -> JoinedFile:
    entries: list[Entry] = []
    nbytes = 0
    for tensor, joined in pairs:
        box = joined.box
        entries.append((tensor.fqn, tensor.dtype, box.offsets, box.sizes, tensor.shape))
        nbytes += nbytes_of(tensor.dtype, box.sizes)
    header, starts = shard_header(entries)
    slices: dict[str, JoinedSlice] = {}
    for tensor, joined in pairs:
        slices[tensor.fqn] = JoinedSlice(joined.box, joined.ranks, starts[tensor.fqn])
    return JoinedFile(header, len(header) + nbytes, slices)


def joined_slices(tensor: Tensor, group: Sequence[int]) -> list[JoinedSlice]:
    """Join the slices of a regular *tensor* that the ranks of a *group* have, as far as possible.

    The result is sorted by the first of their ranks, so that similar tensors are divided among files in the same way.
    """
    assert isinstance(tensor.slices, RegularSlices)
    # Row-major boxes are joined along the first dimension: others have no consecutive bytes.
    dim = next((dim for dim, extent in enumerate(tensor.shape) if extent > 1), 0)
    aligned: dict[Box, list[tuple[Box, int]]] = {}
    for rank in group:
        box = tensor.slices.box_of_rank(rank)
        if box is not None:
            aligned.setdefault(_without(box, dim), []).append((box, rank))
    found: list[JoinedSlice] = []
    for pairs in aligned.values():
        pairs.sort(key=lambda pair: pair[0].offsets)
        joined, ranks = pairs[0][0], [pairs[0][1]]
        for box, rank in pairs[1:]:
            if joined.offsets[dim] + joined.sizes[dim] == box.offsets[dim]:
                joined = _with_size(joined, dim, joined.sizes[dim] + box.sizes[dim])
                ranks.append(rank)
                continue
            found.append(JoinedSlice(joined, frozenset(ranks)))
            joined, ranks = box, [rank]
        found.append(JoinedSlice(joined, frozenset(ranks)))
    return sorted(found, key=lambda joined: min(joined.ranks))


def _without(box: Box, dim: int) -> Box:
    """The box without one dimension."""
    rest = slice(dim + 1, None)
    return Box(
        (*box.offsets[:dim], *box.offsets[rest]),
        (*box.sizes[:dim], *box.sizes[rest]),
    )


def _with_size(box: Box, dim: int, size: int) -> Box:
    return Box(box.offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))
