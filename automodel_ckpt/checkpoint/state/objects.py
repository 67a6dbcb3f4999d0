"""Plan how state that is not a tree of tensors is stored: one file, or one per rank where the ranks differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.parts.manifest import StateRecord


class ObjectPlanner:
    """Plans how objects are stored, once or per rank; :attr:`jobs` are the files that this rank writes."""

    def __init__(
        self,
        ranks: layout.RankLayout,
        digests: Sequence[Mapping[str, str]],
        dp_ranks: Sequence[int],
    ) -> None:
        """*digests* (of each object's state, by name) and *dp_ranks* are those of every rank, in order."""
        self._ranks, self._digests, self._dp_ranks = ranks, digests, dp_ranks
        self.jobs: list[FileJob] = []
        # Ranks with the same part of the data have the same state: the first of them writes it.
        self._dp_writers: dict[int, int] = {}
        for rank, dp_rank in enumerate(dp_ranks):
            self._dp_writers.setdefault(dp_rank, rank)

    def plan(self, item: Item, content: Callable[[], memoryview]) -> StateRecord:
        """Plan this rank's share of an object's state; the record is the same on all ranks.

        *content* returns its bytes when they are written.
        """
        scope = item.scope
        # Decided by the digests of all ranks, so that all ranks plan the same files.
        if scope == "replicated" and len({digests[item.name] for digests in self._digests}) > 1:
            scope = "rank"
        files = self._files(item.name, scope)
        file = files.get(self._ranks.rank)
        if file is not None:
            self.jobs.append(FileJob(file, [Chunk(0, content)]))
        names = tuple(files.values())
        directory = os.path.dirname(names[0]) or names[0]
        return StateRecord(item.kind, scope, directory, names, item.aliases)

    def _files(self, name: str, scope: layout.Scope) -> dict[int, str]:
        """The file that each writing rank writes of an object."""
        if scope == "replicated":
            return {0: layout.state_file(name)}
        writers = list(enumerate(self._dp_ranks))
        if scope == "dp_rank":
            writers = [(rank, dp_rank) for dp_rank, rank in sorted(self._dp_writers.items())]
        files: dict[int, str] = {}
        for rank, dp_rank in writers:
            files[rank] = layout.rank_file(name, scope, _OtherRank(rank, dp_rank, self._ranks))
        return files


@dataclass(frozen=True, slots=True)
class _OtherRank:
    """The layout of another rank."""

    rank: int
    dp_rank: int
    _ranks: layout.RankLayout

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    @property
    def dp_size(self) -> int:
        return self._ranks.dp_size
