"""Rows of documents that are read, tokenized and packed during training, without an end and with an exact state.

A stream is divided into *lanes*: lane i of n has every n-th document, and packs its documents independently of the
others. Each position in the global batch takes its row from one lane. So a rank, and each of its worker processes,
tokenizes only the documents of the positions that it fills, and which rows a global batch has does not depend on the
number of ranks or workers. With several sources, the next row comes from the source that is furthest behind its share.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from automodel_ckpt.data.batches.document_lane import Lane, Row, RowRules
from automodel_ckpt.data.batches.micro_batches import (
    BatchSizes,
    Collate,
    Failure,
    GlobalBatch,
    collate,
    derive_seed,
    permutation,
    raising,
    run_workers,
)
from automodel_ckpt.data.batches.stream_batches import StreamPosition
from automodel_ckpt.data.collate import State
from automodel_ckpt.data.mixture import Shares, Sources, Turns, check_same_sources, joint_identity
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
    set, each time in another order. The loader reads it by :meth:`read_batches`.
    """

    def __init__(self, sources: Sources, shares: Shares, rules: RowRules) -> None:
        self.sources = dict(sources)
        self.shares = {name: shares[name] for name in sources}
        self.rules = rules

    @property
    def identity(self) -> str | None:
        """A digest that changes with the rows, as far as is known without reading them. None when unknown."""
        return joint_identity([repr(self.rules)], self.sources, self.shares)

    def __iter__(self) -> Iterator[Row]:
        start = StreamPosition(0, 0, 0, self.state_dict())
        for rows, _ in _Reader(self, start, BatchSizes(1, 1, 0, 1, drop_last=False), 1).items():
            yield from rows

    def set_order(self, seed: int, epoch: int, *, shuffle: bool) -> None:
        """Accept an order. :meth:`read_batches` gets it with the position."""

    def state_dict(self) -> State:
        """The state before the first row."""
        return {"counts": dict.fromkeys(self.sources, 0), "num_lanes": None, "lanes": {}}

    def load_state_dict(self, state: State) -> None:
        """Accept a state. :meth:`read_batches` gets it with the position."""

    def merged(self, states: Sequence[State]) -> State:
        """Join the states of all ranks, each of which has the states of its lanes."""
        lanes: dict[str, dict[int, State]] = {}
        for state in states:
            for name, own in state["lanes"].items():
                lanes.setdefault(name, {}).update(own)
        return {**states[0], "lanes": lanes}

    def read_batches(
        self, position: StreamPosition, sizes: BatchSizes, collate_fn: Collate, num_workers: int
    ) -> Generator[GlobalBatch]:
        """Yield the global batches from *position* on, without end, as a rank of *sizes* sees them.

        The rows are made by *num_workers* processes, or by this one for 0. Raises :class:`AutomodelError` for a
        document that cannot be read.
        """
        check_same_sources(position.source_state["counts"], self.sources)
        count = max(num_workers, 1)
        reader = _Reader(self, position, sizes, count)
        size, start = sizes.global_batch_size, position.consumed
        if position.source_state == position.start_state:
            # Without a state to restore, the batches before the position are made and dropped.
            start = 0
        # Threads of the tokenizers library do not survive a fork.
        with one_thread() if num_workers else nullcontext():
            items = raising(run_workers(reader, count) if num_workers else iter(reader))
            with closing(items):
                while True:
                    rows: list[Row] = []
                    states = []
                    for made, state in islice(items, count):
                        rows += made
                        states.append(state)
                    ids = list(range(start, start + size))
                    if start >= position.consumed:
                        batches = []
                        for part in sizes.rank_part(ids):
                            own, rows = rows[: len(part)], rows[len(part) :]
                            batches.append(collate(collate_fn, own, part, empty=False))
                        yield GlobalBatch(
                            position.epoch,
                            start // size,
                            start,
                            ids,
                            batches,
                            False,
                            self.merged(states),
                        )
                    start += size


_Item = tuple[list[Row], State]
"""The rows of one process for a global batch, by position, and the state of its lanes after it."""


class _Reader(IterableDataset[Any]):
    """Yields an item for each global batch, or a :class:`Failure` at the end.

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
            yield from self.items()
        except AutomodelError as error:
            yield Failure(error)

    def items(self) -> Iterator[_Item]:
        """Yield the items. Raises :class:`AutomodelError` for a document that cannot be read."""
        state, stream = self.position.source_state, self.stream
        size = self.sizes.global_batch_size
        count = state["num_lanes"] or num_lanes(size)
        lane_of = [place * count // size for place in range(size)]
        own = self._own_places(lane_of)
        turns = Turns(stream.shares, state["counts"])
        indexed: dict[str, Callable[[int], Row]] = {}
        lanes: dict[str, dict[int, Lane]] = {}
        for number, (name, source) in enumerate(stream.sources.items()):
            seed = derive_seed(self.position.seed, number)
            if hasattr(source, "__len__"):
                indexed[name] = _rows_again_and_again(source, seed, self.position.shuffle)
                continue
            saved = state["lanes"].get(name, {})
            lanes[name] = {}
            for lane in sorted({lane_of[place] for place in own}):
                lanes[name][lane] = Lane(
                    source,
                    name,
                    (lane, count),
                    stream.rules,
                    derive_seed(seed, lane),
                    shuffle=self.position.shuffle,
                    state=saved.get(lane),
                )
        while True:
            rows = []
            for place, lane in enumerate(lane_of):
                name = turns.next_name()
                turns.counts[name] += 1
                if name in indexed and place in own:
                    rows.append(indexed[name](turns.counts[name] - 1))
                elif name in lanes and lane in lanes[name]:
                    row = lanes[name][lane].next()
                    rows += [row] if place in own else []
            states: dict[str, Any] = {name: {} for name in indexed}
            for name, made in lanes.items():
                states[name] = {number: lane.state_dict() for number, lane in made.items()}
            yield rows, {"counts": dict(turns.counts), "num_lanes": count, "lanes": states}

    def _own_places(self, lane_of: Sequence[int]) -> set[int]:
        """The positions in the global batch of the rows that this process makes."""
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        places = list(chain.from_iterable(self.sizes.rank_part(range(len(lane_of)))))
        lanes = sorted({lane_of[place] for place in places})
        # Each worker process has a contiguous part of this rank's lanes.
        first = number * len(lanes) // self.num_workers
        last = (number + 1) * len(lanes) // self.num_workers
        own_lanes = set(lanes[first:last])
        return {place for place in places if lane_of[place] in own_lanes}


def _rows_again_and_again(dataset: Any, seed: int, shuffle: bool) -> Callable[[int], Row]:
    """Return a function of the number of a row, in passes over a map-style data set that each have another order."""

    @lru_cache(maxsize=1)
    def order(number: int) -> Any:
        return permutation(len(dataset), seed, number, shuffle).numpy()

    def row(number: int) -> Row:
        number_of_pass, index = divmod(number, len(dataset))
        found: Row = dataset[int(order(number_of_pass)[index])]
        return found

    return row
