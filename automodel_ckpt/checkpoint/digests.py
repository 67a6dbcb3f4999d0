"""The digest of bytes as it is written: its algorithm's name and 32 hexadecimal digits. Imports no torch."""

from __future__ import annotations

import xxhash

_ALGORITHM = "xxh3_128:"


def digest_of(data: bytes | memoryview) -> str:
    """Of bytes in memory."""
    return _ALGORITHM + xxhash.xxh3_128_hexdigest(data)


def digest_from(hashed: xxhash.xxh3_128) -> str:
    """Of all bytes that an XXH3-128 was given."""
    return _ALGORITHM + hashed.hexdigest()
