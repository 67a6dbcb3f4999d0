"""Write jobs: what a rank writes, as plain data; planned in the trainer, executed there or in the writer process.

A format only plans jobs: which files, which chunks of bytes in which order, and which entry of the rank manifest each
chunk gets. Executing a job needs no torch: it writes, computes digests, calls fsync, and completes the rank manifest.
The bytes come from the live state (synchronous saves) or from shared memory that they were copied into (asynchronous
saves).
"""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from automodel_ckpt.checkpoint.files.digests import FileRecord, digest_of
from automodel_ckpt.checkpoint.files.direct import BLOCK_BYTES
from automodel_ckpt.checkpoint.files.durable_file import DurableFile
from automodel_ckpt.checkpoint.files.threads import CallingThread, started_pool
from automodel_ckpt.checkpoint.jobs.checksums import (
    PARALLEL_FROM_BYTES,
    BlockChecksums,
    Checksums,
    num_threads,
)
from automodel_ckpt.checkpoint.jobs.rank_manifest import RankManifest, RankTree
from automodel_ckpt.checkpoint.jobs.reuse import Previous, ReusableFiles
from automodel_ckpt.checkpoint.jobs.shared_file import SharedFile, slice_digest
from automodel_ckpt.checkpoint.parts.manifest import Blob
from automodel_ckpt.checkpoint.parts.slices import Tensor

