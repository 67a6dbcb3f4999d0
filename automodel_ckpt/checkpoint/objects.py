"""State that is no tensor tree: one file, or one per rank where the ranks have their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.discovery import Item
from automodel_ckpt.checkpoint.durable import DurableFile
from automodel_ckpt.checkpoint.manifest import Part, StateRecord


class ObjectWriter:
    """Writes the state that is no tensor tree, once or per rank, and says how."""

    def __init__(
        self,
        ranks: layout.RankLayout,
        digests: Sequence[Mapping[str, str]],
        dp_ranks: Sequence[int],
        staging: Path,
        part: Part,
    ) -> None:
        """*digests* (of each object's state, by name) and *dp_ranks* are those of every rank, in order."""
        self._ranks, self._digests, self._dp_ranks = ranks, digests, dp_ranks
        self._staging, self._part = staging, part
        # Of the ranks that share a part of the data the first writes.
        self._dp_writers = {dp_rank: rank for rank, dp_rank in reversed(list(enumerate(dp_ranks)))}

    def write(self, item: Item, state: Any) -> StateRecord:
        """Write this rank's share of an object's state; the record is the same on all ranks."""
        scope = item.scope
        if scope == "replicated" and len({digests[item.name] for digests in self._digests}) > 1:
            scope = "rank"
        if scope == "replicated":
            files = [layout.state_file(item.name)]
            mine = files[0] if self._ranks.rank == 0 else None
        else:
            writers = sorted(self._dp_writers.items()) if scope == "dp_rank" else self._all_ranks()
            files = [layout.rank_file(item.name, scope, _At(rank, dp_rank, self._ranks)) for dp_rank, rank in writers]
            ranks = [rank for _, rank in writers]
            mine = files[ranks.index(self._ranks.rank)] if self._ranks.rank in ranks else None
        if mine is not None:
            self._store(mine, state)
        return StateRecord(item.kind, scope, os.path.dirname(files[0]) or files[0], tuple(files), item.aliases)

    def _all_ranks(self) -> list[tuple[int, int]]:
        return [(dp_rank, rank) for rank, dp_rank in enumerate(self._dp_ranks)]

    def _store(self, file: str, state: Any) -> None:
        path = self._staging / file
        path.parent.mkdir(exist_ok=True)
        with DurableFile(path) as out:
            torch.save(state, out)  # type: ignore[arg-type]  # anything with write() will do
        self._part.files[file] = out.close()


@dataclass(frozen=True, slots=True)
class _At:
    """Another rank's place."""

    rank: int
    dp_rank: int
    _mine: layout.RankLayout

    @property
    def world_size(self) -> int:
        return self._mine.world_size

    @property
    def dp_size(self) -> int:
        return self._mine.dp_size
