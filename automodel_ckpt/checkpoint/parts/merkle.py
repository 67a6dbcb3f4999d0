"""The Merkle digest of a file in which several ranks wrote slices, computed from the digests of its slices.

It is the XXH3-128 of a text: a line with the digest of the bytes before the first slice, then a line ``START OFFSETS
NBYTES DIGEST`` for each slice that is not empty, in the order of start and offsets (decimal; offsets joined by commas;
DIGEST with the name of its algorithm). The slices' digests are those of the manifest.
 Imports no torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from automodel_ckpt.checkpoint.files.digests import OF_SLICES, FileRecord, digest_from
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, runs_in_file
from automodel_ckpt.checkpoint.parts.tree import Tree, in_rank_files, slices_in_rank_file

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A slice in a file, and the shape of its tensor."""

    stored: Slice
    shape: tuple[int, ...]


def has_merkle_digest(record: FileRecord) -> bool:
    """Whether the digest of a file is a Merkle digest."""
    return record.digest.startswith(OF_SLICES)


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


def slices_in(trees: Iterable[Tree], file: str) -> list[FileSlice]:
    """Return the slices of a file that tables describe and that are not empty, in the same order."""
    found: list[FileSlice] = []
    for tree in trees:
        for tensor, stored in slices_in_rank_file(tree, file):
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


def head_fits(root: Path, path: str, record: FileRecord, slices: Sequence[FileSlice]) -> bool:
    """Whether the bytes before the first slice, and the digests in the manifest, give the file's digest.

    Raises OSError.
    """
    num_bytes = slices[0].stored.start if slices else record.size
    with _opened(root, path) as descriptor:
        head = _digest(_blocks(descriptor, 0, num_bytes))
    return merkle_digest(head, slices) == record.digest


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
