"""Read values of a checkpoint in a store by byte ranges, each compared with its digest before it is used.

The manifest has digests of stored slices and values. To read a part of one, all its bytes are read.
Neighbors are read in one request, large ones in several at the same time, and the next ones while those before are
used. Nothing is written to a disk.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from automodel_ckpt.checkpoint.files.durable_file import digest_from
from automodel_ckpt.checkpoint.parts.slices import nbytes_of, runs_in_file
from automodel_ckpt.checkpoint.parts.tree import FileContents, FileSlice, Tree, damage_text
from automodel_ckpt.errors import CheckpointUnusable, unusable

REQUEST_BYTES = 16 << 20
"""Most bytes of one request."""
_BATCH_BYTES = 64 << 20
"""Bytes that are read ahead; more if a single slice is larger."""
_GAP_BYTES = 256 << 10
"""Unused bytes between two neighbors that are read with them: a request takes as long as to read so many bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A byte range of a file that is verified as a whole: a slice, a value, or the interleaved *slices* of a tensor."""

    file: str
    start: int
    nbytes: int
    slices: tuple[FileSlice, ...]

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.start + self.nbytes


@dataclass
class _Batch:
    """Neighboring parts of a file, and the requests that read them."""

    parts: list[Part]
    requests: list[Future[bytes]] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.parts[0].start

    @property
    def end(self) -> int:
        return self.parts[-1].end


class Files(Protocol):
    """The files of checkpoints in a store, or in the memory of several nodes. ``str()`` is for messages."""

    def read_patiently(self, name: str, start: int, end: int) -> bytes:
        """Read bytes *start* to before *end* of the file *name* (CHECKPOINT/FILE). Raises FileNotFoundError."""


class VerifiedRanges:
    """Reads byte ranges of *trees* of the checkpoint *name*, in *num_threads* requests at once. Used by one thread."""

    def __init__(
        self, files: Files, name: str, trees: Iterable[Tree], *, num_threads: int = 8
    ) -> None:
        self._files, self._name = files, name
        self._contents = FileContents(trees)
        self._parts: dict[str, list[Part]] = {}
        self._pool = ThreadPoolExecutor(num_threads, "ranges")
        self._waiting: deque[_Batch] = deque()
        self._expected: set[Part] = set()
        self._verified: dict[Part, memoryview] = {}

    def close(self) -> None:
        """End the threads, after the requests in progress."""
        self._waiting.clear()
        self._pool.shutdown(cancel_futures=True)

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Read ahead what :meth:`read` will be called for: (file, start, end) of byte ranges, in this order."""
        parts = {}
        for file, start, end in ranges:
            parts.update(dict.fromkeys(self._overlapping(file, start, end)))
        self._verified.clear()
        self._expected = set(parts)
        self._waiting = deque(_batches(parts))
        if self._waiting:
            self._request(self._waiting[0])

    def read(self, file: str, memory: memoryview, start: int) -> None:
        """Fill *memory* with the bytes of *file* from *start*; they must belong to slices or values.

        Raises :class:`CheckpointUnusable` for a missing or damaged object, and :class:`StoreError`.
        """
        end = start + len(memory)
        at = start
        for part in self._overlapping(file, start, end):
            if part.start > at:
                break
            data = self._data(part)
            until = min(part.end, end)
            memory[at - start : until - start] = data[at - part.start : until - part.start]
            at = until
        if at < end:
            raise ValueError(f"bytes {at} to {end} of {file} belong to no slice")

    def damaged(self, file: str) -> list[FileSlice]:
        """Read all slices and values in *file*, and return those that do not match their digests."""
        found = []
        for batch in _batches(self._parts_of_file(file)):
            data = self._content(batch)
            for part in batch.parts:
                found += _damaged(part, data[part.start - batch.start : part.end - batch.start])
        return found

    # ---------------------------------------------------------------- parts

    def _overlapping(self, file: str, start: int, end: int) -> Iterator[Part]:
        """Yield the parts that have bytes from *start* to *end*, in the order of the file."""
        parts = self._parts_of_file(file)
        first = bisect.bisect_right(parts, start, key=lambda part: part.end)
        for part in parts[first:]:
            if part.start >= end:
                return
            yield part

    def _parts_of_file(self, file: str) -> list[Part]:
        """The parts of a file in their order. Of a table, only the rows of the ranks that wrote the file are read."""
        if file not in self._parts:
            self._parts[file] = _parts_of(file, self._contents.slices(file))
        return self._parts[file]

    def _data(self, part: Part) -> memoryview:
        """The verified bytes of *part*."""
        while part in self._expected and part not in self._verified:
            self._receive(self._waiting.popleft())
        if part not in self._verified:
            # It was not expected.
            batch = _Batch([part])
            self._request(batch)
            self._receive(batch)
        return self._verified[part]

    # ---------------------------------------------------------------- requests

    def _request(self, batch: _Batch) -> None:
        if batch.requests:
            return
        file = batch.parts[0].file
        for start in range(batch.start, batch.end, REQUEST_BYTES):
            end = min(start + REQUEST_BYTES, batch.end)
            batch.requests.append(self._pool.submit(self._fetch, file, start, end))

    def _fetch(self, file: str, start: int, end: int) -> bytes:
        try:
            return self._files.read_patiently(f"{self._name}/{file}", start, end)
        except FileNotFoundError:
            raise self._unusable("a file of the checkpoint is missing", file, "") from None

    def _receive(self, batch: _Batch) -> None:
        """Wait for the bytes of *batch*, and verify them. The bytes of the batch before are dropped."""
        self._request(batch)
        if self._waiting:
            # While this one is verified and used.
            self._request(self._waiting[0])
        self._verified.clear()
        data = self._content(batch)
        self._expected.difference_update(batch.parts)
        for part in batch.parts:
            content = data[part.start - batch.start : part.end - batch.start]
            if damaged := _damaged(part, content):
                raise self._unusable(
                    "a file of the checkpoint is not what was saved: its digest differs",
                    part.file,
                    damage_text(damaged),
                )
            self._verified[part] = content

    def _content(self, batch: _Batch) -> memoryview:
        """Wait for the bytes of *batch*."""
        self._request(batch)
        data = b"".join(request.result() for request in batch.requests)
        batch.requests.clear()
        return memoryview(data)

    def _unusable(self, what: str, file: str, value: str) -> CheckpointUnusable:
        return unusable(what, f"{self._files}/{self._name}/{file}", value)


