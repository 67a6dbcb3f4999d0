"""The Merkle digest of a file in which several ranks wrote slices, computed from the digests of its slices.

It is the XXH3-128 of a text: a line with the digest of the bytes before the first slice, then a line ``START OFFSETS
NBYTES DIGEST`` for each slice that is not empty, in the order of start and offsets (decimal; offsets joined by commas;
DIGEST with the name of its algorithm). The slices' digests are those of the manifest.

If the slices of the file are in a slice table, which has the digests of its segments, the lines are those of segments
instead: ``RANK PART ROWS START STOP DIGEST``. Their number does not grow with that of the tensors. Imports no torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from automodel_ckpt.checkpoint.files.digests import OF_SEGMENTS, OF_SLICES, FileRecord, digest_from
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, runs_in_file
from automodel_ckpt.checkpoint.parts.tree import Tree, in_rank_files, slices_in_rank_file

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.slice_table import SliceTable

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A slice in a file, and the shape of its tensor."""

    stored: Slice
    shape: tuple[int, ...]


def has_merkle_digest(record: FileRecord) -> bool:
    """Whether the digest of a file is a Merkle digest."""
    return record.digest.startswith((OF_SLICES, OF_SEGMENTS))


def slices_by_file(
    tensors: Iterable[Tensor], *, with_tables: bool = False
) -> dict[str, list[FileSlice]]:
    """Map each file to its slices that are not empty, in the order of its Merkle digest.

    Files of one rank whose slices a table describes are left out, unless *with_tables*: :func:`slices_in` finds theirs.
    """
    found: dict[str, list[FileSlice]] = {}
    for tensor in tensors:
        if in_rank_files(tensor) and not with_tables:
            continue
        for stored in tensor.slices:
            if stored.nbytes:
                found.setdefault(stored.file, []).append(FileSlice(stored, tensor.shape))
    for slices in found.values():
        _sort(slices)
    return found


def slices_in(trees: Iterable[Tree], file: str, rank: int | None = None) -> list[FileSlice]:
    """Return the slices of a file that tables describe and that are not empty, in the same order; those of one
    *rank*, or of all."""
    found: list[FileSlice] = []
    for tree in trees:
        for tensor, stored in slices_in_rank_file(tree, file, rank):
            if stored.nbytes:
                found.append(FileSlice(stored, tensor.shape))
    _sort(found)
    return found


def _sort(slices: list[FileSlice]) -> None:
    # Interleaved slices of a tensor have the same start; their offsets order them.
    slices.sort(key=lambda one: (one.stored.start, one.stored.offsets))


def merkle_digest(head: str, slices: Iterable[FileSlice]) -> str:
    """Compute the digest of a file with these *slices*. *head* is the digest of the bytes before the first one."""
    text = f"{head}\n"
    for one in slices:
        stored = one.stored
        offsets = ",".join(map(str, stored.offsets))
        # The text is part of the format: every reader must get the same bytes (docs/format.md).
        text += f"{stored.start} {offsets} {stored.nbytes} {stored.digest}\n"
    return OF_SLICES + xxhash.xxh3_128_hexdigest(text.encode())


def segments_digest(head: str, table: SliceTable, file: str) -> str:
    """Compute the digest of a file whose slices are in a *table*. *head* is the digest of the bytes before them."""
    text = f"{head}\n"
    for segment in table.segments_in(file):
        numbers = [str(segment[name]) for name in ("rank", "part", "rows", "start", "stop")]
        # The text is part of the format, as above.
        text += f"{' '.join(numbers)} {segment['digest'].tobytes().hex()}\n"
    return OF_SEGMENTS + xxhash.xxh3_128_hexdigest(text.encode())


def file_digest(trees: Iterable[Tree], file: str, head: str, slices: Iterable[FileSlice]) -> str:
    """Compute the Merkle digest of a file of a checkpoint with these *trees*. *slices* are its slices.

    Raises :class:`CheckpointUnusable` for a damaged table.
    """
    for tree in trees:
        if tree.table is not None and tree.table.is_stored and file in tree.table.files:
            return segments_digest(head, tree.table, file)
    return merkle_digest(head, slices)


def digest_fits(
    trees: Collection[Tree], file: str, record: FileRecord, head: str, slices: Sequence[FileSlice]
) -> bool:
    """Whether the digest *head* of the bytes before the slices, and those of the slices, give the file's digest.

    The arguments are those of :func:`file_digest`. Slices in tables must also fill the file: their manifest was not
    compared with them.
    """
    is_in_table = record.digest.startswith(OF_SEGMENTS)
    if is_in_table and not _are_contiguous(slices, record.size):
        return False
    return file_digest(trees, file, head, slices) == record.digest


def _are_contiguous(slices: Sequence[FileSlice], nbytes: int) -> bool:
    """Whether the slices follow each other up to byte *nbytes*: a digest covers no bytes in gaps."""
    ends = [one.stored.start + one.stored.nbytes for one in slices]
    return [one.stored.start for one in slices[1:]] + [nbytes] == ends


def head_fits(
    root: Path,
    path: str,
    record: FileRecord,
    slices: Sequence[FileSlice],
    trees: Collection[Tree] = (),
) -> bool:
    """Whether the bytes before the first slice, and the digests in the manifest, give the file's digest.

    *trees* are those of the checkpoint, if the slices can be in tables. Raises OSError.
    """
    num_bytes = slices[0].stored.start if slices else record.size
    with _opened(root, path) as descriptor:
        head = _digest(_blocks(descriptor, 0, num_bytes))
    return digest_fits(trees, path, record, head, slices)


def damaged(root: Path, path: str, slices: Iterable[FileSlice]) -> list[Slice]:
    """Return the slices of a file whose bytes do not match their digests. Raises OSError."""
    found = []
    with _opened(root, path) as descriptor:
        for one in slices:
            if _digest(_content(descriptor, one)) != one.stored.digest:
                found.append(one.stored)
    return found


@contextlib.contextmanager
def _opened(root: Path, path: str) -> Iterator[int]:
    descriptor = open_safely(root, path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _content(descriptor: int, one: FileSlice) -> Iterator[memoryview]:
    """Yield the bytes of a slice, row-major, in blocks."""
    if not one.stored.interleaved:
        yield from _blocks(descriptor, one.stored.start, one.stored.nbytes)
        return
    # Mapped, because an interleaved slice has many short runs: a system call for each would cost more than reading.
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
        for run in runs_in_file(one.stored, one.shape):
            yield view[run.source : run.source + run.nbytes]


def _blocks(descriptor: int, start: int, nbytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, nbytes)))
    while nbytes > 0:
        count = os.preadv(descriptor, [buffer[:nbytes]], start)
        if count == 0:
            return
        # The buffer is reused: a block is valid only until the next one is read.
        yield buffer[:count]
        start, nbytes = start + count, nbytes - count


def _digest(blocks: Iterable[memoryview]) -> str:
    hashed = xxhash.xxh3_128()
    for block in blocks:
        hashed.update(block)
        # A mapping with a view of it cannot be closed (BufferError).
        block.release()
    return digest_from(hashed)
