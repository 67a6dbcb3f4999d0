"""Write jobs: what a rank writes, as plain data; planned in the trainer, executed there or in the writer process.

A format only plans :class:`FileJob` objects: which files, which bytes in which order, and which entry of the rank
manifest (:class:`~automodel_ckpt.checkpoint.writing.rank_manifest.Part`) each byte range gets. Executing a job needs no
torch: it writes, computes digests, calls fsync, and completes the rank manifest. The bytes come from the live state
(synchronous saves) or from shared memory that they were copied into (asynchronous saves).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from automodel_ckpt.checkpoint.digests import digest_of
from automodel_ckpt.checkpoint.files.durable_file import DurableFile
from automodel_ckpt.checkpoint.manifest import Blob
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.writing.rank_manifest import Part, TreePart

CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``start .. start + nbytes`` of the memory that jobs are carried out with."""

    start: int
    nbytes: int


Data = bytes | Span | Callable[[], memoryview]
"""The bytes, their position in shared memory, or a function that fetches them: called once, as late as possible, as
the bytes may be a copy."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk: consecutive bytes of a file, from byte *start*.

    *entry* is its manifest entry, still without digest. *crc_at* lists offsets in the chunk (which is bytes then)
    where the little-endian CRC-32 of the previous chunk is filled in.
    """

    start: int
    data: Data
    entry: Tensor | Blob | None = None
    crc_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FileJob:
    """A new file that only this rank writes, sequentially.

    *file* is relative to the checkpoint; *tree* is the tree of the chunks' entries, None for a file without entries.
    *nbytes* of disk space are reserved first; 0 where the size is not known.
    """

    file: str
    pieces: Sequence[Chunk]
    tree: str | None = None
    nbytes: int = 0

    @property
    def size(self) -> int:
        return self.nbytes or sum(_length(piece.data) for piece in self.pieces)

    def data(self) -> Sequence[tuple[int, Data]]:
        return [(piece.start, piece.data) for piece in self.pieces]

    def over(self, data: Sequence[Data]) -> FileJob:
        return replace(
            self,
            pieces=[replace(piece, data=own) for piece, own in zip(self.pieces, data, strict=True)],
        )

    def run(self, staging: Path, part: Part, memory: memoryview) -> None:
        """Write the file below *staging* and enter it, and its pieces, into *part*. Raises OSError naming the file."""
        path = staging / self.file
        path.parent.mkdir(exist_ok=True)
        tree = part.trees.setdefault(self.tree, TreePart()) if self.tree is not None else TreePart()
        whole = _whole(self.pieces)
        with DurableFile(path, nbytes=self.nbytes) as out:
            for piece, data in with_bytes(self.pieces, memory):
                if whole is None:
                    out.write(data)
                enter(tree, piece, data)
            if whole is not None:
                out.write(memory[whole.start : whole.start + whole.nbytes])
        part.files[self.file] = out.close()


class Job(Protocol):
    """Something to write: a whole file, or this rank's share of a shared file.

    :meth:`data` lists its bytes with their file offsets; :meth:`over` returns the job with these bytes in another
    place, such as the memory that :meth:`run` receives; :attr:`size` is approximately what it writes.
    """

    @property
    def size(self) -> int:
        """Approximate bytes to write."""

    def data(self) -> Sequence[tuple[int, Data]]:
        """(offset in the file in bytes, data) of each chunk."""

    def over(self, data: Sequence[Data]) -> Job:
        """A copy of this job with other *data*, one for each chunk."""

    def run(self, staging: Path, part: Part, memory: memoryview) -> None:
        """Write below *staging*, and enter what was written into *part*. Raises OSError naming the file."""


def run_all(
    jobs: Iterable[Job], staging: Path, part: Part, memory: memoryview | None = None
) -> None:
    """Run *jobs* in order and enter what they wrote into *part*. Spans refer to *memory*."""
    for job in jobs:
        job.run(staging, part, memoryview(b"") if memory is None else memory)


def _length(data: Data) -> int:
    """Bytes of *data*; 0 for a function, whose length is not known before it is called."""
    return len(data) if isinstance(data, bytes) else int(getattr(data, "nbytes", 0))


def _whole(pieces: Sequence[Chunk]) -> Span | None:
    """One span for all chunks, where they are consecutive in memory, so that they can be written in one call."""
    first = pieces[0].data if pieces else None
    if not isinstance(first, Span):
        return None
    end = first.start
    for piece in pieces:
        if not isinstance(piece.data, Span) or piece.data.start != end:
            return None
        end += piece.data.nbytes
    return Span(first.start, end - first.start)


def with_bytes(
    pieces: Iterable[Chunk], memory: memoryview
) -> Iterator[tuple[Chunk, bytes | memoryview]]:
    """Each chunk with its bytes and with checksums filled in (for a span: in the memory)."""
    before: bytes | memoryview = b""
    for piece in pieces:
        data = fetched(piece.data, memory)
        if piece.crc_at:
            data = _with_crc(data, piece.crc_at, zlib.crc32(before))
        before = data
        yield piece, data


def enter(tree: TreePart, piece: Chunk, data: bytes | memoryview) -> None:
    """Add the entry of a chunk, with the digest of *data*, to what this rank wrote of a tree."""
    if isinstance(piece.entry, Blob):
        tree.objects.append(replace(piece.entry, digest=digest_of(data)))
    elif piece.entry is not None:
        (stored,) = piece.entry.slices
        tree.tensors.append(replace(piece.entry, slices=(replace(stored, digest=digest_of(data)),)))


def fetched(data: Data, memory: memoryview) -> bytes | memoryview:
    """The bytes of *data*; spans refer to *memory*."""
    if isinstance(data, Span):
        return memory[data.start : data.start + data.nbytes]
    return data if isinstance(data, bytes) else data()


def _with_crc(data: bytes | memoryview, places: Sequence[int], value: int) -> memoryview:
    filled = memoryview(bytearray(data)) if isinstance(data, bytes) else data
    for place in places:
        filled[place : place + CRC_BYTES] = value.to_bytes(CRC_BYTES, "little")
    return filled
