"""Slice tables: what a save wrote of each regular slice, in 20 bytes per slice. Imports no torch.

A table describes the slices of a tree that have formulas as shardings (``slices.py``). It has a *row* for each slice:
the digest of its bytes, and the bytes between the slice before in the same file and this one. Rows are grouped into
*segments*: the slices of a part of the tree that one rank stores, in one file. The head of the table lists the
segments, each with the digest of its rows, so that a reader verifies what it reads without reading the rest. Integers
are little-endian.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import xxhash

from automodel_ckpt.checkpoint.files.durable_file import digest_of
from automodel_ckpt.checkpoint.files.safe_open import MAX_INTEGER
from automodel_ckpt.checkpoint.parts.slices import Record, RegularSlices, Slice, Tensor, nbytes_of
from automodel_ckpt.errors import AutomodelError, SaveFailed, unusable

ROW = np.dtype([("gap", "<u4"), ("digest", "V16")])
SEGMENT = np.dtype(
    [
        ("rank", "<u4"),
        ("part", "<u4"),
        ("file", "<u4"),
        ("rows", "<u4"),
        ("start", "<u8"),
        ("stop", "<u8"),
        ("digest", "V16"),
    ]
)
NO_FILE = 2**32 - 1
"""The file of a segment if its tensors have positions in files that several ranks write."""
MIN_TABLE_ROWS = 4096
"""A tree with fewer regular slices has no table: its manifest lists them, which takes up to a megabyte."""
PLEASE_REPORT = "earlier checkpoints are unchanged; please report this"
_PREFIX = "xxh3_128:"
_MAX_GAP = 2**32 - 1

Read = Callable[[str, int, int], bytes]
"""Reads bytes ``start .. start + nbytes`` of a file of the checkpoint: (file, start, nbytes). Raises OSError."""


class Location(NamedTuple):
    """Where a table is stored: its file, and the size in bytes and the digest of its head."""

    file: str
    head_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Segment:
    """The slices in one *file* that one rank stores of the *part* of a tree; *rows* are rows of the table."""

    part: int
    file: str
    start: int
    stop: int
    rows: bytes


def segment_of(slices: Sequence[Slice], part: int, *, placed: bool) -> Segment:
    """The segment of the slices of a rank, which have digests, follow each other in a file, and are in the order of the
    tensors.

    *placed*: their tensors have positions in files of several ranks, so that their own are not stored.
    """
    rows = np.zeros(len(slices), ROW)
    digests = b"".join(_digest_bytes(each) for each in slices)
    rows["digest"] = np.frombuffer(digests, "V16")
    if placed:
        return Segment(part, "", 0, 0, rows.tobytes())
    assert len({each.file for each in slices}) == 1, "a part is one file of a rank"
    starts = np.array([each.start for each in slices], np.int64)
    stops = starts + np.array([each.nbytes for each in slices], np.int64)
    gaps = starts[1:] - stops[:-1]
    assert np.all((gaps >= 0) & (gaps <= _MAX_GAP)), "the slices of a file are in order"
    rows["gap"][1:] = gaps
    return Segment(part, slices[0].file, int(starts[0]), int(stops[-1]), rows.tobytes())


def _digest_bytes(stored: Slice) -> bytes:
    assert stored.digest is not None, f"a slice of {stored.fqn} was not written"
    return bytes.fromhex(stored.digest.removeprefix(_PREFIX))


class SliceTable:
    """The table of a tree, and the regular tensors that it describes, in their order.

    *read* reads the file, and *checkpoint* is for messages. A table that was merged in memory has no file yet, but
    *content*. Raises :class:`CheckpointUnusable` for content that does not match the digests or the tensors; of a table
    in memory :class:`SaveFailed`.
    """

    def __init__(
        self,
        location: Location,
        files: Sequence[str],
        read: Read | None,
        checkpoint: str = "",
        content: bytes = b"",
    ) -> None:
        self.location, self.content = location, content
        self._checkpoint = checkpoint
        self.files = tuple(files)
        self.tensors: list[RegularSlices] = []
        self._read = read
        self._parts: dict[int, list[int]] = {}
        self._rows: dict[tuple[int, int], _Rows] = {}

    @classmethod
    def merged(cls, segments: Mapping[int, Sequence[Segment]], tree: str = "") -> SliceTable:
        """Merge the segments of all ranks, by rank, into a table in memory. *tree* is for messages."""
        numbers: dict[str, int] = {}
        heads = []
        rows = []
        for rank, of_rank in sorted(segments.items()):
            for each in sorted(of_rank, key=lambda segment: segment.part):
                file = numbers.setdefault(each.file, len(numbers)) if each.file else NO_FILE
                num_rows = len(each.rows) // ROW.itemsize
                digest = xxhash.xxh3_128_digest(each.rows)
                heads.append((rank, each.part, file, num_rows, each.start, each.stop, digest))
                rows.append(each.rows)
        content = b"".join([np.array(heads, SEGMENT).tobytes(), *rows])
        head_bytes = len(heads) * SEGMENT.itemsize
        location = Location("", head_bytes, digest_of(content[:head_bytes]))
        return cls(location, list(numbers), None, tree, content)

    def add(self, slices: RegularSlices) -> Tensor:
        """Add the next tensor of the table; return it with its records."""
        added = replace(slices, number=len(self.tensors), records=self)
        self._parts.setdefault(added.part, []).append(added.number)
        self.tensors.append(added)
        return Tensor(added.fqn, added.dtype, added.shape, added)

    @property
    def num_rows(self) -> int:
        """The number of slices of all tensors."""
        return sum(map(len, self.tensors))

    @cached_property
    def segments(self) -> Any:
        """The head: an array of SEGMENT, sorted by rank and part."""
        _, head_bytes, digest = self.location
        data = self._bytes(0, head_bytes)
        if digest_of(data) != digest:
            raise self.damaged("its digest does not match")
        segments = np.frombuffer(data, SEGMENT)
        keys = segments["rank"].astype(np.uint64) << np.uint64(32) | segments["part"]
        is_in_order = np.all(keys[1:] >= keys[:-1]) and np.all(
            segments["start"] <= segments["stop"]
        )
        if not is_in_order or np.any(segments["stop"] > MAX_INTEGER):
            raise self.damaged("its segments are not in order")
        is_in_file = segments["file"] != NO_FILE
        in_rank_files = {each.part for each in self.tensors if each.position is None}
        expected = np.isin(segments["part"], list(in_rank_files))
        too_large = np.any(segments["file"][is_in_file] >= len(self.files))
        num_rows = int(segments["rows"].astype(np.int64).sum())
        if too_large or np.any(is_in_file != expected) or num_rows != self.num_rows:
            raise self.damaged("its segments are not the tensors'")
        return segments

    def byte_ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yield the file, the first byte and the end of each segment that is in a file of its rank."""
        for segment in self.segments:
            if segment["file"] != NO_FILE:
                yield self.files[segment["file"]], int(segment["start"]), int(segment["stop"])

    def ranks_in(self, file: str) -> list[int]:
        """Return the ranks that store slices in a file. Their rows are read."""
        if file not in self.files:
            return []
        is_in_file = self.segments["file"] == self.files.index(file)
        for segment in self.segments[is_in_file]:
            self._decoded(int(segment["rank"]), int(segment["part"]))
        return sorted({int(rank) for rank in self.segments["rank"][is_in_file]})

    def record(self, number: int, rank: int) -> Record:
        rows = self._decoded(rank, self.tensors[number].part)
        index = bisect.bisect_left(rows.numbers, number)
        digest = rows.digests[16 * index : 16 * index + 16].hex()
        return Record(rows.file, rows.starts[index], _PREFIX + digest)

    def _decoded(self, rank: int, part: int) -> _Rows:
        if (rank, part) not in self._rows:
            self._rows[rank, part] = self._rows_of(rank, part)
        return self._rows[rank, part]

    def _rows_of(self, rank: int, part: int) -> _Rows:
        """Read and decode the rows of a rank's segment of a part."""
        numbers, nbytes = self._slices_of(rank, part)
        is_wanted = (self.segments["rank"] == rank) & (self.segments["part"] == part)
        found = np.flatnonzero(is_wanted)
        if len(found) != 1 or int(self.segments["rows"][found[0]]) != len(numbers):
            raise self.damaged(f"rank {rank} has other slices than its tensors")
        segment = self.segments[found[0]]
        rows = self._segment_rows(int(found[0]))
        digests = rows["digest"].tobytes()
        if segment["file"] == NO_FILE:
            return _Rows(numbers, "", [0] * len(numbers), digests)
        # Python's integers: a sum in 64 bits could overflow to the expected value.
        total = sum(nbytes) + int(rows["gap"].sum())
        if total != int(segment["stop"]) - int(segment["start"]):
            raise self.damaged(f"the segment of rank {rank} has another length than its slices")
        sizes = np.array([0, *nbytes[:-1]], np.int64)
        starts = int(segment["start"]) + np.cumsum(sizes + rows["gap"])
        return _Rows(numbers, self.files[segment["file"]], starts.tolist(), digests)

    def _slices_of(self, rank: int, part: int) -> tuple[list[int], list[int]]:
        """The numbers of the tensors of a part of which *rank* stores a slice, and the bytes of each slice."""
        numbers = []
        nbytes = []
        for number in self._parts.get(part, ()):
            tensor = self.tensors[number]
            box = tensor.box_of_rank(rank)
            if box is not None:
                numbers.append(number)
                nbytes.append(nbytes_of(tensor.dtype, box.sizes))
        return numbers, nbytes

    def all_rows(self) -> Any:
        """Return the rows of all segments, in their order: an array of ROW."""
        rows = [self._segment_rows(index) for index in range(len(self.segments))]
        return np.concatenate(rows) if rows else np.empty(0, ROW)

    def _segment_rows(self, index: int) -> Any:
        first_row = int(self._first_rows[index])
        num_rows = int(self.segments["rows"][index])
        start = self.location.head_bytes + first_row * ROW.itemsize
        data = self._bytes(start, num_rows * ROW.itemsize)
        if xxhash.xxh3_128_digest(data) != self.segments["digest"][index].tobytes():
            raise self.damaged("the digest of its rows does not match")
        return np.frombuffer(data, ROW)

    @cached_property
    def _first_rows(self) -> Any:
        rows = self.segments["rows"].astype(np.int64)
        return np.cumsum(rows) - rows

    def _bytes(self, start: int, nbytes: int) -> bytes:
        data = self.content[start : start + nbytes]
        try:
            if self._read is not None:
                data = self._read(self.location.file, start, nbytes)
        except OSError as error:
            raise self.damaged(f"it cannot be read: {error.strerror}") from error
        if len(data) != nbytes:
            raise self.damaged("it is shorter than the manifest states")
        return data

    def damaged(self, how: str) -> AutomodelError:
        """Return the error for a table that cannot be used: :class:`SaveFailed` for one that a save merges."""
        if self._read is None:
            return SaveFailed(
                "the ranks did not write the slices that were planned",
                where=self._checkpoint,
                value=how,
                hint=PLEASE_REPORT,
            )
        what = "the table of the checkpoint's slices is damaged"
        return unusable(what, os.path.join(self._checkpoint, self.location.file), how)


class _Rows(NamedTuple):
    """The slices of a rank in a file: numbers of their tensors (increasing), first bytes, digests of 16 bytes each."""

    numbers: list[int]
    file: str
    starts: list[int]
    digests: bytes
