"""Read tar archives of other programs strictly: only regular files and directories, each name once. Imports no torch.

A separate reader, because Python's tarfile also follows links, expands sparse files and allocates whatever a header
says. An archive of NeMo or TensorRT-LLM contains none of these, so each of them is an error.

Layout (source: POSIX.1-2024 pax, ustar interchange format; GNU tar manual, "Basic Tar Format"): each member is a header
of 512 bytes, then its content, padded to a multiple of 512. Two blocks of zeros end the archive. A member of type ``x``
(pax) or ``L`` (GNU) has attributes of the member that follows it, such as a long name.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.errors import CheckpointUnusable

BLOCK_BYTES = 512
MAX_MEMBERS = 20_000
_MAX_ATTRIBUTE_BYTES = 1 << 16
_MAX_NAME_BYTES = 1024
_MAX_LEVELS = 32
_MAX_PART_BYTES = 255
_GZIP_MAGIC = b"\x1f\x8b"
_REGULAR = (b"0", b"\0")
_DIRECTORY = b"5"
_PAX = b"x"
_PAX_GLOBAL = b"g"
_GNU_LONG_NAME = b"L"
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a pipe",
    b"K": "a link with a long target",
    b"S": "a sparse file",
}
# Weights hardly compress. An archive that grows more than this was made to fill a disk.
_MAX_GROWTH = 64
_FREE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class TarMember:
    """A regular file or directory in an archive. *name* is a safe relative path, without ``./`` at its beginning.

    A file has *nbytes*, which begin at byte *start* of the archive (after decompression).
    """

    name: str
    start: int
    nbytes: int
    is_directory: bool


class TarFault(Exception):
    """What is wrong with an archive. The functions of this module add the file's path."""


def is_tar(head: bytes) -> bool:
    """Return whether a file that begins with *head* (512 bytes) is an uncompressed tar archive of a current format."""
    return head[257:262] == b"ustar"


def is_gzip(head: bytes) -> bool:
    """Return whether a file that begins with *head* is compressed with gzip."""
    return head[:2] == _GZIP_MAGIC


def decompressed_head(path: Path) -> bytes:
    """Return the first 512 bytes of a gzip file after decompression; empty if it is damaged."""
    descriptor = open_regular(Path(os.path.realpath(path)))
    with os.fdopen(descriptor, "rb") as file, gzip.GzipFile(fileobj=file) as content:
        try:
            return content.read(BLOCK_BYTES)
        except (OSError, EOFError, zlib.error):
            return b""