CRC_BYTES = 4
# Threads that compute the digests of reusable files.
_NUM_THREADS = 2
_THREADS_FROM_BYTES = 32 << 20
"""From this size of a file on, other threads compute its checksums."""
_AHEAD_BYTES = 256 << 20
"""The checksums of about so many bytes are computed ahead of those that are written."""
_AHEAD_CHUNKS = 256
_IN_MEMORY = (bytes, memoryview)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``start .. start + nbytes`` of the memory that jobs are run with."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bytes that are computed block by block while they are written, so that no more than a block is in memory.

    *blocks* is called once; the blocks that it yields have *nbytes* bytes in total. Only a :class:`FileJob` writes
    them, in the process that planned it. Data that is a function can have a method ``contents``, which returns its
    bytes or such blocks.
    """

    nbytes: int
    blocks: Callable[[], Iterator[memoryview]]


Data = bytes | Span | Blocks | Callable[[], memoryview]
"""The bytes, their position in shared memory, their blocks, or a function that fetches them: called once, as late as
possible, as the bytes may be a copy."""


class Chunk(NamedTuple):
    """Bytes that a job writes, from byte *start* of its file.

    *entry* is the manifest entry of the chunk, still without digest; None for headers. *crc_at* lists offsets in the
    chunk (which is bytes then) where the little-endian CRC-32 of the previous chunk is filled in. In a shared file the
    entry is a tensor with one slice in its final dtype, which may differ from the *dtype* of the data; *is_copy* marks
    an additional copy of a tensor.
    """

    start: int
    data: Data
    entry: Tensor | Blob | None = None
    crc_at: tuple[int, ...] = ()
    dtype: str = ""
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class FileJob:
    """A new file that only this rank writes, sequentially.

    *file* is relative to the checkpoint; *tree* is the tree of the chunks' entries, None for a file without entries.
    *nbytes* of disk space are reserved first; 0 where the size is not known. *reusable*: the content rarely changes, so
    that the file of the previous checkpoint can be shared.
    """

    file: str
    chunks: Sequence[Chunk]
    tree: str | None = None
    nbytes: int = 0
    reusable: bool = False

    @property
    def size(self) -> int:
        """Approximate bytes to write."""
        return self.nbytes or sum(_length(chunk.data) for chunk in self.chunks)

    def run(
        self,
        staging: Path,
        written: RankManifest,
        memory: memoryview,
        comparison: Comparison | None = None,
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        """Write the file below *staging*; add it and its chunks to *written*. Raises OSError naming the file.

        With a *comparison*, the file becomes a link to that of the previous checkpoint if its content is the same.
        Threads of the *pool* compute checksums. After an error they may still read the chunks: the caller waits for
        them.
        """
        path = staging / self.file
        # Another rank may create the directory of an object that differs between ranks.
        path.parent.mkdir(exist_ok=True)
        if comparison is not None and self._link(staging, written, memory, comparison):
            return
        tree = RankTree() if self.tree is None else written.trees.setdefault(self.tree, RankTree())
        with DurableFile(path, nbytes=self.nbytes) as out:
            _write_chunks(out, self.chunks, memory, tree, pool)
        written.files[self.file] = out.close()

    def digested(self, chunk: Chunk, memory: memoryview) -> Tensor | None:
        """The entry of a chunk of a reusable file, with the digest of its bytes; None for the header."""
        if chunk.entry is None:
            return None
        return _digested(_slice_entry(chunk), digest_of(_bytes_of(chunk.data, memory)))

    def _link(
        self, staging: Path, written: RankManifest, memory: memoryview, comparison: Comparison
    ) -> bool:
        """Link the file of the previous checkpoint if it has the same content. Returns whether it was linked.

        A reusable file consists of a header and tensors.
        """
        header = bytes(_bytes_of(self.chunks[0].data, memory))
        entries = comparison.entries()
        slices = [entry.slices[0] for entry in entries]
        record = comparison.files.same_file(self.file, header, slices)
        if record is None or not comparison.files.link(self.file, record, staging):
            return False
        if self.tree is not None:
            written.trees.setdefault(self.tree, RankTree()).tensors += entries
        written.files[self.file] = record
        return True


@dataclass(frozen=True, slots=True)
class SharedFileJob:
    """This rank's share of a file of *nbytes* bytes that several ranks write, each at the offsets of its slices.

    *file* is relative to the checkpoint, *tree* is the tree of the slices. *header* is not None on the rank that
    writes the file's header. *reusable*: the content rarely changes, so that slices of the previous checkpoint can be
    shared.
    """

    file: str
    nbytes: int
    chunks: Sequence[Chunk]
    tree: str
    header: bytes | None
    reusable: bool

    @property
    def size(self) -> int:
        """Bytes to write, without the header."""
        return sum(_slice_entry(chunk).slices[0].nbytes for chunk in self.chunks)

    def run(
        self,
        staging: Path,
        written: RankManifest,
        memory: memoryview,
        comparison: Comparison | None = None,
    ) -> None:
        """Write the share below *staging*; add its slices to *written*. Raises OSError naming the file.

        Nothing is written if the *comparison* finds the share in the previous checkpoint; then rank 0 completes the
        file when all ranks have finished (``rank_manifest.py``). A link now could be opened by another rank.
        """
        tree = written.trees.setdefault(self.tree, RankTree())
        if comparison is not None and self._reuse(written, comparison):
            return
        with SharedFile(staging / self.file, nbytes=self.size) as out:
            if self.header is not None:
                out.create(self.header, self.nbytes)
                written.placed[self.file] = FileRecord(self.nbytes, digest_of(self.header))
            for chunk in self.chunks:
                entry = _slice_entry(chunk)
                digest = out.write_slice(entry, _bytes_of(chunk.data, memory), chunk.dtype)
                _add_slice(tree, chunk, _digested(entry, digest))

    def digested(self, chunk: Chunk, memory: memoryview) -> Tensor | None:
        """The entry of a chunk of a reusable file, with the digest of its bytes as stored."""
        entry = _slice_entry(chunk)
        return _digested(entry, slice_digest(entry, _bytes_of(chunk.data, memory), chunk.dtype))

    def _reuse(self, written: RankManifest, comparison: Comparison) -> bool:
        """Record this rank's share without writing it, if the previous checkpoint has it. Returns whether it does."""
        entries = comparison.entries()
        head = None if self.header is None else digest_of(self.header)
        slices = [entry.slices[0] for entry in entries]
        if not comparison.files.has_slices(self.file, slices, head):
            return False
        tree = written.trees.setdefault(self.tree, RankTree())
        for chunk, entry in zip(self.chunks, entries, strict=True):
            _add_slice(tree, chunk, entry)
        if head is not None:
            written.placed[self.file] = FileRecord(self.nbytes, head)
        written.reused.append(self.file)
        return True


Job = FileJob | SharedFileJob


@dataclass(frozen=True, slots=True)
class Comparison:
    """The content of a reusable file, whose digests other threads compute, and the *files* that may have it already."""

    files: ReusableFiles
    digests: Sequence[Future[Tensor | None]]

    def entries(self) -> list[Tensor]:
        """The entries of the file's tensors with their digests. Waits for the threads, and raises their errors."""
        found: list[Tensor] = []
        for digest in self.digests:
            entry = digest.result()
            if entry is not None:
                found.append(entry)
        return found


def with_data(job: Job, data: Sequence[Data]) -> Job:
    """A copy of *job* whose chunks have other *data*, one for each chunk."""
    chunks: list[Chunk] = []
    for old, new_data in zip(job.chunks, data, strict=True):
        chunk = old
        if new_data is not old.data:
            chunk = Chunk(old.start, new_data, old.entry, old.crc_at, old.dtype, old.is_copy)
        chunks.append(chunk)
    return replace(job, chunks=chunks)


