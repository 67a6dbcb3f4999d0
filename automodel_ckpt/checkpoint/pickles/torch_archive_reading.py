"""Reading the directory of an archive that ``torch.save`` wrote: a zip file without compression. Imports no torch."""

from __future__ import annotations

import struct

_MAX_DIRECTORY_BYTES = 64 << 20
_STORE = 0


class Fault(Exception):
    """Damage of stored state. The caller adds the file's path."""


def archive_records(data: bytes | memoryview) -> dict[str, memoryview]:
    """Return {record name: bytes} of a torch archive, without the top directory. Raises Fault or struct.error."""
    view = memoryview(data)
    return {name: view[begin:end] for name, (begin, end) in archive_ranges(data).items()}


def archive_ranges(data: bytes | memoryview) -> dict[str, tuple[int, int]]:
    """Return {record name: (first byte, end)} of a torch archive. Raises :class:`Fault` or struct.error.

    Nothing is copied: of mapped data, only the directory and each record's head are read. The archive must fill the
    data. The records must not be compressed, and together must not be larger than the data: overlapping records
    could make a small file describe any amount of memory.
    """
    count, size, start = _directory(data)
    records = {}
    at = start
    total = 0
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
    # If two records had one name, readers could use different ones.
    if at != start + size or len(records) != count:
        raise Fault("the archive's directory is damaged")
    return records


def _directory(data: bytes | memoryview) -> tuple[int, int, int]:
    """Return the directory's number of records, bytes and start (source: PKWARE APPNOTE 4.3.14 to 4.3.16)."""
    end = len(data) - 22
    if end < 0 or data[end : end + 4] != b"PK\x05\x06":
        raise Fault("it is not an archive of torch.save")
    count, size, start = struct.unpack_from("<HII", data, end + 10)
    # A locator of 20 bytes before the end record points to the 64-bit end record.
    if data[max(end - 20, 0) : max(end - 16, 0)] == b"PK\x06\x07":
        (end,) = struct.unpack_from("<Q", data, end - 12)
        if data[end : end + 4] != b"PK\x06\x06":
            raise Fault("the archive's end is damaged")
        count, size, start = struct.unpack_from("<QQQ", data, end + 32)
    if start + size != end or size > _MAX_DIRECTORY_BYTES:
        raise Fault("the archive's directory is not where it should be")
    return int(count), int(size), int(start)


def _wide(extra: bytes, stored: int, length: int, offset: int) -> tuple[int, int, int]:
    """Return stored size, length and offset. Values of 4 GiB and more are in an extra field, in this order (4.5.3)."""
    at = 0
    values = [length, stored, offset]
    while at + 4 <= len(extra):
        tag, size = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            for index, value in enumerate(values):
                if value == 0xFFFFFFFF:
                    values[index] = next(wide, value)
        at += 4 + size
    return values[1], values[0], values[2]


def _body(data: bytes | memoryview, offset: int) -> int:
    """Return where a record's bytes begin (4.3.7: 30 fixed bytes, a name and an extra field of these lengths)."""
    signature, name_bytes, extra_bytes = struct.unpack_from("<4s22xHH", data, offset)
    if signature != b"PK\x03\x04":
        raise Fault("an archive's record does not begin where the directory states")
    # These lengths may differ from the directory's: torch pads this extra field for alignment.
    return int(offset + 30 + name_bytes + extra_bytes)
