"""Iterable data sets: every rank reads the whole stream and keeps its part, so the global batches need no agreement.

A source may leave the costly half to the rank that keeps the sample: its ``prepare(sample)`` is called for that part
only.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from automodel_ckpt.data.fetch import (
    Batch,
    Collate,
    Failure,
    collate,
    located,
    run_workers,
    seed_everything,
)
from automodel_ckpt.data.sampler import derive_seed, rank_part
from automodel_ckpt.errors import AutomodelError


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """How a global batch is cut, and for which rank."""

    global_batch_size: int
    local_batch_size: int
    dp_rank: int
    dp_size: int
    drop_last: bool


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where to read on: *consumed* samples into *epoch*, by the source's own state where it has one.

    *start_state* is that of the source before anything was read.
    """

    seed: int
    epoch: int
    consumed: int
    source_state: Any
    start_state: Any = None
    shuffle: bool = False


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """One rank's part of a global batch, and the source's state after the whole of it."""

    start: int
    num_samples: int
    micro_batches: list[Batch]
    last: bool
    source_state: Any


@dataclass(slots=True)
class _Chunk:
    start: int
    samples: list[Any]
    source_state: Any


class StreamReader(IterableDataset[Any]):
    """The global batches of the rest of an epoch, one read ahead to know the last. An error ends it as a Failure."""

    def __init__(self, source: Any, collate_fn: Collate, sizes: BatchSizes, position: StreamPosition) -> None:
        self.source = source
        self.collate_fn = collate_fn
        self.sizes = sizes
        self.position = position
        self.stateful = restores_exactly(source)
        self.prepare = getattr(source, "prepare", None)

    def __iter__(self) -> Generator[StreamBatch | Failure]:
        try:
            yield from self._batches()
        except AutomodelError as error:
            yield Failure(error)

    def _batches(self) -> Iterator[StreamBatch]:
        chunks = self._chunks(self._resume())
        held = next(chunks, None)
        if held is None and self.position.source_state is not None and self.position.consumed == 0:
            # A source restored to the end of an epoch may say "end" before it starts over, and those of datasets never
            # start over by themselves.
            self.source.load_state_dict(copy.deepcopy(self.position.start_state))
            chunks = self._chunks(iter(self.source))
            held = next(chunks, None)
        while held is not None:
            following = next(chunks, None)
            if following is None:
                held.source_state = self._source_state()
            part = self._part(held, last=following is None)
            report = getattr(self.source, "report", None)
            if following is None and callable(report):
                report()
            yield part
            held = following

    def _resume(self) -> Iterator[Any]:
        if shuffles(self.source):
            self.source.set_order(self.position.seed, self.position.epoch, shuffle=self.position.shuffle)
        if callable(getattr(self.source, "set_epoch", None)):
            self.source.set_epoch(self.position.epoch)
        if self.position.source_state is not None:
            self.source.load_state_dict(copy.deepcopy(self.position.source_state))
        stream: Iterator[Any] = iter(self.source)
        to_skip = self.position.consumed if self.position.source_state is None else 0
        for number in range(to_skip):
            if not self._read(stream, number):
                break
        return stream

    def _chunks(self, stream: Iterator[Any]) -> Iterator[_Chunk]:
        start, size = self.position.consumed, self.sizes.global_batch_size
        while True:
            samples: list[Any] = []
            while len(samples) < size and (sample := self._read(stream, start + len(samples))):
                samples += sample
            if not samples or (self.sizes.drop_last and len(samples) < size):
                return
            yield _Chunk(start, samples, self._source_state())
            start += len(samples)

    def _read(self, stream: Iterator[Any], number: int) -> list[Any]:
        """The next sample as a list of one; empty at the end of the stream."""
        seed_everything(derive_seed(self.position.seed, self.position.epoch, number))
        try:
            return [next(stream)]
        except StopIteration:
            return []
        except Exception as error:
            raise located(error, f"sample {number} of the stream", "could not be read") from error

    def _source_state(self) -> Any:
        return copy.deepcopy(self.source.state_dict()) if self.stateful else None

    def _part(self, chunk: _Chunk, *, last: bool) -> StreamBatch:
        sizes = self.sizes
        offsets = range(len(chunk.samples))
        parts = rank_part(offsets, sizes.dp_rank, sizes.dp_size, sizes.local_batch_size)
        micro_batches = [self._collate(chunk, part) for part in parts]
        return StreamBatch(chunk.start, len(chunk.samples), micro_batches, last, chunk.source_state)

    def _collate(self, chunk: _Chunk, offsets: list[int]) -> Batch:
        chosen = offsets or [0]
        ids = [chunk.start + offset for offset in chosen]
        seed_everything(derive_seed(self.position.seed, self.position.epoch, ids[0]))
        samples = [self._prepared(chunk, offset) for offset in chosen]
        return collate(self.collate_fn, samples, ids, empty=not offsets)

    def _prepared(self, chunk: _Chunk, offset: int) -> Any:
        sample = chunk.samples[offset]
        if self.prepare is None:
            return sample
        try:
            return self.prepare(sample)
        except Exception as error:
            raise located(error, f"sample {chunk.start + offset} of the stream", "could not be prepared") from error


def read_stream(reader: StreamReader, num_workers: int) -> Generator[StreamBatch]:
    """The batches of *reader*, read here or by one worker process (more would each read the whole stream again).

    Reading here moves the global generators: see :func:`isolated_rng`.
    """
    items = run_workers(reader, 1) if num_workers else iter(reader)
    with closing(items):
        for item in items:
            if isinstance(item, Failure):
                raise item.error
            yield item


def restores_exactly(source: Any) -> bool:
    """Whether the source can go on from its own state; without that, a resume reads and drops what was consumed.

    A shuffle buffer of ``datasets`` is not part of its state: what the buffer held would be lost.
    """
    methods = (getattr(source, name, None) for name in ("state_dict", "load_state_dict"))
    return all(callable(method) for method in methods) and not _has_shuffle_buffer(source)


def shuffles(source: Any) -> bool:
    """Whether the source takes its order from us: ``set_order(seed, epoch, shuffle=...)``."""
    return callable(getattr(source, "set_order", None))


def is_split_by_rank(source: Any) -> bool:
    """Whether ``datasets.distributed.split_dataset_by_node`` was used on the source."""
    return getattr(source, "_distributed", None) is not None


def _has_shuffle_buffer(source: Any) -> bool:
    inner = getattr(source, "_ex_iterable", None) or getattr(source, "ex_iterable", None)
    inners = [inner] if inner is not None else getattr(source, "ex_iterables", None) or []
    return hasattr(source, "buffer_size") or any(map(_has_shuffle_buffer, inners))
