"""Assign the slices of a tree to ranks: each rank computes the same assignment from the same shares.

Where several ranks have the same slice, one of them writes it. Slices are distributed so that the ranks write about the
same number of bytes. The work grows with the number of tensors, not with the number of slices. Imports no torch.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts
from automodel_ckpt.checkpoint.parts.sharding import RegularSlices, Sharding, smallest_split
from automodel_ckpt.checkpoint.parts.slices import Tensor, TensorMap, nbytes_of
from automodel_ckpt.errors import SaveFailed

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.formats.description import Described, Mesh, TreeDescription

_Family = tuple[tuple[int, ...], "Mesh | None", Any]
"""Tensors with the same replicas: numbers of the shares that have them, their mesh, and how it partitions them."""


@dataclass(frozen=True, slots=True)
class Share:
    """What some *ranks* with the same *description* have of a tree.

    *origins* has, for each of the ranks, the first rank of each of its device meshes.
    """

    description: TreeDescription
    ranks: Sequence[int]
    origins: Sequence[Mapping[Mesh, int]]


@dataclass(frozen=True, slots=True)
class Assignment:
    """All tensors of a tree, with the slices of all ranks (without files), and the rank that writes each of its values.

    *paths* and *kinds* are from all descriptions.
    """

    tensors: TensorMap = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    paths: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    kinds: Texts = field(default_factory=dict)


def assign(name: str, shares: Sequence[Share]) -> Assignment:
    """Assign the slices of the tree *name*. Raises :class:`SaveFailed` where the shares do not match."""
    families: dict[_Family, list[str]] = {}
    described = {}
    values: dict[str, int] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    kinds: TextDict = {}
    for number, share in enumerate(shares):
        paths |= share.description.paths
        kinds |= share.description.kinds
        for fqn, tensor in share.description.tensors.items():
            if fqn not in described:
                described[fqn] = tensor
                family = _family_of(name, shares, fqn, number)
                families.setdefault(family, []).append(fqn)
        for fqn in share.description.values:
            # Writing one takes microseconds: they are not distributed.
            values.setdefault(fqn, share.ranks[0])
    for fqn, rank in values.items():
        if fqn in described:
            others = (each.ranks[0] for each in shares if fqn in each.description.tensors)
            raise _mismatch(name, fqn, "a tensor", next(others), "another value", rank)
    writers = {}
    for family, names in families.items():
        # Once for all tensors of a family, because this visits all ranks.
        sharding, replicas = _replicas(name, shares, *family)
        for fqn, first in _balanced(names, described, sharding, replicas, kinds):
            writers[fqn] = sharding, first
    tensors = {}
    for fqn, tensor in described.items():
        slices = RegularSlices(fqn, tensor.dtype, tensor.shape, *writers[fqn])
        tensors[fqn] = Tensor(fqn, tensor.dtype, tensor.shape, slices)
    return Assignment(tensors, values, paths, kinds)


def _family_of(tree: str, shares: Sequence[Share], fqn: str, first: int) -> _Family:
    """The family of a tensor, which the share *first* has, and none before it."""
    tensor = shares[first].description.tensors[fqn]
    numbers = [first]
    for number in range(first + 1, len(shares)):
        other = shares[number].description.tensors.get(fqn)
        if other is None:
            continue
        if other[:2] != tensor[:2]:
            texts = [f"{each.dtype} {list(each.shape)}" for each in (tensor, other)]
            ranks = shares[first].ranks[0], shares[number].ranks[0]
            raise _mismatch(tree, fqn, texts[0], ranks[0], texts[1], ranks[1])
        # Another sharding of the same tensor is a further copy of it, which is not used.
        if other == tensor:
            numbers.append(number)
    return tuple(numbers), tensor.mesh, tensor.split


def _replicas(
    tree: str, shares: Sequence[Share], numbers: tuple[int, ...], mesh: Mesh | None, split: Any
) -> tuple[Sharding, list[int]]:
    """The sharding of a family's tensors, and the first rank of each of their replicas."""
    having = [shares[number] for number in numbers]
    if mesh is None:
        return Sharding(), sorted(rank for share in having for rank in share.ranks)
    members: Counter[int] = Counter()
    for share in having:
        members.update(origins[mesh] for origins in share.origins)
    sharding, offsets = smallest_split(mesh.sizes, mesh.strides, split)
    firsts = []
    for origin, num_ranks in sorted(members.items()):
        # Some of its ranks may have another sharding, or lack the tensor.
        if num_ranks == math.prod(mesh.sizes):
            firsts += [origin + offset for offset in offsets]
    if not firsts:
        raise SaveFailed(
            "some ranks of a device mesh do not have a tensor that the others have",
            where=tree,
            value=f"mesh {list(mesh.sizes)}, first rank {min(members)}",
            hint="every rank of a DTensor's mesh must save the tensor; please report this",
        )
    return sharding, firsts


def _mismatch(
    tree: str, fqn: str, one: str, its_rank: int, other: str, other_rank: int
) -> SaveFailed:
    return SaveFailed(
        "the state of a name differs in kind, shape or dtype between ranks",
        where=f"{tree}: {fqn}",
        value=f"{one} on rank {its_rank}, {other} on rank {other_rank}",
        hint="state that differs between ranks needs different names",
    )


def _balanced(
    names: Sequence[str],
    described: Mapping[str, Described],
    sharding: Sharding,
    replicas: Sequence[int],
    kinds: Texts,
) -> Iterable[tuple[str, int]]:
    """Yield each tensor with the first rank of the replica that writes it: the largest tensors first, each to the
    replica with the fewest bytes.

    The first replica writes all buffers. Ranks may have different ones: the buffers of batch normalization are computed
    from the rank's own samples, until DDP broadcasts its first rank's buffers with the next forward pass.
    """
    if len(replicas) == 1:
        yield from ((fqn, replicas[0]) for fqn in names)
        return
    nbytes = {}
    origin = (0,) * len(sharding.mesh)
    for fqn in names:
        tensor = described[fqn]
        nbytes[fqn] = nbytes_of(tensor.dtype, sharding.box(tensor.shape, origin).sizes)
    # All ranks must compute the same: no order of a set may count.
    buffers = {fqn: replicas[0] for fqn in names if kinds.get(fqn) == layout.BUFFERS}
    yield from buffers.items()
    loads = [(0, number) for number in range(len(replicas))]
    heapq.heapreplace(loads, (sum(nbytes[fqn] for fqn in buffers), 0))
    others = [fqn for fqn in names if fqn not in buffers]
    for fqn in sorted(others, key=lambda name: -nbytes[name]):
        load, number = loads[0]
        yield fqn, replicas[number]
        # At least one byte: many tiny tensors are distributed, too.
        heapq.heapreplace(loads, (load + max(nbytes[fqn], 1), number))
