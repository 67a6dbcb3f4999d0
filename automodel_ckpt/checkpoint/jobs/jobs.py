"""Write jobs: what a rank writes, as plain data; planned in the trainer, executed there or in the writer process.

A format only plans jobs: which files, which chunks of bytes in which order, and which entry of the rank manifest each
chunk gets. Executing a job needs no torch: it writes, computes digests, calls fsync, and completes the rank manifest.
The bytes come from the live state (synchronous saves) or from shared memory that they were copied into (asynchronous
saves).

A file can be written by several ranks, each its slices at their offsets. The first rank that opens the file creates it;
rank 0 reserves its space and writes its header. A rank writes only the bytes of its slices, so that the order of the
ranks does not matter.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import xxhash

from automodel_ckpt.base.durable_io import naming, write_all
from automodel_ckpt.checkpoint.files.durable_file import (
    BLOCK_BYTES,
    DIRECT_FROM_BYTES,
    METER,
    DirectStream,
    DurableFile,
    FileRecord,
    digest_from,
    digest_of,
    reserve_range,
)
from automodel_ckpt.checkpoint.jobs.rank_manifest import RankManifest, RankTree
from automodel_ckpt.checkpoint.jobs.reuse import Previous, ReusableFiles
from automodel_ckpt.checkpoint.parts.slices import Run, Tensor, runs_in_file
from automodel_ckpt.checkpoint.parts.tree import Blob

# Shorter runs that do not continue the stream are written without it: each would cost a switch of threads.
_STREAM_FROM_BYTES = 64 << 10


class SharedFile:
    """A file that several ranks write, open for writing at given offsets; fsynced when the block succeeds.

    *nbytes* is approximately what this rank writes. From 8 MiB on, long byte ranges bypass the page cache where the
    file system supports it. Raises :class:`OSError` naming the file.
    """

    def __init__(self, path: Path, *, nbytes: int) -> None:
        self.path = path
        # Not O_EXCL: any rank may be the first.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        if os.fstat(self._descriptor).st_nlink > 1:
            os.close(self._descriptor)
            # Incremental saves share files with published checkpoints, which never change.
            raise OSError(errno.EPERM, "a file with several names must not be changed", str(path))
        self._stream: DirectStream | None = None
        if nbytes >= DIRECT_FROM_BYTES:
            self._stream = DirectStream(self._descriptor, path)

    def create(self, header: bytes | memoryview, nbytes: int) -> None:
        """Reserve *nbytes* for the whole file, so that a full disk is found now, and write its header."""
        with naming(self.path):
            if not reserve_range(self._descriptor, 0, nbytes):
                self._extend(nbytes)
            write_all(self._descriptor, memoryview(header), 0)

    def _extend(self, nbytes: int) -> None:
        # Never shortens the file: nbytes is the size of the whole file, so no rank's bytes are lost.
        if os.fstat(self._descriptor).st_size < nbytes:
            os.ftruncate(self._descriptor, nbytes)

    def write_slice(self, entry: Tensor, data: bytes | memoryview) -> str:
        """Write the one slice of *entry*, with the row-major bytes *data*, at its position; return their digest."""
        hashed = xxhash.xxh3_128()
        (stored,) = entry.slices
        view = memoryview(data).cast("B")
        with naming(self.path):
            for group in _groups(runs_in_file(stored, entry.shape)):
                first = group[0].target
                block = view[first : group[-1].target + group[-1].nbytes]
                hashed.update(block)
                METER.nbytes += len(block)
                for run in group:
                    offset = run.target - first
                    self._write(block[offset : offset + run.nbytes], run.source)
        return digest_from(hashed)

    def _write(self, data: memoryview, start: int) -> None:
        stream = self._stream
        if stream is not None and (len(data) >= _STREAM_FROM_BYTES or stream.end == start):
            stream.write(data, start)
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
                    # On every rank: what it wrote is in the page cache of its node.
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _groups(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Group consecutive runs into about BLOCK_BYTES bytes each; longer runs are split."""
    group = []
    nbytes = 0
    for run in runs:
        for offset in range(0, run.nbytes, BLOCK_BYTES):
            length = min(BLOCK_BYTES, run.nbytes - offset)
            group.append(Run(run.source + offset, run.target + offset, length))
            nbytes += length
            if nbytes >= BLOCK_BYTES:
                yield group
                group, nbytes = [], 0
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``start .. start + nbytes`` of the memory that jobs are run with."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bytes that are computed block by block while they are written, so that no more than a block is in memory.

    *blocks* is called once; the blocks that it yields have *nbytes* bytes in total. Each is valid until the next one.
    """

    nbytes: int
    blocks: Callable[[], Iterator[memoryview]]


Data = bytes | Span | Blocks | Callable[[], memoryview | Blocks]
"""The bytes, their position in shared memory, their blocks, or a function that fetches them: called once, as late as
possible, as the bytes may be a copy."""


class Chunk(NamedTuple):
    """Bytes that a job writes, from byte *start* of its file.

    *entry* is the manifest entry of the chunk, still without digest; None for headers. *is_copy* marks an additional
    copy of a tensor in a shared file.
    """

    start: int
    data: Data
    entry: Tensor | Blob | None = None
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class FileJob:
    """A new file that this rank writes sequentially, or its share of a file that several ranks write.

    *file* is relative to the checkpoint; *tree* is the tree of the chunks' entries, None for a file without entries.
    *nbytes* of disk space are reserved first; 0 where the size is not known. *reusable*: the content, a header and
    tensors, rarely changes, so that the file of the previous checkpoint can be shared.

    Of a file that *is_shared*, each rank writes tensors at their offsets, and one of them also the header, a chunk
    without an entry. *nbytes* is then the size of the whole file.
    """

    file: str
    chunks: Sequence[Chunk]
    tree: str | None = None
    nbytes: int = 0
    reusable: bool = False
    is_shared: bool = False

    @property
    def size(self) -> int:
        """Approximate bytes that this rank writes."""
        if self.nbytes and not self.is_shared:
            return self.nbytes
        return sum(_length(chunk.data) for chunk in self.chunks)

    def run(self, staging: Path, written: RankManifest, memory: memoryview) -> None:
        """Write the file below *staging*; add it and its chunks to *written*. Raises OSError naming the file."""
        path = staging / self.file
        # Another rank may create the directory of an object that differs between ranks.
        path.parent.mkdir(exist_ok=True)
        tree = RankTree() if self.tree is None else written.trees.setdefault(self.tree, RankTree())
        if self.is_shared:
            self._write_share(path, written, memory, tree)
            return
        with DurableFile(path, nbytes=self.nbytes) as out:
            _write_chunks(out, self.chunks, memory, tree)
        written.files[self.file] = out.close()

    def _write_share(
        self, path: Path, written: RankManifest, memory: memoryview, tree: RankTree
    ) -> None:
        with SharedFile(path, nbytes=self.size) as out:
            for chunk in self.chunks:
                data = _bytes_of(chunk.data, memory)
                if chunk.entry is None:
                    out.create(data, self.nbytes)
                    written.placed[self.file] = FileRecord(self.nbytes, digest_of(data))
                    continue
                assert isinstance(chunk.entry, Tensor)
                digest = out.write_slice(chunk.entry, data)
                tree.add(chunk.entry, digest, is_copy=chunk.is_copy)

    def link(
        self, staging: Path, written: RankManifest, memory: memoryview, files: ReusableFiles
    ) -> bool:
        """Link the file of the previous checkpoint if it has the same content. Returns whether it was linked."""
        if files.record(self.file) is None:
            return False
        header = bytes(_bytes_of(self.chunks[0].data, memory))
        found = RankTree()
        for chunk in self.chunks[1:]:
            assert chunk.entry is not None
            found.add(chunk.entry, digest_of(_bytes_of(chunk.data, memory)))
        record = files.same_file(self.file, header, [tensor.slices[0] for tensor in found.tensors])
        if record is None or not files.link(self.file, record, staging):
            return False
        assert self.tree is not None
        written.trees.setdefault(self.tree, RankTree()).tensors += found.tensors
        written.files[self.file] = record
        return True


def with_data(job: FileJob, data: Sequence[Data]) -> FileJob:
    """A copy of *job* with other *data* in its chunks, one for each chunk."""
    pairs = zip(job.chunks, data, strict=True)
    return replace(job, chunks=[chunk._replace(data=new_data) for chunk, new_data in pairs])


def run_all(
    jobs: Iterable[FileJob],
    staging: Path,
    written: RankManifest,
    memory: memoryview | None = None,
    previous: Previous | None = None,
) -> None:
    """Run *jobs* and add what they wrote to *written*. Spans refer to *memory*.

    Unchanged files are shared with the checkpoint *previous*.
    """
    view = memoryview(b"") if memory is None else memory
    reusable: ReusableFiles | None = None
    for job in jobs:
        if job.reusable and reusable is None:
            # Not before: most saves have no reusable file, and the manifest need not be read.
            reusable = ReusableFiles.open(previous)
        is_linked = False
        if job.reusable and reusable is not None:
            is_linked = job.link(staging, written, view, reusable)
        if not is_linked:
            job.run(staging, written, view)


def _length(data: Data) -> int:
    """Bytes of *data*; 0 for a function, because its length is not known before it is called."""
    if isinstance(data, bytes):
        return len(data)
    return int(getattr(data, "nbytes", 0))


def _contiguous_span(chunks: Sequence[Chunk]) -> Span | None:
    """One span for all chunks where they are consecutive in memory, so that they can be written together."""
    first = chunks[0].data if chunks else None
    if not isinstance(first, Span):
        return None
    end = first.start
    for chunk in chunks:
        if not isinstance(chunk.data, Span) or chunk.data.start != end:
            return None
        end += chunk.data.nbytes
    return Span(first.start, end - first.start)


def _write_chunks(
    out: DurableFile, chunks: Sequence[Chunk], memory: memoryview, tree: RankTree
) -> None:
    """Write *chunks*, and add their entries with their digests to *tree*."""
    contiguous = _contiguous_span(chunks)
    written = end = 0 if contiguous is None else contiguous.start
    for chunk in chunks:
        hashed = xxhash.xxh3_128()
        for block in _blocks_of(chunk.data, memory):
            hashed.update(block)
            end += len(block)
            if contiguous is None:
                out.write(block)
        # In whole blocks, which O_DIRECT writes from this memory: chunks may be far smaller.
        while contiguous is not None and end - written >= BLOCK_BYTES:
            out.write(memory[written : written + BLOCK_BYTES])
            written += BLOCK_BYTES
        if chunk.entry is not None:
            tree.add(chunk.entry, digest_from(hashed))
    if contiguous is not None:
        out.write(memory[written:end])


def _blocks_of(data: Data, memory: memoryview) -> Iterator[bytes | memoryview]:
    """Yield the bytes of *data*; spans refer to *memory*. A block is valid until the next one."""
    found = data() if callable(data) else data
    if isinstance(found, Span):
        yield memory[found.start : found.start + found.nbytes]
    elif isinstance(found, Blocks):
        nbytes = 0
        for block in found.blocks():
            nbytes += len(block)
            yield block
        assert nbytes == found.nbytes, "the header of the file states another size"
    else:
        yield found


def _bytes_of(data: Data, memory: memoryview) -> bytes | memoryview:
    """All bytes of *data*; spans refer to *memory*."""
    found = data() if callable(data) else data
    if isinstance(found, Span):
        return memory[found.start : found.start + found.nbytes]
    if not isinstance(found, Blocks):
        return found
    joined = memoryview(bytearray(found.nbytes))
    position = 0
    for block in _blocks_of(found, memory):
        joined[position : position + len(block)] = block
        position += len(block)
    return joined
