"""The records of an archive that ``torch.save`` wrote: stored as they are, side by side. Imports no torch."""

from __future__ import annotations

import struct

_MAX_DIRECTORY_BYTES = 64 << 20
_STORE = 0


class Fault(Exception):
    """What is wrong with stored state; the caller adds the file's path."""


def archive_records(data: bytes | memoryview) -> dict[str, memoryview]:
    """The records of a torch archive by name, without its top directory, as :func:`archive_ranges` finds them."""
    view = memoryview(data)
    return {name: view[begin:end] for name, (begin, end) in archive_ranges(data).items()}


def archive_ranges(data: bytes | memoryview) -> dict[str, tuple[int, int]]:
    """Where each record begins and ends in a torch archive, by name. Raises :class:`Fault` or struct.error.

    The end of the archive stands at the end of the data, and no byte belongs to two records. Nothing is copied: of
    mapped data only the directory and each record's head are read.
    """
    count, size, start = _directory(data)
    records: dict[str, tuple[int, int]] = {}
    at, total = start, 0
    for _ in range(count):
        signature, method, stored, length, name_bytes, extra_bytes, comment_bytes, offset = (
            struct.unpack_from("<4s6xH8xIIHHH8xI", data, at)
        )
        if signature != b"PK\x01\x02" or method != _STORE:
            raise Fault("the archive's records are compressed, or its directory is damaged")
        name = bytes(data[at + 46 : at + 46 + name_bytes]).decode()
        extra = bytes(data[at + 46 + name_bytes : at + 46 + name_bytes + extra_bytes])
        stored, length, offset = _wide(extra, stored, length, offset)
        begin = _body(data, offset)
        records[name.partition("/")[2]] = (begin, begin + length)
        total += length
        if stored != length or begin + length > start or total > len(data):
            raise Fault(f"the archive's record {name!r} is not in the archive")
        at += 46 + name_bytes + extra_bytes + comment_bytes
    if at != start + size or len(records) != count:
        raise Fault("the archive's directory is damaged")
    return records


def _directory(data: bytes | memoryview) -> tuple[int, int, int]:
    """Number of records, bytes and start of the directory (source: PKWARE APPNOTE 4.3.14 to 4.3.16)."""
    end = len(data) - 22
    if end < 0 or data[end : end + 4] != b"PK\x05\x06":
        raise Fault("it is not an archive of torch.save")
    count, size, start = struct.unpack_from("<HII", data, end + 10)
    if data[max(end - 20, 0) : max(end - 16, 0)] == b"PK\x06\x07":
        (end,) = struct.unpack_from("<Q", data, end - 12)
        if data[end : end + 4] != b"PK\x06\x06":
            raise Fault("the archive's end is damaged")
        count, size, start = struct.unpack_from("<QQQ", data, end + 32)
    if start + size != end or size > _MAX_DIRECTORY_BYTES:
        raise Fault("the archive's directory is not where it should be")
    return int(count), int(size), int(start)


def _wide(extra: bytes, stored: int, length: int, offset: int) -> tuple[int, int, int]:
    """Sizes and offset, those of 4 GB and more from the field that holds them (4.5.3)."""
    at, values = 0, [length, stored, offset]
    while at + 4 <= len(extra):
        tag, size = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            values = [next(wide, value) if value == 0xFFFFFFFF else value for value in values]
        at += 4 + size
    return values[1], values[0], values[2]


def _body(data: bytes | memoryview, offset: int) -> int:
    """Where a record's bytes begin (4.3.7: 30 fixed bytes, a name and an extra field of these lengths)."""
    signature, name_bytes, extra_bytes = struct.unpack_from("<4s22xHH", data, offset)
    if signature != b"PK\x03\x04":
        raise Fault("an archive's record does not begin where the directory says")
    return int(offset + 30 + name_bytes + extra_bytes)
