"""Tar archives: other programs' are read strictly, and ours are written reproducibly. Imports no torch.

An archive of NeMo or TensorRT-LLM has only regular files and directories, each name once, so that a link, a sparse file
or a device is an error. The bytes of written archives depend only on the names and contents of their files: owners and
times are 0. Formats: POSIX pax, GNU tar.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import open_regular, open_safely
from automodel_ckpt.convert.formats.files import is_gzip
from automodel_ckpt.errors import unusable

_BLOCK_BYTES = 1 << 20
_MAX_MEMBERS = 20_000
_MAX_NAME_BYTES = 1024
_MAX_LEVELS = 32
# Weights hardly compress. An archive that grows more than this was made to fill a disk.
_MAX_GROWTH = 64
_FREE_BYTES = 256 << 20
# Name of the root in archives of NeMo, which packs the directory ".".
_ROOT = "."


@dataclass(frozen=True)
class TarMember:
    """A regular file or directory in an archive. *name* is a safe relative path, without ``./`` at its beginning.

    A file has *nbytes*, which begin at byte *start* of the archive (after decompression).
    """

    name: str
    start: int
    nbytes: int
    is_directory: bool


class TarFault(Exception):
    """What is wrong with an archive. :class:`TarReader` adds the file's path."""


class _Stream:
    """A file, decompressed, for tarfile: it is read forward, to *limit* bytes at most."""

    def __init__(self, file: BinaryIO, limit: int, *, is_compressed: bool) -> None:
        self._file = file
        self._limit = limit
        self._is_compressed = is_compressed
        self._position = 0
        self.close = file.close

    def read(self, size: int) -> bytes:
        # tarfile reads the attributes of a member at once, as many bytes as a header claims.
        if not 0 <= size <= _BLOCK_BYTES:
            raise TarFault(f"the attributes of a member take {size} bytes")
        data = b""
        # A decompressor may return fewer bytes than there are.
        while len(data) < size and (more := self._file.read(size - len(data))):
            data += more
        self._position += len(data)
        if self._position > self._limit:
            raise TarFault(f"it unpacks to more than {self._limit} bytes")
        return data

    def seek(self, position: int) -> None:
        if not self._is_compressed:
            self._position = self._file.seek(position)
            return
        while self._position < position:
            if not self.read(min(position - self._position, _BLOCK_BYTES)):
                raise TarFault("it is truncated")

    def tell(self) -> int:
        return self._position


class TarReader:
    """An archive that is read once, from its beginning to its end. Use it in a ``with`` block.

    *decompress* returns the decompressed content of the opened file. By default, files of gzip are decompressed.
    *faults* are what it raises for damage. Without *max_members*, the caller limits the members and their sizes.

    Raises :class:`CheckpointUnusable` for a damaged archive, and for a member that is neither a regular file nor a
    directory, has an unsafe name, or occurs twice; OSError if the file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        decompress: Callable[[BinaryIO], BinaryIO] | None = None,
        faults: tuple[type[Exception], ...] = (),
        *,
        max_members: int | None = _MAX_MEMBERS,
    ) -> None:
        self.path = path
        self._max_members = max_members
        self._faults: tuple[type[Exception], ...] = (
            *(TarFault, tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile),
            # tarfile, of damaged numbers, names and chains of attributes.
            *(ValueError, OverflowError, RecursionError),
            *faults,
        )
        descriptor = open_regular(path)
        self._raw = os.fdopen(descriptor, "rb")
        self._limit = os.fstat(descriptor).st_size
        self.is_compressed = decompress is not None or is_gzip(os.pread(descriptor, 2, 0))
        content = self._raw
        if self.is_compressed:
            self._limit = self._limit * _MAX_GROWTH + _FREE_BYTES if max_members else 1 << 62
            content = decompress(self._raw) if decompress else gzip.GzipFile(fileobj=self._raw)  # type: ignore[assignment]
        self._file = _Stream(content, self._limit, is_compressed=self.is_compressed)

    def __enter__(self) -> TarReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._raw.close()

    def __iter__(self) -> Iterator[TarMember]:
        """Yield the members in the order of the archive. A member's content is skipped unless it was read."""
        seen: set[str] = set()
        with self._reported():
            archive: Any = tarfile.TarFile(
                fileobj=cast(BinaryIO, self._file), encoding="utf-8", errors="strict"
            )
            entry = archive.firstmember
            while entry is not None:
                member = self._member(entry)
                if archive.pax_headers.keys() & {"path", "size"}:
                    raise TarFault("it has a name or a size for all members")
                if self._max_members is not None and len(seen) > self._max_members:
                    raise TarFault(f"it has more than {self._max_members} members")
                if member.name in seen and not member.is_directory:
                    raise TarFault(f"it has two members {member.name!r}")
                seen.add(member.name)
                self._file.seek(member.start)
                yield member
                self._file.seek(archive.offset)
                entry = _next(archive)

    def blocks(self, member: TarMember | None) -> Iterator[bytes]:
        """Yield the content of the member that was just yielded, in blocks; without one, of the whole archive."""
        with self._reported():
            nbytes = member.nbytes if member is not None else self._limit + 1
            while nbytes and (block := self._file.read(min(nbytes, _BLOCK_BYTES))):
                nbytes -= len(block)
                yield block
            if nbytes and member is not None:
                raise TarFault("it is truncated")

    def _member(self, entry: tarfile.TarInfo) -> TarMember:
        name = _safe_name(entry.name)
        is_file = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
        if not (is_file or entry.isdir()) or entry.sparse is not None:
            kind = "a link" if entry.islnk() or entry.issym() else "a sparse or special file"
            raise TarFault(f"its member {name!r} is {kind}")
        end = entry.offset_data + entry.size
        if entry.size < 0 or end > self._limit or (entry.isdir() and entry.size):
            raise TarFault(
                f"its member {name!r} ends after the file, or is a directory with content"
            )
        return TarMember(name, entry.offset_data, entry.size, entry.isdir())

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except self._faults as error:
            raise unusable(
                "this tar archive cannot be read", self.path, str(error)[:300]
            ) from error


