"""Which ranks write together into one file (``checkpoint.files_per_node``). Pure functions; imports no torch.

A file has only ranks of one node. Their writes share the page cache of that node, and no two nodes write to one file
of a network file system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class FileGroups:
    """The ranks of each file, in ascending order. Every rank is in exactly one group."""

    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def _by_rank(self) -> dict[int, tuple[int, ...]]:
        return {rank: group for group in self.groups for rank in group}

    def of(self, rank: int) -> tuple[int, ...]:
        """The ranks that write into the same file as *rank*, which is one of them."""
        return self._by_rank[rank]


def groups_of(nodes: Sequence[str], files_per_node: int) -> FileGroups:
    """Divide the ranks of each node into at most *files_per_node* groups of neighbors.

    *nodes* has the identity of the node of each rank. Nodes can have different numbers of ranks, in any order.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    groups: list[tuple[int, ...]] = []
    for ranks in ranks_of.values():
        size = -(-len(ranks) // files_per_node)
        for first in range(0, len(ranks), size):
            groups.append(tuple(ranks[first : first + size]))
    return FileGroups(tuple(groups))
