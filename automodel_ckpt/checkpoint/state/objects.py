"""Plan how state that is not a tree of tensors is stored: one file, or one per rank where the ranks differ."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.discovery import Item
from automodel_ckpt.checkpoint.files.pickle_values import saved
from automodel_ckpt.checkpoint.manifest import StateRecord
from automodel_ckpt.checkpoint.writing.jobs import Chunk, FileJob


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
        # Of the ranks that share a part of the data the first writes.
        self._dp_writers = {dp_rank: rank for rank, dp_rank in reversed(list(enumerate(dp_ranks)))}

    def plan(self, item: Item, state: Any) -> StateRecord:
        """Plan this rank's share of an object's state; the record is the same on all ranks."""
        scope = item.scope
        if scope == "replicated" and len({digests[item.name] for digests in self._digests}) > 1:
            scope = "rank"
        if scope == "replicated":
            files = [layout.state_file(item.name)]
            mine = files[0] if self._ranks.rank == 0 else None
        else:
            writers = sorted(self._dp_writers.items()) if scope == "dp_rank" else self._all_ranks()
            files = [
                layout.rank_file(item.name, scope, _At(rank, dp_rank, self._ranks))
                for dp_rank, rank in writers
            ]
            ranks = [rank for _, rank in writers]
            mine = files[ranks.index(self._ranks.rank)] if self._ranks.rank in ranks else None
        if mine is not None:
            self.jobs.append(FileJob(mine, [Chunk(0, partial(saved, state))]))
        return StateRecord(
            item.kind, scope, os.path.dirname(files[0]) or files[0], tuple(files), item.aliases
        )

    def _all_ranks(self) -> list[tuple[int, int]]:
        return [(dp_rank, rank) for rank, dp_rank in enumerate(self._dp_ranks)]


@dataclass(frozen=True, slots=True)
class _At:
    """The layout of another rank."""

    rank: int
    dp_rank: int
    _mine: layout.RankLayout

    @property
    def world_size(self) -> int:
        return self._mine.world_size

    @property
    def dp_size(self) -> int:
        return self._mine.dp_size