def _damaged(part: Part, content: memoryview) -> list[FileSlice]:
    """Return the slices and values in *part* that do not match their digests, by their bytes in *content*."""
    found = []
    for one in part.slices:
        hashed = xxhash.xxh3_128()
        for run in runs_in_file(one.stored, one.shape):
            start = run.source - part.start
            hashed.update(content[start : start + run.nbytes])
        if digest_from(hashed) != one.stored.digest:
            found.append(one)
    return found


def _parts_of(file: str, slices: Iterable[FileSlice]) -> list[Part]:
    """Divide a file into parts, in their order."""
    found: dict[tuple[int, int], list[FileSlice]] = {}
    for one in slices:
        stored, nbytes = one.stored, one.stored.nbytes
        # An interleaved slice may be in many short ranges, between the ranges of others: the whole tensor is one part.
        if stored.interleaved:
            nbytes = nbytes_of(stored.dtype, one.shape)
        found.setdefault((stored.start, nbytes), []).append(one)
    return [Part(file, *place, tuple(of_part)) for place, of_part in sorted(found.items())]


def _batches(parts: Iterable[Part]) -> Iterator[_Batch]:
    """Divide *parts* into batches of neighbors, of at most :data:`_BATCH_BYTES` unless a part is larger."""
    batch: _Batch | None = None
    for part in parts:
        is_next = (
            batch is not None
            and batch.parts[0].file == part.file
            and 0 <= part.start - batch.end <= _GAP_BYTES
            and part.end - batch.start <= _BATCH_BYTES
        )
        if batch is not None and is_next:
            batch.parts.append(part)
            continue
        if batch is not None:
            yield batch
        batch = _Batch([part])
    if batch is not None:
        yield batch
