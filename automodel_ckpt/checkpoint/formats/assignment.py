"""Assign the slices of a tree to ranks: each rank computes the same assignment from the same shares.

Where several ranks have the same slice, one of them writes it. Slices are distributed so that the ranks write about the
same number of bytes. The work grows with the number of tensors, not with the number of slices. Imports no torch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.sharding import RegularSlices, Sharding, smallest_split
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, nbytes_of
from automodel_ckpt.errors import SaveFailed

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.formats.description import Described, Mesh, TreeDescription

_SliceKey = tuple[str, tuple[int, ...]]
"""A slice of an irregular tensor: the name of the tensor, and the offsets of the slice."""


@dataclass(frozen=True, slots=True)
class Share:
    """What some *ranks* with the same *description* have of a tree.

    *origins* has, for each of the ranks, the first rank of each of its device meshes. *irregular* has, by rank, the
    slices of tensors with shardings that do not follow from a mesh.
    """

    description: TreeDescription
    ranks: Sequence[int]
    origins: Sequence[Mapping[Mesh, int]]
    irregular: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assignment:
    """All tensors of a tree, with the slices of all ranks, and which rank writes what.

    *tensors* have regular slices, *irregular* have lists; neither has files yet. *writers* has the rank of each slice
    of an irregular tensor, by its name and offsets. *values* has the rank of each value. *paths* and *kinds* are from
    all descriptions.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    irregular: Mapping[str, Tensor] = field(default_factory=dict)
    writers: Mapping[_SliceKey, int] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    paths: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)

    def values_of(self, rank: int) -> list[str]:
        """The values that *rank* writes."""
        return [fqn for fqn, writer in self.values.items() if writer == rank]

    def irregular_of(self, rank: int) -> list[Tensor]:
        """The slices of irregular tensors that *rank* writes: tensors with one slice each."""
        found: list[Tensor] = []
        for tensor in self.irregular.values():
            for stored in tensor.slices:
                if self.writers[tensor.fqn, stored.offsets] == rank:
                    found.append(replace(tensor, slices=(stored,)))
        return found


def assign(name: str, shares: Sequence[Share]) -> Assignment:
    """Assign the slices of the tree *name*. Raises :class:`SaveFailed` where the shares do not match."""
    irregular_names: set[str] = set()
    for share in shares:
        irregular_names.update(share.description.irregular)
    families = _Families(name, shares)
    candidates: dict[_Family, list[str]] = {}
    described: dict[str, Described] = {}
    values: dict[str, int] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    kinds: dict[str, str] = {}
    for number, share in enumerate(shares):
        paths |= share.description.paths
        kinds |= share.description.kinds
        for fqn, tensor in share.description.tensors.items():
            if fqn not in described and fqn not in irregular_names:
                described[fqn] = tensor
                family = families.of(fqn, tensor, number)
                candidates.setdefault(family, []).append(fqn)
        for fqn in share.description.values:
            # Writing one takes microseconds: they are not distributed.
            values.setdefault(fqn, share.ranks[0])
    for fqn in values:
        if fqn in described or fqn in irregular_names:
            raise _tensor_and_value(name, fqn, shares)
    first_ranks: dict[str, tuple[Sharding, int]] = {}
    for family, names in candidates.items():
        sharding, replicas = families.replicas(family)
        for fqn, first in _balanced(names, described, sharding, replicas, kinds):
            first_ranks[fqn] = sharding, first
    tensors: dict[str, Tensor] = {}
    for fqn, tensor in described.items():
        sharding, first = first_ranks[fqn]
        slices = RegularSlices(fqn, tensor.dtype, tensor.shape, sharding, first)
        tensors[fqn] = Tensor(fqn, tensor.dtype, tensor.shape, slices)
    irregular, writers = _assign_irregular(name, shares)
    return Assignment(tensors, irregular, writers, values, paths, kinds)


_HINT = "state that differs between ranks needs different names"

_Family = tuple[tuple[int, ...], "Mesh | None", Any]
"""Tensors with the same replicas: numbers of the shares that have them, their mesh, and how it partitions them."""