class TarReader:
    """An archive that is read once, from its beginning to its end. Use it in a ``with`` block.

    What is read of it, after decompression, is also written to the file *copy*. At most *max_members* are read.

    Raises :class:`CheckpointUnusable` for a damaged archive, and for a member that is neither a regular file nor a
    directory, has an unsafe name, or occurs twice; OSError if the file cannot be read.
    """

    def __init__(
        self, path: Path, copy: BinaryIO | None = None, *, max_members: int = MAX_MEMBERS
    ) -> None:
        self.path = path
        self._copy = copy
        self._max_members = max_members
        descriptor = open_regular(path)
        self._raw: BinaryIO = os.fdopen(descriptor, "rb")
        self._file_bytes = os.fstat(descriptor).st_size
        self.is_compressed = is_gzip(os.pread(descriptor, 2, 0))
        self._file: BinaryIO = self._raw
        self._max_bytes = self._file_bytes
        if self.is_compressed:
            self._file = gzip.GzipFile(fileobj=self._raw)  # type: ignore[assignment]
            self._max_bytes = self._file_bytes * _MAX_GROWTH + _FREE_BYTES
        # The byte of the archive, after decompression, that is read next.
        self._position = 0

    def __enter__(self) -> TarReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._raw.close()

    def __iter__(self) -> Iterator[TarMember]:
        """Yield the members in the order of the archive. A member's content is skipped unless it was read."""
        seen: dict[str, bool] = {}
        try:
            while (member := self._next_member()) is not None:
                if len(seen) > self._max_members:
                    raise TarFault(f"it has more than {self._max_members} members")
                _check_name_is_new(member, seen)
                yield member
                padded = -(-member.nbytes // BLOCK_BYTES) * BLOCK_BYTES
                self._skip_to(member.start + padded)
        except (TarFault, EOFError, zlib.error, gzip.BadGzipFile) as error:
            self._fail(str(error))

    def blocks(self, member: TarMember, num_bytes: int = 1 << 20) -> Iterator[bytes]:
        """Yield the content of the member that was just yielded, in blocks of at most *num_bytes*."""
        assert self._position == member.start, "the member was already read or skipped"
        remaining = member.nbytes
        try:
            while remaining:
                block = self._read(min(remaining, num_bytes))
                remaining -= len(block)
                yield block
        except (TarFault, EOFError, zlib.error, gzip.BadGzipFile) as error:
            self._fail(str(error))

    def _next_member(self) -> TarMember | None:
        """Return the next file or directory; None at the end. Raises :class:`TarFault`."""
        long_name: str | None = None
        long_size: int | None = None
        while True:
            header = self._read(BLOCK_BYTES)
            if not any(header):
                return None
            _check_header(header)
            kind = header[156:157]
            nbytes = _number(header[124:136])
            if kind == _PAX_GLOBAL:
                if self._attributes(nbytes).keys() & {"path", "size"}:
                    raise TarFault("it has a name or a size for all members")
                continue
            if kind == _PAX:
                attributes = self._attributes(nbytes)
                long_name = attributes.get("path", long_name)
                if "size" in attributes:
                    long_size = _decimal(attributes["size"])
                continue
            if kind == _GNU_LONG_NAME:
                long_name = _text(self._padded(nbytes).rstrip(b"\0"))
                continue
            if kind not in (*_REGULAR, _DIRECTORY):
                name = long_name or _header_name(header)
                what = _KINDS.get(kind, f"of the unknown type {kind!r}")
                raise TarFault(f"its member {name[:200]!r} is {what}")
            if long_size is not None:
                nbytes = long_size
            name = long_name if long_name is not None else _header_name(header)
            is_directory = kind == _DIRECTORY or name.endswith("/")
            return self._member(name, nbytes, is_directory)

    def _member(self, name: str, nbytes: int, is_directory: bool) -> TarMember:
        if is_directory and nbytes:
            raise TarFault(f"its directory {name[:200]!r} has content")
        if self._position + nbytes > self._max_bytes:
            if self.is_compressed:
                raise TarFault(
                    f"it unpacks to more than {self._max_bytes} bytes, from {self._file_bytes}"
                )
            raise TarFault(f"its member {name[:200]!r} ends after the file")
        return TarMember(_safe_name(name), self._position, nbytes, is_directory)

    def _attributes(self, nbytes: int) -> dict[str, str]:
        """Read pax records: ``LENGTH KEY=VALUE`` and a line feed, where LENGTH counts all bytes of the record."""
        data = self._padded(nbytes)
        found: dict[str, str] = {}
        while data:
            digits, separator, _ = data[:16].partition(b" ")
            length = _decimal(_text(digits))
            if not separator or not len(digits) + 2 < length <= len(data):
                raise TarFault("a record of its attributes has a wrong length")
            record = data[len(digits) + 1 : length]
            key, separator, value = record.removesuffix(b"\n").partition(b"=")
            if not separator or not record.endswith(b"\n"):
                raise TarFault("a record of its attributes is damaged")
            if key.startswith(b"GNU.sparse"):
                raise TarFault("one of its members is a sparse file")
            if key in (b"path", b"size"):
                found[_text(key)] = _text(value)
            data = data[length:]
        return found

    def _padded(self, nbytes: int) -> bytes:
        if nbytes > _MAX_ATTRIBUTE_BYTES:
            raise TarFault(f"the attributes of a member take {nbytes} bytes")
        padded = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        return self._read(padded)[:nbytes]

    def _read(self, nbytes: int) -> bytes:
        data = self._file.read(nbytes)
        if len(data) < nbytes:
            raise TarFault(f"it is truncated: it ends at byte {self._position + len(data)}")
        self._position += nbytes
        if self._copy is not None:
            self._copy.write(data)
        return data

    def _skip_to(self, position: int) -> None:
        if not self.is_compressed:
            # Beyond the end, the next read reports that the archive is truncated.
            self._file.seek(position)
            self._position = position
            return
        while self._position < position:
            self._read(min(position - self._position, 1 << 20))

    def _fail(self, value: str) -> NoReturn:
        raise CheckpointUnusable(
            "this tar archive cannot be read",
            where=str(self.path),
            value=value,
            hint="take the file from another copy, or save it again with the program that made it",
        )


def decompress(path: Path, target: Path) -> None:
    """Write the archive *path*, which is compressed with gzip, to the new file *target* without compression.

    It is validated meanwhile, and its size after decompression is limited. Memory: one block of 1 MB. Raises as
    :class:`TarReader`.
    """
    with open(target, "xb") as copy, TarReader(path, copy) as reader:
        for _ in reader:
            pass


def tar_members(path: Path) -> list[TarMember]:
    """Return the members of the archive *path*, which is not a link. Raises as :class:`TarReader`."""
    with TarReader(path) as reader:
        return list(reader)


# ---------------------------------------------------------------- headers


def _check_header(header: bytes) -> None:
    # The checksum is computed with its own field as spaces.
    expected = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if _number(header[148:156]) != expected:
        raise TarFault("the checksum of a header is wrong")


def _header_name(header: bytes) -> str:
    name = _text(header[:100].partition(b"\0")[0])
    prefix = _text(header[345:500].partition(b"\0")[0])
    # GNU tar uses these bytes of its header for times.
    if prefix and header[257:263] == b"ustar\0":
        return f"{prefix}/{name}"
    return name


def _number(field: bytes) -> int:
    """Return a number in octal digits, or in binary after a byte 0x80 (GNU, for sizes from 8 GiB)."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits:
        return 0
    if not all(digit in b"01234567" for digit in digits):
        raise TarFault("a number in a header is not octal")
    return int(digits, 8)


def _decimal(text: str) -> int:
    # isdecimal() alone also accepts digits of other scripts.
    if not text.isascii() or not text.isdecimal() or len(text) > 19:
        raise TarFault("a number in the attributes of a member is not decimal")
    return int(text)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise TarFault("the name of a member is not UTF-8") from None


def _safe_name(name: str) -> str:
    """Return the normalized name of a member, ``.`` for the root. Raises :class:`TarFault` for an unsafe one."""
    parts = name.removesuffix("/").split("/")
    # NeMo packs a directory as ".", so that each name begins with "./".
    if parts[0] == "." and not name.startswith("/"):
        parts = parts[1:]
    if not parts:
        return "."
    plain = "/".join(parts)
    reason = layout.unsafe_path(plain)
    if reason is None and not plain.isprintable():
        reason = "it has unprintable characters"
    encoded_bytes = len(plain.encode(errors="replace"))
    if reason is None and (encoded_bytes > _MAX_NAME_BYTES or len(parts) > _MAX_LEVELS):
        reason = "it is too long"
    if reason is None and any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        reason = "one of its components is too long"
    if reason is not None:
        raise TarFault(f"its member {name[:200]!r} has an unsafe name: {reason}")
    return plain


def _check_name_is_new(member: TarMember, seen: dict[str, bool]) -> None:
    """Raise :class:`TarFault` if two members have one name, or a file is used as a directory.

    *seen* maps the names of earlier members, and of their parents, to whether they are directories.
    """
    known = seen.get(member.name)
    if known is not None and not (known and member.is_directory):
        raise TarFault(f"it has two members {member.name!r}")
    seen[member.name] = member.is_directory
    parent = member.name.rpartition("/")[0]
    while parent and parent not in seen:
        seen[parent] = True
        parent = parent.rpartition("/")[0]
    if parent and not seen[parent]:
        raise TarFault(f"its member {parent!r} is a file and a directory")
