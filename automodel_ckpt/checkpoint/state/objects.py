"""Plan how state that is not a tree of tensors is stored: one file, or one per rank where the ranks differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.jobs.file_groups import FileGroups
from automodel_ckpt.checkpoint.jobs.jobs import Chunk, FileJob
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.parts.manifest import Blob, StateRecord


class ObjectPlanner:
    """Plans how objects are stored, once or per rank; :attr:`jobs` are the files that this rank writes.

    With *groups*, the ranks of a group write state that differs between them into one file, each a byte range.
    :attr:`bundled` names these objects.
    """

    def __init__(
        self,
        ranks: layout.RankLayout,
        digests: Sequence[Mapping[str, str]],
        dp_ranks: Sequence[int],
        groups: FileGroups | None = None,
        sizes: Sequence[Mapping[str, int]] = (),
    ) -> None:
        """*digests* (of each object's state, by name) and *dp_ranks* are those of every rank, in order.

        With *groups*, *sizes* are those of the states of every rank in bytes, by name.
        """
        self._ranks, self._digests, self._dp_ranks = ranks, digests, dp_ranks
        self._groups, self._sizes = groups, sizes
        self.jobs: list[FileJob] = []
        self.bundled: list[str] = []
        # Ranks with the same part of the data have the same state: the first of them writes it.
        self._dp_writers: dict[int, int] = {}
        for rank, dp_rank in enumerate(dp_ranks):
            self._dp_writers.setdefault(dp_rank, rank)

    def plan(self, item: Item, content: bytes | Callable[[], memoryview]) -> StateRecord:
        """Plan this rank's share of an object's state; the record is the same on all ranks.

        *content* are its bytes, or a function that returns them when they are written.
        """
        scope = item.scope
        # Decided by the digests of all ranks, so that all ranks plan the same files.
        if scope == "replicated" and len({digests[item.name] for digests in self._digests}) > 1:
            scope = "rank"
        files = self._files(item.name, scope)
        if scope != "replicated" and self._groups is not None:
            return self._bundle(item, scope, files, self._groups, content)
        file = files.get(self._ranks.rank)
        if file is not None:
            self.jobs.append(FileJob(file, [Chunk(0, content)]))
        return _record(item, scope, tuple(files.values()))

    def _bundle(
        self,
        item: Item,
        scope: layout.Scope,
        names: Mapping[int, str],
        groups: FileGroups,
        content: bytes | Callable[[], memoryview],
    ) -> StateRecord:
        """Plan state that differs between ranks: *names* has what each rank's is called in the object's tree."""
        self.bundled.append(item.name)
        files: list[str] = []
        rank = self._ranks.rank
        for group in groups.groups:
            writers = [each for each in group if each in names]
            if not writers:
                continue
            file = layout.ranks_file(item.name, group)
            files.append(file)
            if rank in writers:
                before = writers[: writers.index(rank)]
                start = sum(self._sizes[each][item.name] for each in before)
                nbytes = self._sizes[rank][item.name]
                entry = Blob(names[rank], file, start, nbytes, "")
                chunk = Chunk(start, content, entry)
                self.jobs.append(FileJob(file, [chunk], item.name, nbytes, start=start))
        return _record(item, scope, tuple(files))

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


def _record(item: Item, scope: str, files: tuple[str, ...]) -> StateRecord:
    directory = os.path.dirname(files[0]) or files[0]
    return StateRecord(item.kind, scope, directory, files, item.aliases)


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
