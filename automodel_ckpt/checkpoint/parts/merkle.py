"""The slices of each file of a checkpoint, the comparison with their digests, and Merkle digests. Imports no torch.

The digest of a file in which several ranks wrote slices is computed from theirs. It is the XXH3-128 of a text: a line
with the digest of the bytes before the first slice, then a line ``START OFFSETS NBYTES DIGEST`` for each slice that is
not empty, in the order of start and offsets (decimal; offsets joined by commas; DIGEST with the name of its algorithm).
The slices' digests are those of the manifest.
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
from automodel_ckpt.checkpoint.parts.slices import Slice, runs_in_file
from automodel_ckpt.checkpoint.parts.tree import Tree, in_rank_files, slices_in_rank_file

_BLOCK_BYTES = 4 << 20
_NAMED = 5


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A slice in a file, and the shape of its tensor. A value that is no tensor (*is_value*) is a slice of bytes."""

    stored: Slice
    shape: tuple[int, ...]
    is_value: bool = False

    def __str__(self) -> str:
        if self.is_value:
            return f"value {self.stored.fqn}"
        return f"tensor {self.stored.fqn} (slice at {list(self.stored.offsets)})"


class FileContents:
    """The slices and values of *trees* that are not empty, by file.

    Of a slice table, only the rows of the ranks that wrote a file are read, when that file is asked for.
    """

    def __init__(self, trees: Iterable[Tree]) -> None:
        self._trees = tuple(trees)
        self._listed: dict[str, list[FileSlice]] = {}
        for tree in self._trees:
            for tensor in tree.stored:
                for stored in () if in_rank_files(tensor) else tensor.slices:
                    self._add(FileSlice(stored, tensor.shape))
            for blob in tree.objects.values():
                size = (blob.nbytes,)
                value = Slice(
                    blob.fqn, "U8", (0,), size, blob.file, blob.start, blob.nbytes, blob.digest
                )
                self._add(FileSlice(value, size, is_value=True))

    def _add(self, one: FileSlice) -> None:
        if one.stored.nbytes:
            self._listed.setdefault(one.stored.file, []).append(one)

    def listed(self, file: str) -> list[FileSlice]:
        """Return those in a file that no table describes, in the order of its Merkle digest."""
        # Interleaved slices of a tensor have the same start; their offsets order them.
        return sorted(
            self._listed.get(file, ()), key=lambda one: (one.stored.start, one.stored.offsets)
        )

    def slices(self, file: str) -> list[FileSlice]:
        """Return those in a file in their order. Raises :class:`CheckpointUnusable` for a damaged table."""
        found = self.listed(file)
        for tree in self._trees:
            for tensor, stored in slices_in_rank_file(tree, file):
                if stored.nbytes:
                    found.append(FileSlice(stored, tensor.shape))
        found.sort(key=lambda one: (one.stored.start, one.stored.offsets))
        return found


def has_merkle_digest(record: FileRecord) -> bool:
    """Whether the digest of a file is a Merkle digest."""
    return record.digest.startswith(OF_SLICES)


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


def damaged(root: Path, path: str, slices: Iterable[FileSlice]) -> list[FileSlice]:
    """Return the slices of a file whose bytes do not match their digests. Raises OSError."""
    with _opened(root, path) as descriptor:
        return [one for one in slices if _digest(_content(descriptor, one)) != one.stored.digest]


def damage_text(slices: Sequence[FileSlice]) -> str:
    """Name the damaged slices of a file whose digest differs."""
    if not slices:
        return "the damage is in no tensor"
    names = ", ".join(map(str, slices[:_NAMED]))
    more = f", {len(slices) - _NAMED} more" if len(slices) > _NAMED else ""
    return f"damaged: {names}{more}"


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
