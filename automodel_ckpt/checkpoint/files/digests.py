"""Digests in their stored format (name of the algorithm, 32 hexadecimal digits), and the record of a file. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

_ALGORITHM = "xxh3_128:"
# Prefix of the Merkle digest of a file that several ranks wrote (parts/verify.py).
OF_SLICES = "xxh3_128_parts:"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size in bytes and the digest of its content."""

    size: int
    digest: str


def digest_of(data: bytes | memoryview) -> str:
    """The XXH3-128 digest of bytes in memory, in the stored format."""
    return _ALGORITHM + xxhash.xxh3_128_hexdigest(data)


def digest_from(hashed: xxhash.xxh3_128) -> str:
    """The digest of all bytes that *hashed* has processed, in the stored format."""
    return _ALGORITHM + hashed.hexdigest()
