"""Write this rank's slices at their offsets in files that several ranks write.

The first rank that opens a file creates it; rank 0 reserves its space and writes its header. A rank writes only the
bytes of its slices, so that the order of the ranks does not matter. Imports no torch.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import xxhash

from automodel_ckpt.checkpoint.digests import FileRecord, digest_from, digest_of
from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.direct import (
    BLOCK_BYTES,
    DIRECT_FROM_BYTES,
    METER,
    DirectStream,
)
from automodel_ckpt.checkpoint.slices import Run, Tensor, runs_in_file
from automodel_ckpt.checkpoint.writing.jobs import Data, fetched
from automodel_ckpt.checkpoint.writing.rank_manifest import Part, TreePart
from automodel_ckpt.durable_io import naming, write_all

# A run shorter than this, alone, is not worth a thread's attention.
_STREAM_FROM_BYTES = 64 << 10
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True, slots=True)
class SharedFileChunk:
    """A slice to be written: *entry* has its final position and dtype, *dtype* is that of *data*.

    A *copy* is entered as an additional copy of its tensor.
    """

    entry: Tensor
    data: Data
    dtype: str
    copy: bool = False


@dataclass(frozen=True, slots=True)
class SharedFileJob:
    """This rank's share of a file of *nbytes* bytes that several ranks write.

    *file* is relative to the checkpoint, *tree* is the tree of the slices. *header* is not None on the rank that
    writes the file's header.
    """

    file: str
    nbytes: int
    pieces: Sequence[SharedFileChunk]
    tree: str
    header: bytes | None = None

    @property
    def size(self) -> int:
        return sum(piece.entry.slices[0].nbytes for piece in self.pieces)

    def data(self) -> Sequence[tuple[int, Data]]:
        return [(piece.entry.slices[0].start, piece.data) for piece in self.pieces]

    def over(self, data: Sequence[Data]) -> SharedFileJob:
        return replace(
            self,
            pieces=[replace(piece, data=own) for piece, own in zip(self.pieces, data, strict=True)],
        )

    def run(self, staging: Path, part: Part, memory: memoryview) -> None:
        """Write the share below *staging* and enter its slices into *part*. Raises OSError naming the file."""
        tree = part.trees.setdefault(self.tree, TreePart())
        with SharedFile(staging / self.file, direct=self.size >= DIRECT_FROM_BYTES) as out:
            if self.header is not None:
                out.make(self.header, self.nbytes)
                part.placed[self.file] = FileRecord(self.nbytes, digest_of(self.header))
            for piece in self.pieces:
                digest = out.put(piece, fetched(piece.data, memory))
                stored = replace(piece.entry.slices[0], digest=digest)
                entered = replace(piece.entry, slices=(stored,))
                (tree.copies if piece.copy else tree.tensors).append(entered)


class SharedFile:
    """A file that several ranks write, open for writing at given offsets; fsynced when the block succeeds.

    With *direct*, long byte ranges bypass the page cache where the file system supports it.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        self.path = path
        self._descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
        )
        self._stream = DirectStream(self._descriptor, path) if direct else None

    def make(self, header: bytes, nbytes: int) -> None:
        """Reserve *nbytes* for the file, so that a full disk is found now, and write its header."""
        with naming(self.path):
            _reserve(self._descriptor, nbytes)
            write_all(self._descriptor, memoryview(header), 0)

    def put(self, piece: SharedFileChunk, data: bytes | memoryview) -> str:
        """Write a slice at its position; return the digest of its bytes as stored."""
        hashed = xxhash.xxh3_128()
        (stored,) = piece.entry.slices
        view = memoryview(data).cast("B")
        with naming(self.path):
            for group in _groups(runs_in_file(stored, piece.entry.shape)):
                block = _converted(view, group, piece.dtype, stored.dtype)
                hashed.update(block)
                METER.nbytes += len(block)
                for run in group:
                    at = run.target - group[0].target
                    self._write(block[at : at + run.nbytes], run.source)
        return digest_from(hashed)

    def _write(self, data: memoryview, start: int) -> None:
        if self._stream is not None and (
            len(data) >= _STREAM_FROM_BYTES or self._stream.end == start
        ):
            self._stream.write(data, start)
        else:
            write_all(self._descriptor, data, start)

    def __enter__(self) -> SharedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        with naming(self.path):
            try:
                if self._stream is not None:
                    self._stream.close(finish=kind is None)
                if kind is None:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _groups(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Group consecutive runs into about BLOCK_BYTES bytes each; longer runs are split."""
    group: list[Run] = []
    nbytes = 0
    for run in runs:
        for done in range(0, run.nbytes, BLOCK_BYTES):
            group.append(
                Run(run.source + done, run.target + done, min(BLOCK_BYTES, run.nbytes - done))
            )
            nbytes += group[-1].nbytes
            if nbytes >= BLOCK_BYTES:
                yield group
                group, nbytes = [], 0
    if group:
        yield group


def _converted(view: memoryview, group: Sequence[Run], source: str, target: str) -> memoryview:
    """The bytes of a group's runs, cast from dtype *source* to dtype *target*."""
    first, last = group[0].target, group[-1].target + group[-1].nbytes
    if source == target:
        return view[first:last]
    import numpy as np

    from automodel_ckpt.checkpoint.tensors.float_cast import cast, storage_dtype

    wide, narrow = DTYPE_BITS[source], DTYPE_BITS[target]
    values = np.frombuffer(
        view[first * wide // narrow : last * wide // narrow], storage_dtype(source, wide)
    )
    return memoryview(cast(values, source, target).view(np.uint8).data)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Allocate disk space without changing bytes that other ranks may have written.

    Uses the system call: where a file system lacks it, the C library's posix_fallocate writes zeros into blocks that
    it finds empty, which another rank may be writing.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    done = -1
    if fallocate is not None:
        done = fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))
        code = ctypes.get_errno()
        if done != 0 and code not in _UNSUPPORTED:
            raise OSError(code, os.strerror(code))
    if done != 0 and os.fstat(descriptor).st_size < nbytes:
        os.ftruncate(descriptor, nbytes)
