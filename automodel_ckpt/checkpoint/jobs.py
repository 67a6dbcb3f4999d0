"""What a rank has to write, as plain data: planned where the state is, carried out there or in another process.

A format only plans :class:`FileJob` objects: which files, which bytes in which order, and which entry of the rank's
:class:`~automodel_ckpt.checkpoint.manifest.Part` each stretch of bytes is. Carrying one out needs no torch: it writes,
digests and fsyncs, and completes the part. The bytes come from the live state (a synchronous save), or from a stretch
of memory that they were copied into (an asynchronous one).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from automodel_ckpt.checkpoint.durable import DurableFile
from automodel_ckpt.checkpoint.manifest import Blob, Part, TreePart, digest_of
from automodel_ckpt.checkpoint.slices import Tensor

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

    def run(self, staging: Path, part: Part, memory: memoryview) -> None:
        """Write the file below *staging* and enter it, and its pieces, into *part*. Raises OSError naming the file."""
        path = staging / self.file
        path.parent.mkdir(exist_ok=True)
        tree = part.trees.setdefault(self.tree, TreePart()) if self.tree is not None else TreePart()
        with DurableFile(path, nbytes=self.nbytes) as out:
            for piece, data in with_bytes(self.pieces, memory):
                out.write(data)
                enter(tree, piece, data)
        part.files[self.file] = out.close()


class Job(Protocol):
    """Something to write: a file of one's own, or one's share of a common one."""

    def run(self, staging: Path, part: Part, memory: memoryview) -> None: ...


def run_all(jobs: Iterable[Job], staging: Path, part: Part, memory: memoryview | None = None) -> None:
    """Carry out jobs in their order; what they wrote stands in *part*. *memory* is what their spans are of."""
    for job in jobs:
        job.run(staging, part, memoryview(b"") if memory is None else memory)


def with_bytes(pieces: Iterable[Piece], memory: memoryview) -> Iterator[tuple[Piece, bytes | memoryview]]:
    """Each piece with its bytes, the checksums filled in."""
    crc = _Crc()
    for piece in pieces:
        data = fetched(piece.data, memory)
        if piece.crc_at:
            data = _with_crc(data, piece.crc_at, crc.value)
        crc.before = data
        yield piece, data


def enter(tree: TreePart, piece: Piece, data: bytes | memoryview) -> None:
    """Put a piece's entry, now with its digest, into what this rank wrote of a tree."""
    if isinstance(piece.entry, Blob):
        tree.objects.append(replace(piece.entry, digest=digest_of(data)))
    elif piece.entry is not None:
        (stored,) = piece.entry.slices
        tree.tensors.append(replace(piece.entry, slices=(replace(stored, digest=digest_of(data)),)))


@dataclass(slots=True)
class _Crc:
    """The checksum of the bytes before, computed only if it is asked for."""

    before: bytes | memoryview = b""

    @property
    def value(self) -> int:
        return zlib.crc32(self.before)


def fetched(data: Data, memory: memoryview) -> bytes | memoryview:
    if isinstance(data, Span):
        return memory[data.start : data.start + data.nbytes]
    return data if isinstance(data, bytes) else data()


def _with_crc(data: bytes | memoryview, places: Sequence[int], value: int) -> bytes:
    filled = bytearray(data)
    for place in places:
        filled[place : place + CRC_BYTES] = value.to_bytes(CRC_BYTES, "little")
    return bytes(filled)
