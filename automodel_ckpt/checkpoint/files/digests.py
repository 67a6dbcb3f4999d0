"""Digests in their stored format (name of the algorithm, 32 hexadecimal digits), and the record of a file. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

_ALGORITHM = "xxh3_128:"
# The digest of the list of a file's byte ranges.
_OF_RANGES = "xxh3_128_ranges:"
# Prefix of the Merkle digest of a file that several ranks wrote (merkle.py).
OF_SLICES = "xxh3_128_parts:"
# The same, computed from the segments of a slice table.
OF_SEGMENTS = "xxh3_128_segments:"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size in bytes and the digest of its content.

    A file that several ranks wrote, each its own byte range, has *ranges*: their sizes and digests, in the order of the
    file. Its digest is that of this list (:func:`record_of_ranges`).
    """

    size: int
    digest: str
    ranges: tuple[tuple[int, str], ...] = ()


def record_of_ranges(ranges: Sequence[tuple[int, str]]) -> FileRecord:
    """The record of a file that consists of byte *ranges*: the size in bytes and the digest of each."""
    # The text is part of the format: every reader must get the same bytes (docs/format.md).
    text = "".join(f"{nbytes} {digest}\n" for nbytes, digest in ranges)
    digest = _OF_RANGES + xxhash.xxh3_128_hexdigest(text.encode())
    return FileRecord(sum(nbytes for nbytes, _ in ranges), digest, tuple(ranges))


def ranges_fault(record: FileRecord) -> str | None:
    """Return why the size or the digest of a file does not follow from its ranges; None if it does."""
    if not record.ranges:
        if record.digest.startswith(_OF_RANGES):
            return "it has the digest of byte ranges, and lists none"
        return None
    if min(nbytes for nbytes, _ in record.ranges) < 0 or record_of_ranges(record.ranges) != record:
        return "its byte ranges are not those of its digest"
    return None


def digest_of(data: bytes | memoryview) -> str:
    """The XXH3-128 digest of bytes in memory, in the stored format."""
    return _ALGORITHM + xxhash.xxh3_128_hexdigest(data)


def digest_from(hashed: xxhash.xxh3_128) -> str:
    """The digest of all bytes that *hashed* has processed, in the stored format."""
    return _ALGORITHM + hashed.hexdigest()


class ContentDigest:
    """Computes the digest of a file from its bytes, in order, as its *record* states it: of all, or of byte ranges."""

    def __init__(self, record: FileRecord) -> None:
        self._sizes = [nbytes for nbytes, _ in record.ranges]
        self._digests: list[tuple[int, str]] = []
        self._current = xxhash.xxh3_128()
        self._num_bytes = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes of the file."""
        view = memoryview(data).cast("B")
        while len(self._digests) < len(self._sizes):
            missing = self._sizes[len(self._digests)] - self._num_bytes
            if len(view) < missing:
                break
            self._add(view[:missing])
            self._digests.append((self._num_bytes, digest_from(self._current)))
            self._current, self._num_bytes = xxhash.xxh3_128(), 0
            view = view[missing:]
        self._add(view)

    def _add(self, view: memoryview) -> None:
        self._current.update(view)
        self._num_bytes += len(view)

    def digest(self) -> str:
        """The digest of all bytes so far. It is that of the record only if they are the content of the file."""
        if not self._sizes:
            return digest_from(self._current)
        rest = [(self._num_bytes, digest_from(self._current))] if self._num_bytes else []
        return record_of_ranges([*self._digests, *rest]).digest
