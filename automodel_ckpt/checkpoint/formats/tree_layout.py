"""The regular tensors of a tree in the order of their rows in its slice table, and what this rank writes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from automodel_ckpt.checkpoint.jobs.rank_manifest import RankTree
from automodel_ckpt.checkpoint.parts.sharding import Position, RegularSlices
from automodel_ckpt.checkpoint.parts.slices import Tensor


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """The regular tensors of a tree and their copies, by name. Those in a part have the order of a rank's file."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    copies: Mapping[str, Tensor] = field(default_factory=dict)

    def rank_tree(self) -> RankTree:
        """An empty record of what this rank writes of the tree."""
        rows: dict[str, tuple[int, int]] = {}
        placed = False
        for number, tensor in enumerate((*self.tensors.values(), *self.copies.values())):
            assert isinstance(tensor.slices, RegularSlices)
            rows[tensor.fqn] = tensor.slices.part, number
            placed = placed or tensor.slices.position is not None
        return RankTree(rows=rows, placed=placed)


def ordered(tensors: Iterable[Tensor], part_of: Callable[[str], int] = lambda fqn: 0) -> TreeLayout:
    """The layout of regular *tensors* in files of the ranks, in this order; *part_of* is the part of a name."""
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        assert isinstance(tensor.slices, RegularSlices)
        part = part_of(tensor.fqn)
        if part != tensor.slices.part:
            tensor = replace(tensor, slices=replace(tensor.slices, part=part))
        found[tensor.fqn] = tensor
    return TreeLayout(found)


def positioned(tensor: Tensor, name: str, position: Position) -> Tensor:
    """A regular tensor under *name*, stored at a position in a file that several ranks write."""
    assert isinstance(tensor.slices, RegularSlices)
    slices = replace(tensor.slices, fqn=name, position=position)
    return replace(tensor, fqn=name, slices=slices)
