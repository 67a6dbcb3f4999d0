"""Write tar archives whose bytes depend only on the names and contents of their files. Imports no torch.

The format is ustar, with a pax header for a name or a size that it cannot represent. Owners are 0, times are 0, and
modes are those of readable files, so that packing the same directory twice gives the same bytes.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from automodel_ckpt.checkpoint.files.safe_open import open_safely
from automodel_ckpt.convert.formats.nemo.tar_reading import BLOCK_BYTES

_COPY_BYTES = 1 << 20
# Name of the root in archives of NeMo, which packs the directory ".".
_ROOT = "."


class TarWriter:
    """Writes members to *file*, which is empty, and seekable if :meth:`add_streamed` is used.

    Call :meth:`finish` at the end.

    Names are relative paths; each is written with ``./`` before it, as NeMo does.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.add_directory(_ROOT)

    def add_directory(self, name: str) -> None:
        """Add an entry for a directory."""
        self._file.write(_header(name, 0, is_directory=True))

    def add_bytes(self, name: str, content: bytes) -> None:
        """Add a file with this content."""
        self._file.write(_header(name, len(content)))
        self._file.write(content)
        self._pad(len(content))

    def add_file(self, name: str, directory: Path, path: str) -> None:
        """Add the regular file *path* of *directory*. Raises OSError, also if it changes size while it is read."""
        descriptor = open_safely(directory, path)
        with open(descriptor, "rb") as source:
            nbytes = source.seek(0, 2)
            source.seek(0)
            self._file.write(_header(name, nbytes))
            remaining = nbytes
            while remaining:
                block = source.read(min(remaining, _COPY_BYTES))
                if not block:
                    raise OSError(f"{directory / path} became shorter while it was packed")
                self._file.write(block)
                remaining -= len(block)
        self._pad(nbytes)

    def add_streamed(self, name: str, write: Callable[[BinaryIO], None]) -> int:
        """Add a file that *write* writes at the current position of the archive; return its number of bytes.

        The size of the file is not known before, so the header is written again at the end. Its length must not
        depend on the size: it always has a pax header with the size in it.
        """
        header_start = self._file.tell()
        self._file.write(_header_with_size(name, 0))
        start = self._file.tell()
        write(self._file)
        nbytes = self._file.tell() - start
        self._pad(nbytes)
        end = self._file.tell()
        self._file.seek(header_start)
        self._file.write(_header_with_size(name, nbytes))
        self._file.seek(end)
        return nbytes

    def finish(self) -> None:
        """Write the two blocks of zeros that end an archive."""
        self._file.write(bytes(2 * BLOCK_BYTES))

    def _pad(self, nbytes: int) -> None:
        self._file.write(bytes(-nbytes % BLOCK_BYTES))


def _entry(name: str, nbytes: int, is_directory: bool) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name if name == _ROOT else f"./{name}")
    entry.size = nbytes
    entry.mode = 0o644
    if is_directory:
        entry.type = tarfile.DIRTYPE
        entry.mode = 0o755
    return entry


def _header(name: str, nbytes: int, *, is_directory: bool = False) -> bytes:
    return _entry(name, nbytes, is_directory).tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _header_with_size(name: str, nbytes: int) -> bytes:
    entry = _entry(name, nbytes, is_directory=False)
    # Leading zeros keep the length constant; readers parse the value as a decimal number (POSIX pax, "size").
    entry.pax_headers = {"size": f"{nbytes:019d}"}
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
