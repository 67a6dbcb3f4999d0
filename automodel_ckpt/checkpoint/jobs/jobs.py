"""Write jobs: what a rank writes, as plain data; planned in the trainer, executed there or in the writer process.

A format only plans jobs: which files, which chunks of bytes in which order, and which entry of the rank manifest each
chunk gets. Executing a job needs no torch: it writes, computes digests, calls fsync, and completes the rank manifest.
The bytes come from the live state (synchronous saves) or from shared memory that they were copied into (asynchronous
saves).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from automodel_ckpt.checkpoint.files.digests import FileRecord, digest_of
from automodel_ckpt.checkpoint.files.direct import BLOCK_BYTES
from automodel_ckpt.checkpoint.files.durable_file import DurableFile
from automodel_ckpt.checkpoint.files.threads import CallingThread, Pool, started_pool
from automodel_ckpt.checkpoint.jobs.checksums import Checksums, num_threads
from automodel_ckpt.checkpoint.jobs.rank_manifest import RankManifest, RankTree
from automodel_ckpt.checkpoint.jobs.reuse import Previous, ReusableFiles
from automodel_ckpt.checkpoint.jobs.shared_file import SharedFile
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


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``start .. start + nbytes`` of the memory that jobs are run with."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bytes that are computed block by block while they are written, so that no more than a block is in memory.

    *blocks* is called once; the blocks that it yields have *nbytes* bytes in total. A file of one rank can have them,
    in the process that planned it. Data that is a function can have a method ``contents``, which returns its
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
    chunk (which is bytes then) where the little-endian CRC-32 of the previous chunk is filled in. *is_copy* marks an
    additional copy of a tensor in a shared file.
    """

    start: int
    data: Data
    entry: Tensor | Blob | None = None
    crc_at: tuple[int, ...] = ()
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

    def run(
        self,
        staging: Path,
        written: RankManifest,
        memory: memoryview,
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        """Write the file below *staging*; add it and its chunks to *written*. Raises OSError naming the file.

        Threads of the *pool* compute checksums. After an error they may still read the chunks: the caller waits for
        them.
        """
        path = staging / self.file
        # Another rank may create the directory of an object that differs between ranks.
        path.parent.mkdir(exist_ok=True)
        tree = RankTree() if self.tree is None else written.trees.setdefault(self.tree, RankTree())
        if self.is_shared:
            self._write_share(path, written, memory, tree)
            return
        with DurableFile(path, nbytes=self.nbytes) as out:
            _write_chunks(out, self.chunks, memory, tree, pool)
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
                entry = _tensor_of(chunk)
                entries = tree.copies if chunk.is_copy else tree.tensors
                entries.append(_digested(entry, out.write_slice(entry, data)))

    def digested(self, chunk: Chunk, memory: memoryview) -> Tensor | None:
        """The entry of a chunk of a reusable file, with the digest of its bytes; None for the header."""
        if chunk.entry is None:
            return None
        return _digested(_tensor_of(chunk), digest_of(_bytes_of(chunk.data, memory)))

    def link(
        self,
        staging: Path,
        written: RankManifest,
        memory: memoryview,
        files: ReusableFiles,
        digests: Iterable[Future[Tensor | None]],
    ) -> bool:
        """Link the file of the previous checkpoint if it has the same content. Returns whether it was linked.

        *digests* are the results of :meth:`digested` for all chunks.
        """
        header = bytes(_bytes_of(self.chunks[0].data, memory))
        entries = [entry for digest in digests if (entry := digest.result()) is not None]
        record = files.same_file(self.file, header, [entry.slices[0] for entry in entries])
        if record is None or not files.link(self.file, record, staging):
            return False
        if self.tree is not None:
            written.trees.setdefault(self.tree, RankTree()).tensors += entries
        written.files[self.file] = record
        return True


def with_data(job: FileJob, data: Sequence[Data]) -> FileJob:
    """A copy of *job* with other *data* in its chunks, one for each chunk."""
    chunks: list[Chunk] = []
    for old, new_data in zip(job.chunks, data, strict=True):
        chunks.append(old if new_data is old.data else old._replace(data=new_data))
    return replace(job, chunks=chunks)


def run_all(
    jobs: Iterable[FileJob],
    staging: Path,
    written: RankManifest,
    memory: memoryview | None = None,
    previous: Previous | None = None,
) -> None:
    """Run *jobs* and add what they wrote to *written*. Spans refer to *memory*.

    Unchanged files are shared with the checkpoint *previous*. Other threads compute the digests of files that may be
    shared, while the other jobs are written in their order. The digests need the processor, the writes need the disk.
    """
    view = memoryview(b"") if memory is None else memory
    reusable: ReusableFiles | None = None
    compared: list[tuple[FileJob, list[Future[Tensor | None]]]] = []
    jobs = list(jobs)
    # After an error, threads finish only the calls in progress. None uses memory after the block.
    with contextlib.ExitStack() as stack:
        # Digests release the GIL. The calling thread computes them if no other can start.
        needs_digests = any(job.reusable for job in jobs)
        pool = started_pool(_NUM_THREADS, "digest") if needs_digests else None
        threads: Pool | CallingThread = pool or CallingThread()
        stack.callback(threads.end)
        checksums = started_pool(num_threads(), "checksum") if any(map(_is_large, jobs)) else None
        if checksums is not None:
            stack.callback(checksums.end)

        def write(job: FileJob) -> None:
            job.run(staging, written, view, checksums if _is_large(job) else None)

        for job in jobs:
            if job.reusable and reusable is None:
                # Not before: most saves have no reusable file, and the manifest need not be read.
                reusable = ReusableFiles.open(previous)
            if job.reusable and reusable is not None and reusable.record(job.file) is not None:
                digests = [threads.submit(job.digested, chunk, view) for chunk in job.chunks]
                compared.append((job, digests))
            else:
                write(job)
        for job, digests in compared:
            assert reusable is not None
            if not job.link(staging, written, view, reusable, digests):
                write(job)


def _is_large(job: FileJob) -> bool:
    return not job.is_shared and job.size >= _THREADS_FROM_BYTES


def _length(data: Data) -> int:
    """Bytes of *data*; 0 for a function, because its length is not known before it is called."""
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
    previous = Checksums(None, has_crc=False)
    for chunk, data, checksums in _with_checksums(chunks, memory, pool, contiguous):
        if isinstance(data, Blocks):
            _write_blocks(out, data, checksums)
        else:
            if chunk.crc_at:
                data = _fill_crc(data, chunk.crc_at, previous.crc())
            if contiguous is None:
                out.write(data)
            else:
                end += len(data)
                # In whole blocks, which O_DIRECT writes from this memory: chunks may be far smaller. The next checksum
                # is filled in behind *end*.
                whole = (end - written) // BLOCK_BYTES * BLOCK_BYTES
                if whole:
                    out.write(memory[written : written + whole])
                    written += whole
        # A header of each archive has none.
        if chunk.entry is not None:
            _add_entry(tree, chunk, checksums.digest())
        previous = checksums
    if contiguous is not None:
        out.write(memory[written:end])


def _with_checksums(
    chunks: Sequence[Chunk],
    memory: memoryview,
    pool: ThreadPoolExecutor | None,
    contiguous: Span | None,
) -> Iterator[tuple[Chunk, bytes | memoryview | Blocks, Checksums]]:
    """Each chunk with its bytes and their checksums, which threads of the *pool* compute where they are many.

    The checksums of *contiguous* chunks, which are in the memory, are begun ahead. Other chunks are fetched as late as
    possible.
    """
    has_crc = any(chunk.crc_at for chunk in chunks)
    most_ahead = 0 if contiguous is None or pool is None else _AHEAD_BYTES
    waiting: deque[tuple[Chunk, bytes | memoryview | Blocks, Checksums]] = deque()
    ahead = 0
    for chunk in chunks:
        data = _contents_of(chunk.data, memory)
        checksums = Checksums(pool, has_crc=has_crc)
        if not isinstance(data, Blocks):
            ahead += len(data)
            # Bytes that are still to be filled in have no entry.
            if not chunk.crc_at:
                checksums.begin(data)
        waiting.append((chunk, data, checksums))
        while waiting and (ahead >= most_ahead or len(waiting) > _AHEAD_CHUNKS):
            first = waiting.popleft()
            ahead -= 0 if isinstance(first[1], Blocks) else len(first[1])
            yield first
    yield from waiting


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
    assert not isinstance(data, Blocks), "a shared file has no blocks"
    return data()


def _write_blocks(out: DurableFile, data: Blocks, checksums: Checksums) -> None:
    """Write *data* block by block; add all of it to its *checksums*."""
    nbytes = 0
    for block in data.blocks():
        checksums.begin(block)
        out.write(block)
        # The next block may be in the same memory.
        checksums.finish()
        nbytes += len(block)
    assert nbytes == data.nbytes, "the header of the file states another size"


def _add_entry(tree: RankTree, chunk: Chunk, digest: str) -> None:
    """Add the entry of a chunk, with the *digest* of its bytes, to what this rank wrote of a tree."""
    if isinstance(chunk.entry, Blob):
        tree.objects.append(replace(chunk.entry, digest=digest))
    elif chunk.entry is not None:
        tree.tensors.append(_digested(chunk.entry, digest))


def _tensor_of(chunk: Chunk) -> Tensor:
    """The entry of a chunk of a file with only tensors after its header."""
    assert isinstance(chunk.entry, Tensor)
    return chunk.entry


def _digested(entry: Tensor, digest: str) -> Tensor:
    """*entry*, a tensor with one slice, with the digest of this slice."""
    (stored,) = entry.slices
    return Tensor(entry.fqn, entry.dtype, entry.shape, (replace(stored, digest=digest),))
