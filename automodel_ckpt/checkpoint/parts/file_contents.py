"""The slices and values in each file of a checkpoint, and the digest of a file that consists of slices. No torch.

The digest of a file in which several ranks wrote slices is computed from theirs. It is the XXH3-128 of a text: a line
with the digest of the bytes before the first slice, then a line ``START OFFSETS NBYTES DIGEST`` for each slice that is
not empty, in the order of start and offsets (decimal; offsets joined by commas; DIGEST with the name of its algorithm).
The manifest has the slices' digests.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from automodel_ckpt.checkpoint.files.digests import OF_SLICES, FileRecord, digest_from
from automodel_ckpt.checkpoint.files.durable_file import digest_range
from automodel_ckpt.checkpoint.files.safe_open import is_sparse, link_on_the_way, open_safely
from automodel_ckpt.checkpoint.parts.slices import Slice, runs_in_file
from automodel_ckpt.checkpoint.parts.tree import Tree, in_rank_files, slices_in_rank_file
from automodel_ckpt.errors import Problem

HINT = "use another checkpoint of this run, or a copy of the file"
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
        return sorted(self._listed.get(file, ()), key=_place)

    def slices(self, file: str) -> list[FileSlice]:
        """Return those in a file in their order. Raises :class:`CheckpointUnusable` for a damaged table."""
        found = list(self._listed.get(file, ()))
        for tree in self._trees:
            for tensor, stored in slices_in_rank_file(tree, file):
                if stored.nbytes:
                    found.append(FileSlice(stored, tensor.shape))
        return sorted(found, key=_place)


def _place(one: FileSlice) -> tuple[int, tuple[int, ...]]:
    # Interleaved slices of a tensor have the same start; their offsets order them.
    return one.stored.start, one.stored.offsets


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
        _, head = digest_range(descriptor, 0, num_bytes)
    return merkle_digest(head, slices) == record.digest


def damaged(root: Path, path: str, slices: Iterable[FileSlice]) -> list[FileSlice]:
    """Return the slices of a file with bytes that do not match their digests. Raises OSError."""
    with _opened(root, path) as descriptor:
        return [one for one in slices if _digest(descriptor, one) != one.stored.digest]


def damage_text(slices: Sequence[FileSlice]) -> str:
    """Name the damaged slices of a file with a different digest."""
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


def _digest(descriptor: int, one: FileSlice) -> str:
    """The digest of the bytes of a slice, row-major."""
    stored = one.stored
    if not stored.interleaved:
        return digest_range(descriptor, stored.start, stored.nbytes)[1]
    hashed = xxhash.xxh3_128()
    # Mapped, because an interleaved slice has many short runs: a system call for each would cost more than reading.
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
        for run in runs_in_file(stored, one.shape):
            # A mapping with a view of it cannot be closed (BufferError).
            with view[run.source : run.source + run.nbytes] as block:
                hashed.update(block)
    return digest_from(hashed)


def size_problem(checkpoint: Path, path: str, record: FileRecord) -> Problem | None:
    """Return the problem of a file that can be found without reading it; None when there is none."""
    where = checkpoint / path
    if link := link_on_the_way(checkpoint, path):
        return Problem("a checkpoint contains a symbolic link", str(checkpoint / link), path, HINT)
    what = value = ""
    try:
        status = os.lstat(where)
        if not stat.S_ISREG(status.st_mode):
            what, value = "is not a regular file", stat.filemode(status.st_mode)
        elif status.st_size != record.size:
            what = "has another size"
            value = f"{status.st_size} bytes, {record.size} when it was saved"
        elif is_sparse(status):
            what = "is nearly all hole"
            value = f"{status.st_size} bytes, of which {status.st_blocks * 512} are on the disk"
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        what, value = "is missing" if is_missing else "cannot be read", error.strerror or ""
    return Problem(f"a file of the checkpoint {what}", str(where), value, HINT) if what else None
