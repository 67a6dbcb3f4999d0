"""Global batches of iterable data sets: every rank reads the whole stream and uses its part of each global batch.

Ranks therefore need no communication. A source may postpone expensive work: its ``prepare(sample)`` is called only on
the rank that uses the sample.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from automodel_ckpt.base.rng import seed_everything
from automodel_ckpt.data.batches.micro_batches import (
    BatchSizes,
    Collate,
    Failure,
    GlobalBatch,
    collate,
    derive_seed,
    raising,
    run_workers,
    with_location,
)
from automodel_ckpt.data.collate import Batch
from automodel_ckpt.errors import AutomodelError


@dataclass(frozen=True)
class StreamPosition:
    """The position to continue from: *consumed* samples into *epoch*.

    *source_state* is the source's own state at this position, or None. *start_state* is its state before the first
    sample.
    """

    seed: int
    epoch: int
    consumed: int
    source_state: Any
    start_state: Any = None
    shuffle: bool = False


class StreamReader(IterableDataset[Any]):
    """Yields one rank's part of the remaining global batches of an epoch.

    It reads one global batch ahead, to detect the last one. An error is yielded as a :class:`Failure`, and ends the
    iteration.
    """

    def __init__(
        self, source: Any, collate_fn: Collate, sizes: BatchSizes, position: StreamPosition
    ) -> None:
        self.source = source
        self.collate_fn = collate_fn
        self.sizes = sizes
        self.position = position
        self.stateful = restores_exactly(source)

    def __iter__(self) -> Generator[GlobalBatch | Failure]:
        try:
            yield from self._batches()
        except AutomodelError as error:
            yield Failure(error)

    def _batches(self) -> Iterator[GlobalBatch]:
        chunks = self._chunks(self._resume())
        current = next(chunks, None)
        is_restored = self.position.source_state is not None
        if current is None and is_restored and self.position.consumed == 0:
            # A source that is restored to the end of an epoch may end immediately, and restart only in its next
            # iteration. Those of the library datasets never restart.
            self.source.load_state_dict(copy.deepcopy(self.position.start_state))
            chunks = self._chunks(iter(self.source))
            current = next(chunks, None)
        start, size = self.position.consumed, self.sizes.global_batch_size
        while current is not None:
            samples, state = current
            following = next(chunks, None)
            is_last = following is None
            if is_last:
                # The state after the end, which may differ from the state after the last sample.
                state = self._source_state()
            ids = list(range(start, start + len(samples)))
            parts = self.sizes.rank_part(range(len(samples)))
            batches = [self._collate(samples, start, part) for part in parts]
            report = getattr(self.source, "report", None)
            if is_last and callable(report):
                report()
            epoch = self.position.epoch
            yield GlobalBatch(epoch, start // size, start, ids, batches, is_last, state)
            start += len(samples)
            current = following

    def _resume(self) -> Iterator[Any]:
        """Iterate over the source from the position on. Reads and discards samples if there is no state to restore."""
        position = self.position
        if callable(getattr(self.source, "set_order", None)):
            self.source.set_order(position.seed, position.epoch, shuffle=position.shuffle)
        if callable(getattr(self.source, "set_epoch", None)):
            self.source.set_epoch(position.epoch)
        num_to_skip = position.consumed
        if position.source_state is not None:
            # Copied, because the source may change the dictionary that it loads.
            self.source.load_state_dict(copy.deepcopy(position.source_state))
            num_to_skip = 0
        stream: Iterator[Any] = iter(self.source)
        for number in range(num_to_skip):
            # Seeded like a sample that is used, so that a source that draws reaches the same state.
            if not self._read(stream, number):
                break
        return stream

    def _chunks(self, stream: Iterator[Any]) -> Iterator[tuple[list[Any], Any]]:
        """Yield the samples of each global batch, and the source's state after them."""
        number, size = self.position.consumed, self.sizes.global_batch_size
        while True:
            samples: list[Any] = []
            while len(samples) < size and (found := self._read(stream, number)):
                samples += found
                number += 1
            if not samples or (self.sizes.drop_last and len(samples) < size):
                return
            yield samples, self._source_state()

    def _read(self, stream: Iterator[Any], number: int) -> list[Any]:
        """Return the next sample as a list of one; an empty list at the end of the stream."""
        seed = derive_seed(self.position.seed, self.position.epoch, number)
        seed_everything(seed, devices=False)
        try:
            return [next(stream)]
        except StopIteration:
            return []
        except Exception as error:
            raise with_location(
                error, f"sample {number} of the stream", "could not be read"
            ) from error

    def _source_state(self) -> Any:
        if not self.stateful:
            return None
        return copy.deepcopy(self.source.state_dict())

    def _collate(self, all_samples: list[Any], start: int, offsets: list[int]) -> Batch:
        is_empty = not offsets
        # FSDP needs equal numbers of forward passes, so a rank without samples runs one with labels that do not count.
        chosen = offsets or [0]
        if self.sizes.with_preceding:
            chosen = [(chosen[0] - 1) % len(all_samples), *chosen]
        ids = [start + offset for offset in chosen]
        # Seeded again: how far the source was read ahead must not change what collate_fn draws.
        seed_everything(derive_seed(self.position.seed, self.position.epoch, ids[0]), devices=False)
        samples = [self._prepared(all_samples[offset], start + offset) for offset in chosen]
        return collate(self.collate_fn, samples, ids, empty=is_empty)

    def _prepared(self, sample: Any, number: int) -> Any:
        prepare: Any = getattr(self.source, "prepare", None)
        try:
            return sample if prepare is None else prepare(sample)
        except Exception as error:
            where = f"sample {number} of the stream"
            raise with_location(error, where, "could not be prepared") from error


def read_stream(
    source: Any, position: StreamPosition, sizes: BatchSizes, collate_fn: Collate, num_workers: int
) -> Generator[GlobalBatch]:
    """Yield the batches of *source*, read by one worker process, or in this one if *num_workers* is 0.

    Several workers would each read the whole stream. Reading in this process advances its random
    generators; :func:`isolated_rng` restores them. Raises :class:`AutomodelError` for a sample that cannot be read.
    """
    reader = StreamReader(source, collate_fn, sizes, position)
    yield from raising(run_workers(reader, 1) if num_workers else iter(reader))


def restores_exactly(source: Any) -> bool:
    """Whether the source can continue from its own state; otherwise, a resume reads and discards consumed samples.

    A source with a shuffle buffer of ``datasets`` cannot: its state does not contain the buffered samples.
    """
    methods = (getattr(source, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods)) and not _has_shuffle_buffer(source)


def _has_shuffle_buffer(source: Any) -> bool:
    # The names are private to datasets: a wrapper has one inner iterable, or several.
    inner = getattr(source, "_ex_iterable", None) or getattr(source, "ex_iterable", None)
    several = getattr(source, "ex_iterables", None) or []
    each_inner = several if inner is None else [inner]
    return hasattr(source, "buffer_size") or any(map(_has_shuffle_buffer, each_inner))