def _next(archive: tarfile.TarFile) -> tarfile.TarInfo | None:
    # Not next(), which takes a damaged header for the end of the archive.
    try:
        return tarfile.TarInfo.fromtarfile(archive)
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
        return None


def decompress(path: Path, target: Path) -> None:
    """Write the archive *path*, which is compressed with gzip, to the new file *target* without compression.

    Its size after decompression is limited. Raises as :class:`TarReader`.
    """
    with open(target, "xb") as copy, TarReader(path) as reader:
        copy.writelines(reader.blocks(None))


def _safe_name(name: str) -> str:
    """Return the normalized name of a member, ``.`` for the root. Raises :class:`TarFault` for an unsafe one."""
    # NeMo packs a directory as ".", so that each name begins with "./".
    plain = name.removeprefix("./")
    if plain == _ROOT:
        return plain
    is_long = len(plain.encode()) > _MAX_NAME_BYTES or plain.count("/") > _MAX_LEVELS
    if layout.unsafe_path(plain) or is_long or not plain.isprintable():
        raise TarFault(f"its member {name[:200]!r} has an unsafe name")
    return plain


# ---------------------------------------------------------------- writing


class TarWriter:
    """Writes members to *file*, which is empty, and seekable if :meth:`add_streamed` is used.

    Call :meth:`finish` at the end. Names are relative paths; each is written with ``./`` before it, as NeMo does.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._archive = tarfile.TarFile(
            fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="strict"
        )
        root = _entry(_ROOT, 0)
        root.type, root.mode = tarfile.DIRTYPE, 0o755
        self._archive.addfile(root)

    def add_bytes(self, name: str, content: bytes) -> None:
        """Add a file with this content."""
        self._archive.addfile(_entry(f"./{name}", len(content)), io.BytesIO(content))

    def add_file(self, name: str, directory: Path, path: str) -> None:
        """Add the regular file *path* of *directory*. Raises OSError, also if it becomes shorter while it is read."""
        with open(open_safely(directory, path), "rb") as source:
            self._archive.addfile(_entry(f"./{name}", os.fstat(source.fileno()).st_size), source)

    def add_streamed(self, name: str, write: Callable[[BinaryIO], None]) -> None:
        """Add a file that *write* writes at the current position of the archive.

        The size of the file is not known before, so the header is written again at the end. Its length must not
        depend on the size: it always has a pax header with the size in it. Readers ignore the size's leading zeros.
        """
        header_start = self._file.tell()
        self._file.write(_streamed_header(name, 0))
        start = self._file.tell()
        write(self._file)
        nbytes = self._file.tell() - start
        self._file.write(bytes(-nbytes % tarfile.BLOCKSIZE))
        self._archive.offset = self._file.tell()
        self._file.seek(header_start)
        self._file.write(_streamed_header(name, nbytes))
        self._file.seek(self._archive.offset)

    def finish(self) -> None:
        """Write the blocks of zeros that end an archive."""
        self._archive.close()


def _entry(name: str, nbytes: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = nbytes
    return entry


def _streamed_header(name: str, nbytes: int) -> bytes:
    entry = _entry(f"./{name}", nbytes)
    entry.pax_headers = {"size": f"{nbytes:019d}"}
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
