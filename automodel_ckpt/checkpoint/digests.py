"""The digest of bytes as it is written (its algorithm's name and 32 hexadecimal digits), and what a file's record is.
Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

_ALGORITHM = "xxh3_128:"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size in bytes and the digest of its content."""

    size: int
    digest: str


def digest_of(data: bytes | memoryview) -> str:
    """Of bytes in memory."""
    return _ALGORITHM + xxhash.xxh3_128_hexdigest(data)


def digest_from(hashed: xxhash.xxh3_128) -> str:
    """Of all bytes that an XXH3-128 was given."""
    return _ALGORITHM + hashed.hexdigest()
