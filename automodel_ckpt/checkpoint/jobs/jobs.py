"""What a rank writes: jobs, which are plain data, and their record, the rank manifest, which rank 0 merges with others.

A format only plans jobs: which files, which chunks of bytes in which order, and which entry of the rank manifest each
chunk gets. Jobs are executed in the trainer or in the writer process. That needs no torch: it writes, computes digests,
calls fsync, and completes the rank manifest. The bytes come from the live state (synchronous saves) or from shared
memory that they were copied into (asynchronous saves).

A file can be written by several ranks, each its slices at their offsets. The first rank that opens the file creates it;
rank 0 reserves its space and writes its header. A rank writes only the bytes of its slices, so that the order of the
ranks does not matter.

A rank writes its regular slices as rows of the table that they belong to (``slice_table.py``): rank 0 only joins them.
For an asynchronous save, rank 0's writer process merges the rank manifests: with thousands of tensors it takes as long
as a training step.
"""

from __future__ import annotations

import errno
import io
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import xxhash

from automodel_ckpt.base.durable_io import naming, write_all
from automodel_ckpt.checkpoint.files import layout
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
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.jobs.reuse import Previous, ReusableFiles
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.slice_table import (
    MIN_TABLE_ROWS,
    PLEASE_REPORT,
    Segment,
    SliceTable,
    segment_of,
)
from automodel_ckpt.checkpoint.parts.slices import (
    RegularSlices,
    Run,
    Slice,
    Tensor,
    TensorDict,
    TensorMap,
    runs_in_file,
)
from automodel_ckpt.checkpoint.parts.tree import (
    Blob,
    FileContents,
    Tree,
    blob_of,
    merkle_digest,
    tensor_of,
)
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed, unusable


@dataclass(slots=True)
class RankTree:
    """What one rank wrote of a tree. Each tensor has one slice.

    *rows* has the part and the number of each tensor of a save, by name: its slice becomes a row of the tree's table.
    It is empty for trees with listed slices. With *placed*, the tensors have positions in files of several ranks.
    *segments* are such rows, of a rank manifest that was read.
    """

    tensors: list[Tensor] = field(default_factory=list)
    objects: list[Blob] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    placed: bool = False
    segments: list[Segment] = field(default_factory=list)

    def add(self, entry: Tensor | Blob, digest: str, *, is_copy: bool = False) -> None:
        """Add an *entry*, a value or a tensor with one slice, with the *digest* of its bytes."""
        if isinstance(entry, Blob):
            self.objects.append(replace(entry, digest=digest))
            return
        (stored,) = entry.slices
        slices = (replace(stored, digest=digest),)
        tensors = self.copies if is_copy else self.tensors
        tensors.append(Tensor(entry.fqn, entry.dtype, entry.shape, slices))

    def regular_segments(self) -> list[Segment]:
        """The slices of the regular tensors, as segments of the table."""
        if not self.rows:
            return self.segments
        found = []
        parts: dict[int, list[tuple[int, Slice]]] = {}
        for tensor in (*self.tensors, *self.copies):
            part, number = self.rows[tensor.fqn]
            parts.setdefault(part, []).append((number, tensor.slices[0]))
        for part, numbered in parts.items():
            slices = [stored for _, stored in sorted(numbered, key=lambda item: item[0])]
            found.append(segment_of(slices, part, placed=self.placed))
        return found


