"""What a rank has to write, as plain data: planned where the state is, carried out there or in another process.

A format only plans :class:`FileJob` objects: which files, which bytes in which order, and which entry of the rank's
:class:`~automodel_ckpt.checkpoint.writing.parts.Part` each stretch of bytes is. Carrying one out needs no torch: it
writes, digests and fsyncs, and completes the part. The bytes come from the live state (a synchronous save), or from a
stretch of memory that they were copied into (an asynchronous one).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from automodel_ckpt.checkpoint.digests import digest_of
from automodel_ckpt.checkpoint.files.durable import DurableFile
from automodel_ckpt.checkpoint.manifest import Blob
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.writing.parts import Part, TreePart

CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``start .. start + nbytes`` of the memory that jobs are carried out with."""

    start: int
    nbytes: int


Data = bytes | Span | Callable[[], memoryview]
"""The bytes themselves, where they stand in a memory, or a function that fetches them: called once, as late as can be,
since they may be a copy."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a file, from *start*.

    *entry* is what they are to the manifest, still without its digest. *crc_at* lists where in them (which are bytes
    then) the CRC-32 of the piece before has to be filled in, little-endian.
    """

    start: int
    data: Data
    entry: Tensor | Blob | None = None
    crc_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FileJob:
    """A new file that this rank alone writes, front to back.

    *file* is relative to the checkpoint; *tree* is the one that the pieces' entries belong to, None for a file without
    any. *nbytes* of space are reserved first; 0 where its size is not known.
    """

    file: str
    pieces: Sequence[Piece]
    tree: str | None = None
    nbytes: int = 0

    @property
    def size(self) -> int:
        return self.nbytes or sum(_length(piece.data) for piece in self.pieces)

    def data(self) -> Sequence[tuple[int, Data]]:
        return [(piece.start, piece.data) for piece in self.pieces]

    def over(self, data: Sequence[Data]) -> FileJob:
        return replace(self, pieces=[replace(piece, data=own) for piece, own in zip(self.pieces, data, strict=True)])

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
    """Something to write: a file of one's own, or one's share of a common one.

    :meth:`data` are the bytes that it takes, with the place in the file where they go; :meth:`over` is the same job
    with these bytes elsewhere, such as in the memory that :meth:`run` gets; :attr:`size` is about how many it writes.
    """

    @property
    def size(self) -> int:
        """Bytes, about."""

    def data(self) -> Sequence[tuple[int, Data]]:
        """(byte in the file, what goes there), for each piece."""

    def over(self, data: Sequence[Data]) -> Job:
        """The same job with other *data*, one for each of its own."""

    def run(self, staging: Path, part: Part, memory: memoryview) -> None:
        """Write below *staging*, and enter into *part* what was written. Raises OSError naming the file."""


def run_all(jobs: Iterable[Job], staging: Path, part: Part, memory: memoryview | None = None) -> None:
    """Carry out jobs in their order; what they wrote stands in *part*. *memory* is what their spans are of."""
    for job in jobs:
        job.run(staging, part, memoryview(b"") if memory is None else memory)


def _length(data: Data) -> int:
    """Bytes, as far as they are known before they are fetched."""
    return len(data) if isinstance(data, bytes) else int(getattr(data, "nbytes", 0))


def _whole(pieces: Sequence[Piece]) -> Span | None:
    """All pieces as one, where they stand in memory as they will in the file: it can be written from there."""
    first = pieces[0].data if pieces else None
    if not isinstance(first, Span):
        return None
    end = first.start
    for piece in pieces:
        if not isinstance(piece.data, Span) or piece.data.start != end:
            return None
        end += piece.data.nbytes
    return Span(first.start, end - first.start)


def with_bytes(pieces: Iterable[Piece], memory: memoryview) -> Iterator[tuple[Piece, bytes | memoryview]]:
    """Each piece with its bytes, the checksums filled in (of a span: in the memory itself)."""
    before: bytes | memoryview = b""
    for piece in pieces:
        data = fetched(piece.data, memory)
        if piece.crc_at:
            data = _with_crc(data, piece.crc_at, zlib.crc32(before))
        before = data
        yield piece, data


def enter(tree: TreePart, piece: Piece, data: bytes | memoryview) -> None:
    """Put a piece's entry, now with its digest, into what this rank wrote of a tree."""
    if isinstance(piece.entry, Blob):
        tree.objects.append(replace(piece.entry, digest=digest_of(data)))
    elif piece.entry is not None:
        (stored,) = piece.entry.slices
        tree.tensors.append(replace(piece.entry, slices=(replace(stored, digest=digest_of(data)),)))


def fetched(data: Data, memory: memoryview) -> bytes | memoryview:
    """The bytes themselves; *memory* is what spans are of."""
    if isinstance(data, Span):
        return memory[data.start : data.start + data.nbytes]
    return data if isinstance(data, bytes) else data()


def _with_crc(data: bytes | memoryview, places: Sequence[int], value: int) -> memoryview:
    filled = memoryview(bytearray(data)) if isinstance(data, bytes) else data
    for place in places:
        filled[place : place + CRC_BYTES] = value.to_bytes(CRC_BYTES, "little")
    return filled
