"""The zip container of ``torch.save``, built record by record. Imports no torch.

The archive is a zip file (source: PKWARE APPNOTE 4.3) without compression. Each record has a local header, padded so
that its data begin at a multiple of 64 bytes, the data, and a descriptor with their CRC-32. The directory follows in
its 64-bit form.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

_ALIGN = 64
_FLAGS = 0x0808  # sizes and CRC follow the data; names are UTF-8
_MADE_BY, _NEEDED = 0x031E, 0x002D  # Unix, 3.0; 4.5: 64-bit sizes
_MAX_32 = 0xFFFFFFFF
MARKS_BEFORE = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little"}
"""The records that torch writes between the pickle and the data."""
MARKS_AFTER = {"version": b"3\n", ".data/serialization_id": b"0" * 40}
"""The records that torch writes after the data. Its identifier has the same length and consists of hashes; no reader
uses it."""


@dataclass(slots=True)
class ZipRecords:
    """Builds the bytes of an archive, one record after another.

    The caller takes the bytes out of *written*, and writes the data of large records itself: *skipped* counts the bytes
    of the archive that precede those in *written*.
    """

    written: bytearray = field(default_factory=bytearray)
    skipped: int = 0
    _begun: dict[str, int] = field(default_factory=dict)
    _entries: dict[str, bytes] = field(default_factory=dict)

    @property
    def position(self) -> int:
        """The number of bytes of the archive so far."""
        return self.skipped + len(self.written)

    def add(self, name: str, content: bytes) -> None:
        """Write a small record with its data."""
        self.begin(name)
        self.written += content
        self.end(name, len(content), zlib.crc32(content))

    def begin(self, name: str) -> None:
        """Begin a record: write its local header, whose extra field is padded so that the data is aligned."""
        at = self.position
        path = f"archive/{name}".encode()
        self._begun[name] = at
        unpadded = at + 30 + len(path) + 4
        padding = -unpadded % _ALIGN
        self.written += struct.pack(
            "<4s5H3I2H", b"PK\3\4", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(path), padding + 4
        )
        self.written += path + struct.pack("<2sH", b"FB", padding) + b"Z" * padding

    def end(self, name: str, nbytes: int, crc: int) -> None:
        """Write the descriptor that follows the data, with 64-bit sizes where they are needed."""
        at = self._begun[name]
        path = f"archive/{name}".encode()
        self.written += struct.pack("<4sI", b"PK\7\b", crc)
        self.written += struct.pack("<2Q" if nbytes > _MAX_32 else "<2I", nbytes, nbytes)
        # Values above 32 bits are stored in an extra field of the directory's entry, in this order.
        large = [value for value in (nbytes, nbytes, at) if value > _MAX_32]
        extra = b""
        if large:
            extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large)
        short_nbytes = min(nbytes, _MAX_32)
        short_at = min(at, _MAX_32)
        entry = struct.pack(
            "<4s6H3I", b"PK\1\2", 0, 0, _FLAGS, 0, 0, 0, crc, short_nbytes, short_nbytes
        )
        entry += struct.pack("<5H2I", len(path), len(extra), 0, 0, 0, 0, short_at)
        self._entries[name] = entry + path + extra

    def entry_at(self, name: str) -> int:
        """The offset of a record's entry in the directory, in bytes."""
        names = list(self._entries)
        return sum(len(self._entries[other]) for other in names[: names.index(name)])

    def finish(self) -> None:
        """Write the directory, its 64-bit end record and locator, and its 32-bit end record."""
        directory = b"".join(self._entries.values())
        count = len(self._entries)
        size = len(directory)
        start = self.position
        end = start + size
        self.written += directory
        self.written += struct.pack(
            "<4sQ2H2I4Q", b"PK\6\6", 44, _MADE_BY, _NEEDED, 0, 0, count, count, size, start
        )
        self.written += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        self.written += struct.pack(
            "<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, min(start, _MAX_32), 0
        )


_DATA = "data/0"


class TensorArchive(NamedTuple):
    """*head*, then the tensor's bytes, then *tail*, in which the bytes' CRC-32 (little-endian) has to be put at each of
    *crc_at*."""

    head: bytes
    tail: bytes
    crc_at: tuple[int, ...]


def archive_around(program: bytes, nbytes: int) -> TensorArchive:
    """Return the archive of a tensor of *nbytes* without these; *program* is the pickle that describes the tensor."""
    zip_file = ZipRecords()
    zip_file.add("data.pkl", program)
    for name, content in MARKS_BEFORE.items():
        zip_file.add(name, content)
    zip_file.begin(_DATA)
    head = bytes(zip_file.written)
    zip_file.written.clear()
    zip_file.skipped = len(head) + nbytes
    # The CRC is not known yet: the writer puts it at *crc_at*.
    zip_file.end(_DATA, nbytes, 0)
    crc_at = [4]  # in the descriptor, behind its signature
    for name, content in MARKS_AFTER.items():
        zip_file.add(name, content)
    directory = len(zip_file.written)
    zip_file.finish()
    # In the directory's entry of a record the CRC is 16 bytes after its signature.
    crc_at.append(directory + zip_file.entry_at(_DATA) + 16)
    return TensorArchive(head, bytes(zip_file.written), tuple(crc_at))