def run_all(
    jobs: Iterable[Job],
    staging: Path,
    written: RankManifest,
    memory: memoryview | None = None,
    previous: Previous | None = None,
) -> None:
    """Run *jobs* and add what they wrote to *written*. Spans refer to *memory*.

    *previous* is the checkpoint whose unchanged files are shared. Other threads compute the digests of what may be
    shared, while the other jobs are written in their order: the former needs the processor, the latter the disk.
    """
    view = memoryview(b"") if memory is None else memory
    reusable: ReusableFiles | None = None
    compared: list[tuple[Job, Comparison]] = []
    jobs = list(jobs)
    with _digest_threads(jobs) as threads, _checksum_threads(jobs) as pool:
        for job in jobs:
            if job.reusable and reusable is None:
                # Not before: most saves have no reusable file, and the manifest need not be read.
                reusable = ReusableFiles.open(previous)
            if not job.reusable or reusable is None or reusable.record(job.file) is None:
                _run(job, staging, written, view, pool)
                continue
            digests = [threads.submit(job.digested, chunk, view) for chunk in job.chunks]
            compared.append((job, Comparison(reusable, digests)))
        for job, comparison in compared:
            job.run(staging, written, view, comparison)


def _run(
    job: Job,
    staging: Path,
    written: RankManifest,
    memory: memoryview,
    pool: ThreadPoolExecutor | None,
) -> None:
    """Run a job whose content is not compared; threads of the *pool* help with a large file."""
    if isinstance(job, FileJob):
        job.run(staging, written, memory, pool=pool if _is_large(job) else None)
    else:
        job.run(staging, written, memory)


def _is_large(job: Job) -> bool:
    return isinstance(job, FileJob) and job.size >= _THREADS_FROM_BYTES


@contextlib.contextmanager
def _digest_threads(jobs: Iterable[Job]) -> Iterator[Executor]:
    """Threads for digests of reusable files, whose computation releases the GIL; the calling thread if none can start.

    After an error, they finish only the calls in progress. No thread uses memory after the block.
    """
    are_needed = any(job.reusable for job in jobs)
    pool = started_pool(_NUM_THREADS, "digest") if are_needed else None
    threads = pool or CallingThread()
    try:
        yield threads
    finally:
        threads.end()


@contextlib.contextmanager
def _checksum_threads(jobs: Iterable[Job]) -> Iterator[ThreadPoolExecutor | None]:
    """Threads for the checksums of large files; None if none of the *jobs* writes one, or no thread can start.

    After an error, they finish only the calls in progress. No thread uses memory after the block.
    """
    pool = started_pool(num_threads(), "checksum") if any(map(_is_large, jobs)) else None
    try:
        yield pool
    finally:
        if pool is not None:
            pool.end()


def _length(data: Data) -> int:
    """Bytes of *data*; 0 for a function, whose length is not known before it is called."""
    if isinstance(data, bytes):
        return len(data)
    return int(getattr(data, "nbytes", 0))


def _contiguous_span(chunks: Sequence[Chunk]) -> Span | None:
    """One span for all chunks where they are consecutive in memory, so that they can be written in one call."""
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
    out: DurableFile,
    chunks: Sequence[Chunk],
    memory: memoryview,
    tree: RankTree,
    pool: ThreadPoolExecutor | None,
) -> None:
    """Write *chunks* with their checksums filled in (for a span: in the memory), and add their entries to *tree*."""
    contiguous = _contiguous_span(chunks)
    end = 0 if contiguous is None else contiguous.start
    written = end
    has_checksums = any(chunk.crc_at for chunk in chunks)
    previous: bytes | memoryview | Checksums | BlockChecksums = b""
    for chunk, data, checksums in _with_checksums(chunks, memory, pool, contiguous):
        if isinstance(data, Blocks):
            previous = _write_blocks(out, data, BlockChecksums(pool, has_crc=has_checksums))
            _add_entry(tree, chunk, previous.digest())
            continue
        filled = data
        if chunk.crc_at:
            filled = _fill_crc(data, chunk.crc_at, _crc_of(previous))
        if contiguous is None:
            out.write(filled)
        else:
            end += len(filled)
            # In whole blocks, which O_DIRECT writes from this memory: chunks may be far smaller. The next checksum is
            # filled in behind *end*.
            if end - written >= BLOCK_BYTES:
                whole = (end - written) // BLOCK_BYTES * BLOCK_BYTES
                out.write(memory[written : written + whole])
                written += whole
        # A header of each archive has none.
        if chunk.entry is not None:
            digest = digest_of(filled) if checksums is None else checksums.digest()
            _add_entry(tree, chunk, digest)
        previous = filled if checksums is None else checksums
    if contiguous is not None:
        out.write(memory[written:end])


def _crc_of(data: bytes | memoryview | Checksums | BlockChecksums) -> int:
    return zlib.crc32(data) if isinstance(data, _IN_MEMORY) else data.crc()


