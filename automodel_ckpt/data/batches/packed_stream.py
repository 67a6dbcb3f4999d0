"""Rows of documents that are read, tokenized and packed during training, without an end and with an exact state.

A stream is divided into *lanes*: lane i of n has every n-th document, and packs its documents independently of the
others. Each position in the global batch takes its row from one lane. So a rank, and each of its worker processes,
tokenizes only the documents of the positions that it fills, and which rows a global batch has does not depend on the
number of ranks or workers. With several sources, the next row comes from the source that is furthest behind its share.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from automodel_ckpt.data.batches.document_lane import Lane, LaneDocuments, Row, RowRules
from automodel_ckpt.data.batches.micro_batches import Collate, Failure, collate
from automodel_ckpt.data.batches.sampler import BatchSizes, derive_seed, permutation, rank_part
from automodel_ckpt.data.batches.stream_batches import StreamBatch, StreamPosition
from automodel_ckpt.data.batches.workers import run_workers
from automodel_ckpt.data.collate import (
    Batch,
    State,
)
from automodel_ckpt.data.mixture import (
    Shares,
    Sources,
    check_same_sources,
    joint_identity,
)
from automodel_ckpt.data.samples.encoder import one_thread
from automodel_ckpt.errors import AutomodelError

MOST_LANES = 256
"""Lanes of a stream. Each keeps a block of documents in memory and a file open."""


def num_lanes(global_batch_size: int) -> int:
    """The lanes of a stream: the largest divisor of the global batch size that is at most :data:`MOST_LANES`."""
    candidates = range(1, min(global_batch_size, MOST_LANES) + 1)
    return max(number for number in candidates if global_batch_size % number == 0)


class PackedStream(IterableDataset[Row]):
    """Rows of one or several *sources*: streams of documents, and map-style data sets of rows.

    *shares* are the shares of the rows; they add up to 1. A stream that ends begins again, and so does a map-style data
    set, each time in another order. The stream is read by :meth:`read`, which the loader calls, and not by iteration.
    """

    def __init__(self, sources: Sources, shares: Shares, rules: RowRules) -> None:
        self.sources = dict(sources)
        self.shares = {name: shares[name] for name in sources}
        self.rules = rules

    @property
    def identity(self) -> str | None:
        """A digest that changes with the rows, as far as is known without reading them; None if unknown."""
        return joint_identity([repr(self.rules)], self.sources, self.shares)

    def __iter__(self) -> Iterator[Row]:
        start = StreamPosition(0, 0, 0, self.state_dict())
        for item in _Reader(self, start, BatchSizes(1, 1, 0, 1, drop_last=False), 1):
            if isinstance(item, Failure):
                raise item.error
            yield from item.rows

    def set_order(self, seed: int, epoch: int, *, shuffle: bool) -> None:
        """Accept an order. :meth:`read` gets it with the position."""

    def state_dict(self) -> State:
        """The state before the first row."""
        return {"counts": dict.fromkeys(self.sources, 0), "num_lanes": None, "lanes": {}}

    def load_state_dict(self, state: State) -> None:
        """Accept a state. :meth:`read` gets it with the position."""

    def merged(self, states: Sequence[State]) -> State:
        """Join the states of all ranks, each of which has those of its lanes."""
        lanes: dict[str, dict[int, State]] = {}
        for state in states:
            for name, own in state["lanes"].items():
                lanes.setdefault(name, {}).update(own)
        return {**states[0], "lanes": lanes}

    def read(
        self, position: StreamPosition, sizes: BatchSizes, collate_fn: Collate, num_workers: int
    ) -> Generator[StreamBatch]:
        """Yield this rank's part of each global batch from *position* on, without end.

        The rows are made by *num_workers* processes, or by this one for 0. Raises :class:`AutomodelError` for a
        document that cannot be read.
        """
        check_same_sources(position.source_state["counts"], self.sources)
        count = max(num_workers, 1)
        reader = _Reader(self, position, sizes, count)
        start, size = position.consumed, sizes.global_batch_size
        if position.source_state == position.start_state:
            # Without a state to restore, the batches before the position are made and dropped.
            start = 0
        # Threads of the tokenizers library do not survive a fork.
        with one_thread() if num_workers else nullcontext():
            items = run_workers(reader, count) if num_workers else iter(reader)
            with closing(items):
                while True:
                    rows: list[Row] = []
                    states = []
                    for item in islice(items, count):
                        if isinstance(item, Failure):
                            raise item.error
                        rows += item.rows
                        states.append(item.state)
                    if start >= position.consumed:
                        batches = _micro_batches(rows, start, sizes, collate_fn)
                        yield StreamBatch(start, size, batches, False, self.merged(states))
                    start += size


def _micro_batches(
    rows: list[Row], start: int, sizes: BatchSizes, collate_fn: Collate
) -> list[Batch]:
    found = []
    for part in _parts(sizes):
        ids = [start + position for position in part]
        own, rows = rows[: len(part)], rows[len(part) :]
        found.append(collate(collate_fn, own, ids, empty=False))
    return found


def _parts(sizes: BatchSizes) -> list[list[int]]:
    """The positions in the global batch of each micro-batch of this rank."""
    positions = range(sizes.global_batch_size)
    return rank_part(positions, sizes.dp_rank, sizes.dp_size, sizes.local_batch_size)


@dataclass(frozen=True, slots=True)
class _Item:
    """The rows of one process for a global batch, by position, and the state of its lanes after it."""

    rows: list[Row]
    state: State


class _Reader(IterableDataset[Any]):
    """Yields an :class:`_Item` for each global batch, or a :class:`Failure` at the end.

    In a worker process, it has the positions of some of the rank's lanes, so that no lane is tokenized twice.
    """

    def __init__(
        self, stream: PackedStream, position: StreamPosition, sizes: BatchSizes, num_workers: int
    ) -> None:
        self.stream = stream
        self.position = position
        self.sizes = sizes
        self.num_workers = num_workers

    def __iter__(self) -> Generator[_Item | Failure]:
        try:
            yield from self._items()
        except AutomodelError as error:
            yield Failure(error)

    def _items(self) -> Iterator[_Item]:
        worker = get_worker_info()
        state = self.position.source_state
        size = self.sizes.global_batch_size
        count = state["num_lanes"] or num_lanes(size)
        lane_of = [place * count // size for place in range(size)]
        own = self._own_places(lane_of, 0 if worker is None else worker.id)
        turns = _Turns(self.stream.shares, state["counts"])
        sources = {}
        for number, name in enumerate(self.stream.sources):
            sources[name] = self._source(number, name, count, {lane_of[place] for place in own})
        while True:
            rows = []
            for place in range(size):
                name, draw = turns.next()
                row = sources[name].row(lane_of[place], draw, wanted=place in own)
                if row is not None:
                    rows.append(row)
            lanes = {name: source.states() for name, source in sources.items()}
            yield _Item(rows, {"counts": dict(turns.counts), "num_lanes": count, "lanes": lanes})

    def _own_places(self, lane_of: Sequence[int], worker: int) -> set[int]:
        """The positions in the global batch whose rows this process makes."""
        places = list(chain.from_iterable(_parts(self.sizes)))
        lanes = sorted({lane_of[place] for place in places})
        # Each worker process has a contiguous part of this rank's lanes.
        first = worker * len(lanes) // self.num_workers
        last = (worker + 1) * len(lanes) // self.num_workers
        own_lanes = set(lanes[first:last])
        return {place for place in places if lane_of[place] in own_lanes}

    def _source(self, number: int, name: str, count: int, lanes: set[int]) -> _Lanes | _Indexed:
        source = self.stream.sources[name]
        seed = derive_seed(self.position.seed, number)
        if hasattr(source, "__len__"):
            return _Indexed(source, seed, shuffle=self.position.shuffle)
        saved = self.position.source_state["lanes"].get(name, {})
        made = {}
        for lane in sorted(lanes):
            made[lane] = Lane(
                LaneDocuments(source, name, lane, count, self.stream.rules),
                self.stream.rules,
                derive_seed(seed, lane),
                max(source.block // count, 1),
                shuffle=self.position.shuffle,
                state=saved.get(lane),
            )
        return _Lanes(made)


class _Turns:
    """Which source each row is of: the one that is furthest behind its share; of equal ones, the first.

    *counts* are the rows of each source so far.
    """

    def __init__(self, shares: Shares, counts: Mapping[str, int]) -> None:
        # Integers, because sums of fractions are slow, and floats would depend on the order of additions.
        self._scale = math.lcm(*(share.denominator for share in shares.values()))
        self._shares = {name: int(share * self._scale) for name, share in shares.items()}
        self.counts = dict(counts)
        self._total = sum(counts.values())

    def next(self) -> tuple[str, int]:
        """The source of the next row, and how many rows of it there were before."""
        self._total += 1
        counts, scale, total = self.counts, self._scale, self._total
        best, largest = "", -1
        for name, share in self._shares.items():
            behind = share * total - counts[name] * scale
            if not best or behind > largest:
                best, largest = name, behind
        counts[best] += 1
        return best, counts[best] - 1


class _Indexed:
    """The rows of a map-style data set, which is used again and again, each time in another order."""

    def __init__(self, dataset: Any, seed: int, *, shuffle: bool) -> None:
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self._pass = -1
        self._order: Any = None

    def row(self, lane: int, draw: int, *, wanted: bool) -> Row | None:
        """Row number *draw* of the source; None if it is not *wanted*."""
        if not wanted:
            return None
        number, index = divmod(draw, len(self._dataset))
        if number != self._pass:
            self._pass = number
            count = len(self._dataset)
            self._order = permutation(count, self._seed, number, self._shuffle).numpy()
        row: Row = self._dataset[int(self._order[index])]
        return row

    def states(self) -> dict[int, State]:
        """No state: the number of the row is enough."""
        return {}


class _Lanes:
    """The lanes of a stream that this process packs."""

    def __init__(self, lanes: Mapping[int, Lane]) -> None:
        self._lanes = lanes

    def row(self, lane: int, draw: int, *, wanted: bool) -> Row | None:
        """The next row of *lane*; None if another process packs this lane, or if its row is not *wanted*."""
        found = self._lanes.get(lane)
        if found is None:
            return None
        row = found.next()
        return row if wanted else None

    def states(self) -> dict[int, State]:
        """The state of each lane after the rows that were taken."""
        return {number: lane.state_dict() for number, lane in self._lanes.items()}
