"""The Merkle digest of a file that several ranks wrote, computed from the digests of its slices.

It is the XXH3-128 of a text: a line with the digest of the bytes before the first slice, then a line ``START OFFSETS
NBYTES DIGEST`` for each slice that is not empty, in the order of start and offsets (decimal; offsets joined by commas;
DIGEST with the name of its algorithm). The slices' digests are those of the manifest. Imports no torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from automodel_ckpt.checkpoint.digests import FileRecord, digest_from
from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.checkpoint.manifest import COMPOSED
from automodel_ckpt.checkpoint.slices import Slice, Tensor, runs_in_file

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """A slice that a file holds, and the shape of its whole tensor."""

    piece: Slice
    shape: tuple[int, ...]


def has_merkle_digest(record: FileRecord) -> bool:
    """Whether a file's digest is made from its parts'."""
    return record.digest.startswith(COMPOSED)


def held_by_file(tensors: Iterable[Tensor]) -> dict[str, list[Held]]:
    """The slices in each file that are not empty, in the order in which its digest counts them."""
    found: dict[str, list[Held]] = {}
    for tensor in tensors:
        for piece in tensor.slices:
            if piece.nbytes:
                found.setdefault(piece.file, []).append(Held(piece, tensor.shape))
    for held in found.values():
        held.sort(key=lambda one: (one.piece.start, one.piece.offsets))
    return found


def merkle_digest(head: str, held: Iterable[Held]) -> str:
    """The digest of a file whose first bytes have the digest *head*, and which then holds these slices, in order."""
    lines = [head]
    for piece in (one.piece for one in held):
        lines.append(
            f"{piece.start} {','.join(map(str, piece.offsets))} {piece.nbytes} {piece.digest}"
        )
    return COMPOSED + xxhash.xxh3_128_hexdigest("".join(f"{line}\n" for line in lines).encode())


def head_fits(root: Path, path: str, record: FileRecord, held: Sequence[Held]) -> bool:
    """Whether a file's first bytes, and the listed digests of all its slices, give its own. Raises OSError."""
    with _opened(root, path) as descriptor:
        head = _digest(_blocks(descriptor, 0, held[0].piece.start if held else record.size))
    return merkle_digest(head, held) == record.digest


def damaged(root: Path, path: str, held: Iterable[Held]) -> list[Slice]:
    """Those of a file's slices that are not what they were. Raises OSError."""
    with _opened(root, path) as descriptor:
        return [one.piece for one in held if _digest(_content(descriptor, one)) != one.piece.digest]


@contextlib.contextmanager
def _opened(root: Path, path: str) -> Iterator[int]:
    descriptor = open_safely(root, path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _content(descriptor: int, held: Held) -> Iterator[memoryview]:
    """A slice's bytes, row-major, piece by piece."""
    if not held.piece.interleaved:
        yield from _blocks(descriptor, held.piece.start, held.piece.nbytes)
        return
    # Its runs are short and many: a system call for each would cost more than the bytes.
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
        for run in runs_in_file(held.piece, held.shape):
            yield view[run.source : run.source + run.nbytes]


def _blocks(descriptor: int, start: int, nbytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, nbytes)))
    while nbytes > 0:
        count = os.preadv(descriptor, [buffer[:nbytes]], start)
        if count == 0:
            return
        yield buffer[:count]
        start, nbytes = start + count, nbytes - count


def _digest(blocks: Iterable[memoryview]) -> str:
    hashed = xxhash.xxh3_128()
    for block in blocks:
        hashed.update(block)
        block.release()
    return digest_from(hashed)