def _with_checksums(
    chunks: Sequence[Chunk],
    memory: memoryview,
    pool: ThreadPoolExecutor | None,
    contiguous: Span | None,
) -> Iterator[tuple[Chunk, bytes | memoryview | Blocks, Checksums | None]]:
    """Each chunk with its bytes and, if they are many, their checksums, which threads of the *pool* compute.

    Those of *contiguous* chunks, which are in the memory, are begun ahead. Others are fetched as late as possible.
    """
    most_ahead = 0 if contiguous is None else _AHEAD_BYTES
    waiting: deque[tuple[Chunk, bytes | memoryview, Checksums | None]] = deque()
    ahead = 0
    for number, chunk in enumerate(chunks):
        data = _contents_of(chunk.data, memory)
        if isinstance(data, Blocks):
            yield chunk, data, None
            continue
        if not waiting and (pool is None or len(data) < PARALLEL_FROM_BYTES):
            yield chunk, data, None
            continue
        begun = _begun_checksums(chunks, number, data, pool)
        waiting.append((chunk, data, begun))
        ahead += len(data)
        while waiting and (ahead > most_ahead or len(waiting) > _AHEAD_CHUNKS):
            ahead -= len(waiting[0][1])
            yield waiting.popleft()
    yield from waiting


def _begun_checksums(
    chunks: Sequence[Chunk],
    number: int,
    data: bytes | memoryview,
    pool: ThreadPoolExecutor | None,
) -> Checksums | None:
    """Begin the needed checksums of a chunk's *data*; None if it is short or incomplete, or without threads."""
    chunk = chunks[number]
    if pool is None or len(data) < PARALLEL_FROM_BYTES or chunk.crc_at:
        return None
    crc_follows = number + 1 < len(chunks) and bool(chunks[number + 1].crc_at)
    return Checksums(data, pool, has_digest=chunk.entry is not None, has_crc=crc_follows)


def _contents_of(data: Data, memory: memoryview) -> bytes | memoryview | Blocks:
    """The bytes of *data*, or blocks of them where they are elsewhere; spans refer to *memory*."""
    if isinstance(data, Span):
        return memory[data.start : data.start + data.nbytes]
    if isinstance(data, Blocks):
        return data
    contents = getattr(data, "contents", None)
    return _bytes_of(data, memory) if contents is None else contents()


def _fill_crc(data: bytes | memoryview, offsets: Sequence[int], crc: int) -> memoryview:
    filled = memoryview(bytearray(data)) if isinstance(data, bytes) else data
    for offset in offsets:
        filled[offset : offset + CRC_BYTES] = crc.to_bytes(CRC_BYTES, "little")
    return filled


def _bytes_of(data: Data, memory: memoryview) -> bytes | memoryview:
    """The bytes of *data*; spans refer to *memory*."""
    if isinstance(data, Span):
        return memory[data.start : data.start + data.nbytes]
    if isinstance(data, bytes):
        return data
    assert not isinstance(data, Blocks), "only a FileJob writes blocks"
    return data()


def _write_blocks(out: DurableFile, data: Blocks, checksums: BlockChecksums) -> BlockChecksums:
    """Write *data* block by block; return the *checksums* of all of it."""
    nbytes = 0
    for block in data.blocks():
        checksums.begin(block)
        out.write(block)
        # The next block may be in the same memory.
        checksums.finish()
        nbytes += len(block)
    assert nbytes == data.nbytes, "the header of the file states another size"
    return checksums


def _add_entry(tree: RankTree, chunk: Chunk, digest: str) -> None:
    """Add the entry of a chunk, with the *digest* of its bytes, to what this rank wrote of a tree."""
    if isinstance(chunk.entry, Blob):
        tree.objects.append(replace(chunk.entry, digest=digest))
    elif chunk.entry is not None:
        tree.tensors.append(_digested(chunk.entry, digest))


def _add_slice(tree: RankTree, chunk: Chunk, entry: Tensor) -> None:
    """Add the *entry* of a chunk of a shared file, with its digest, to what this rank wrote of a tree."""
    if chunk.is_copy:
        tree.copies.append(entry)
    else:
        tree.tensors.append(entry)


def _slice_entry(chunk: Chunk) -> Tensor:
    """The entry of a chunk of a shared file, which contains only slices of tensors."""
    assert isinstance(chunk.entry, Tensor)
    return chunk.entry


def _digested(entry: Tensor, digest: str) -> Tensor:
    """*entry*, a tensor with one slice, with the digest of this slice."""
    (stored,) = entry.slices
    return Tensor(entry.fqn, entry.dtype, entry.shape, (stored.digested(digest),))