@dataclass(slots=True)
class RankManifest:
    """What one rank wrote of a checkpoint. Rank 0 merges the rank manifests of all ranks into the manifest.

    *placed* has, for each file that several ranks write and this one created, its size and the digest of its header.
    The names of the fields are keys of the file.
    """

    rank: int
    files: dict[str, FileRecord] = field(default_factory=dict)
    trees: dict[str, RankTree] = field(default_factory=dict)
    placed: dict[str, FileRecord] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The content of the file: a line of JSON, then the rows of all segments in their order."""
        trees = {}
        rows = []
        for name, tree in self.trees.items():
            segments = tree.regular_segments()
            rows += [segment.rows for segment in segments]
            trees[name] = {
                "tensors": [] if tree.rows else tree.tensors,
                "copies": [] if tree.rows else tree.copies,
                "objects": tree.objects,
                "segments": [
                    [each.part, each.file, each.start, each.stop, len(each.rows)]
                    for each in segments
                ],
            }
        head = {**_fields(self), "trees": trees}
        return b"\n".join([json.dumps(head, default=_fields).encode(), b"".join(rows)])

    @classmethod
    def parse(cls, data: bytes) -> RankManifest:
        head, _, rows = data.partition(b"\n")
        raw = json.loads(head)
        remaining = io.BytesIO(rows)
        return cls(
            rank=raw["rank"],
            files=_parse_records(raw["files"]),
            placed=_parse_records(raw["placed"]),
            trees={name: _parse_tree(tree, remaining) for name, tree in raw["trees"].items()},
        )


def _fields(record: Any) -> ValueDict:
    """The fields of a dataclass, without recursion and copies as in dataclasses.asdict: there are thousands."""
    # The records are dataclasses with slots=True and no base class, so that __slots__ has all
    # fields.
    return {name: getattr(record, name) for name in record.__slots__}


def _parse_records(raw: Values) -> dict[str, FileRecord]:
    return {path: FileRecord(record["size"], record["digest"]) for path, record in raw.items()}


def _parse_tree(raw: Values, rows: IO[bytes]) -> RankTree:
    segments = []
    for part, file, start, stop, num_bytes in raw["segments"]:
        segments.append(Segment(part, file, start, stop, rows.read(num_bytes)))
    return RankTree(
        tensors=[tensor_of(tensor["fqn"], tensor) for tensor in raw["tensors"]],
        copies=[tensor_of(tensor["fqn"], tensor) for tensor in raw["copies"]],
        objects=[blob_of(blob) for blob in raw["objects"]],
        segments=segments,
    )


def rank_manifest_paths(staging: Path, num_ranks: int) -> list[Path]:
    """The paths of the rank manifests, in the order of the ranks."""
    return [staging / layout.rank_manifest_file(rank) for rank in range(num_ranks)]


def read_rank_manifests(staging: Path, num_ranks: int) -> list[RankManifest]:
    """Read the rank manifests, in the order of the ranks. Raises OSError where one is missing."""
    paths = rank_manifest_paths(staging, num_ranks)
    return [RankManifest.parse(path.read_bytes()) for path in paths]


def merge_files(rank_manifests: Iterable[RankManifest]) -> dict[str, FileRecord]:
    """The files that one rank wrote, of all ranks, sorted by name."""
    files = {}
    for written in rank_manifests:
        files.update(written.files)
    return dict(sorted(files.items()))


def merge_shared_files(
    rank_manifests: Iterable[RankManifest], trees: Collection[Tree]
) -> dict[str, FileRecord]:
    """The records of the files in which several ranks wrote slices, from the digests of their headers and slices."""
    contents = FileContents(trees)
    files = {}
    for written in rank_manifests:
        for path, header in written.placed.items():
            digest = merkle_digest(header.digest, contents.listed(path))
            files[path] = FileRecord(header.size, digest)
    return files


def merge_tree(name: str, planned: Tree, rank_manifests: Iterable[RankManifest]) -> Tree:
    """The tree *name*, merged from the rank manifests. *planned* has its regular tensors, in the order of their rows.

    Raises :class:`SaveFailed` where the ranks wrote other slices than planned.
    """
    tensors = []
    copies = []
    objects = {}
    segments = {}
    for manifest in rank_manifests:
        written = manifest.trees.get(name)
        if written is None:
            continue
        if not written.rows:
            tensors += written.tensors
            copies += written.copies
        segments[manifest.rank] = written.regular_segments()
        for blob in written.objects:
            objects[blob.fqn] = blob
    table = SliceTable.merged(segments, name) if planned.tensors else None
    merged = _with_records(planned.tensors, table) | {each.fqn: each for each in tensors}
    merged_copies = _with_records(planned.copies, table) | {each.fqn: each for each in copies}
    if table is not None:
        # Compares the number of slices.
        _ = table.segments
    return Tree(planned.format, merged, objects, planned.tied, merged_copies, table)


def _with_records(planned: TensorMap, table: SliceTable | None) -> TensorDict:
    """The planned tensors, with the records of their slices in *table*."""
    found = {}
    for fqn, tensor in planned.items():
        assert table is not None and isinstance(tensor.slices, RegularSlices)
        found[fqn] = table.add(tensor.slices)
    return found


def readable_bytes(manifest: Manifest, checkpoint: Path) -> bytes:
    """Serialize *manifest*, and read it back in the way that a resume reads it.

    Raises :class:`SaveFailed` where a reader would reject it: a checkpoint that cannot be read is never published.
    *checkpoint* is its final path, for the message.
    """
    data = manifest.to_bytes()
    where = checkpoint / layout.MANIFEST
    try:
        Manifest.parse(data, where)
        # The tables are compared in memory: their files are not at the final path yet.
        if fault := manifest.overlap_fault(with_tables=True):
            raise unusable("the manifest is inconsistent", where, fault, "")
    except CheckpointUnusable as unreadable:
        problem = unreadable.problems[0]
        raise SaveFailed(
            "the checkpoint is not published, because it could not be read back",
            where=problem.where,
            value=f"{problem.what}: {problem.value}",
            hint=PLEASE_REPORT,
        ) from unreadable
    return data


def finalize(
    staging: Path,
    partial_manifest: Manifest,
    rank_manifests: Sequence[RankManifest],
    trees: Mapping[str, Tree] | None = None,
) -> int:
    """Complete the manifest and finalize *staging* with it; return the bytes of the checkpoint's files.

    *partial_manifest* has no files, and of each tree only its format and tied names. *trees* is the result of
    :func:`merge_trees`, if the caller has it. Raises OSError, and :class:`SaveFailed` where the result is not a
    checkpoint that can be read back.
    """
    if trees is None:
        trees = merge_trees(partial_manifest, rank_manifests)
    files = merge_files(rank_manifests)
    files |= _write_tables(staging, trees)
    files |= merge_shared_files(rank_manifests, trees.values())
    manifest = replace(partial_manifest, created=time.time(), trees=trees, files=files)
    checkpoint = staging.parent / str(layout.CheckpointName(manifest.step, manifest.epoch))
    commit.finalize(staging, readable_bytes(manifest, checkpoint))
    return manifest.nbytes


def merge_trees(
    partial_manifest: Manifest, rank_manifests: Sequence[RankManifest]
) -> dict[str, Tree]:
    """The trees of a manifest, which has their planned tensors, merged from the rank manifests."""
    planned = partial_manifest.trees.items()
    return {name: merge_tree(name, tree, rank_manifests) for name, tree in planned}


def _write_tables(staging: Path, trees: Mapping[str, Tree]) -> dict[str, FileRecord]:
    """Write the tables of large trees; the manifest lists the slices of the others."""
    written = {}
    for name, tree in trees.items():
        if tree.table is None or tree.table.num_rows < MIN_TABLE_ROWS:
            continue
        file = layout.slice_table_file(layout.state_directory(name))
        written[file] = commit.write_file(staging / file, tree.table.content)
        tree.table.location = tree.table.location._replace(file=file)
    return written


# Shorter runs that do not continue the stream are written without it: each would cost a switch of threads.
_STREAM_FROM_BYTES = 64 << 10


# ---------------------------------------------------------------- jobs


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


def archive_chunks(head: bytes, tail: bytes, data: Data, entry: Tensor) -> list[Chunk]:
    """The chunks of an archive of ``torch.save`` around the raw bytes of *entry*, which has one slice."""
    (stored,) = entry.slices
    # The manifest's entry has only the raw bytes, torch's reader gets the whole archive.
    return [
        Chunk(stored.start - len(head), head),
        Chunk(stored.start, data, entry),
        Chunk(stored.start + stored.nbytes, tail),
    ]


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
        if not job.reusable or reusable is None or not job.link(staging, written, view, reusable):
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