class _Families:
    """Finds the replicas of tensors: once for all tensors of a family, because this visits all ranks."""

    def __init__(self, tree: str, shares: Sequence[Share]) -> None:
        self._tree = tree
        self._shares = shares
        self._replicas: dict[_Family, tuple[Sharding, list[int]]] = {}

    def of(self, fqn: str, tensor: Described, first: int) -> _Family:
        """The family of a tensor, which the share *first* has, and none before it."""
        numbers = [first]
        for number in range(first + 1, len(self._shares)):
            other = self._shares[number].description.tensors.get(fqn)
            if other is None:
                continue
            if other[:2] != tensor[:2]:
                rank = self._shares[number].ranks[0]
                raise _mismatch(f"{self._tree}: {fqn}", tensor[:2], other[:2], rank)
            # Another sharding of the same tensor is a further copy of it, which is not used.
            if other == tensor:
                numbers.append(number)
        return tuple(numbers), tensor.mesh, tensor.split

    def replicas(self, family: _Family) -> tuple[Sharding, list[int]]:
        """The sharding of a family's tensors, and the first rank of each of their replicas."""
        if family not in self._replicas:
            self._replicas[family] = self._find_replicas(*family)
        return self._replicas[family]

    def _find_replicas(
        self, numbers: tuple[int, ...], mesh: Mesh | None, split: Any
    ) -> tuple[Sharding, list[int]]:
        shares = [self._shares[number] for number in numbers]
        if mesh is None:
            return Sharding(), sorted(rank for share in shares for rank in share.ranks)
        members: Counter[int] = Counter()
        for share in shares:
            members.update(origins[mesh] for origins in share.origins)
        sharding, offsets = smallest_split(mesh.sizes, mesh.strides, split)
        size = _product(mesh.sizes)
        firsts: list[int] = []
        for origin, num_ranks in sorted(members.items()):
            # Some of its ranks may have another sharding, or lack the tensor.
            if num_ranks == size:
                firsts += [origin + offset for offset in offsets]
        if not firsts:
            raise SaveFailed(
                "some ranks of a device mesh do not have a tensor that the others have",
                where=self._tree,
                value=f"mesh {list(mesh.sizes)}, first rank {min(members)}",
                hint="every rank of a DTensor's mesh must save the tensor; please report this",
            )
        return sharding, firsts


_DtypeAndShape = tuple[str, tuple[int, ...]]


def _mismatch(where: str, one: _DtypeAndShape, other: _DtypeAndShape, rank: int) -> SaveFailed:
    texts = [f"{dtype} {list(shape)}" for dtype, shape in (one, other)]
    return SaveFailed(
        "a tensor has another shape or dtype on another rank",
        where=where,
        value=f"{texts[0]}, on rank {rank} {texts[1]}",
        hint=_HINT,
    )


def _tensor_and_value(tree: str, fqn: str, shares: Sequence[Share]) -> SaveFailed:
    ranks: dict[bool, int] = {}
    for share in shares:
        description = share.description
        if fqn in description.values:
            ranks.setdefault(False, share.ranks[0])
        elif fqn in description.tensors or fqn in description.irregular:
            ranks.setdefault(True, share.ranks[0])
    return SaveFailed(
        "a name is that of a tensor on one rank, and of another value on another",
        where=f"{tree}: {fqn}",
        value=f"a tensor on rank {ranks[True]}, another value on rank {ranks[False]}",
        hint=_HINT,
    )


def _balanced(
    names: Sequence[str],
    described: Mapping[str, Described],
    sharding: Sharding,
    replicas: Sequence[int],
    kinds: Mapping[str, str],
) -> Iterable[tuple[str, int]]:
    """Yield each tensor with the first rank of the replica that writes it: the largest tensors first, each to the
    replica with the fewest bytes.

    The first replica writes all buffers. Ranks may have different ones: the buffers of batch normalization are computed
    from the rank's own samples, until DDP broadcasts its first rank's buffers with the next forward pass.
    """
    if len(replicas) == 1:
        yield from ((fqn, replicas[0]) for fqn in names)
        return
    nbytes: dict[str, int] = {}
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


def _assign_irregular(
    tree: str, shares: Iterable[Share]
) -> tuple[dict[str, Tensor], dict[_SliceKey, int]]:
    """The irregular tensors with the slices of all ranks, and the rank that writes each slice, by name and offsets.

    Raises :class:`SaveFailed` where a tensor has another dtype or shape on another rank.
    """
    ranks_with: dict[_SliceKey, list[int]] = {}
    slices: dict[_SliceKey, Slice] = {}
    tensors: dict[str, Tensor] = {}
    of_ranks = {rank: each for share in shares for rank, each in share.irregular.items()}
    for rank, of_rank in sorted(of_ranks.items()):
        for tensor in of_rank:
            first = tensors.setdefault(tensor.fqn, tensor)
            expected = (first.dtype, first.shape)
            found = (tensor.dtype, tensor.shape)
            if found != expected:
                raise _mismatch(f"{tree}: {tensor.fqn}", expected, found, rank)
            (stored,) = tensor.slices
            if stored.nbytes == 0 and 0 not in tensor.shape:
                continue
            key = (tensor.fqn, stored.offsets)
            slices.setdefault(key, stored)
            ranks_with.setdefault(key, []).append(rank)
    by_tensor: dict[str, list[Slice]] = {}
    for (fqn, _), stored in slices.items():
        by_tensor.setdefault(fqn, []).append(stored)
    merged = {
        fqn: replace(tensors[fqn], slices=tuple(of_tensor)) for fqn, of_tensor in by_tensor.items()
    }
    return merged, _writers(slices, ranks_with)


def _writers(
    slices: Mapping[_SliceKey, Slice], ranks_with: Mapping[_SliceKey, Sequence[int]]
) -> dict[_SliceKey, int]:
    """The rank that writes each slice: of those that have it, the one with the fewest bytes so far."""
    num_bytes: Counter[int] = Counter()
    writers: dict[_SliceKey, int] = {}
    for key, ranks in ranks_with.items():
        writer = min(ranks, key=lambda rank: num_bytes[rank])
        writers[key] = writer
        num_bytes[writer] += slices[key].nbytes or 1
    return writers


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
