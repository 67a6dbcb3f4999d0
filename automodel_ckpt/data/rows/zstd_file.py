"""Read files that are compressed with Zstandard. Python has no module for it before 3.14; Arrow can decompress it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import IO, Any

_SKIPPED_BYTES = 1 << 20


def open_zstd(path: Path) -> IO[bytes]:
    """Open a file for reading its decompressed bytes.

    Seeking backward decompresses from the beginning again, as in Python's other compressed files. Raises OSError;
    without an errno if the file is damaged or truncated.
    """
    return io.BufferedReader(_ZstdFile(path))


class _ZstdFile(io.RawIOBase):
    """The decompressed bytes of *path*. Supports absolute positions of :meth:`seek` only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = _decompressed(path)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes = int(self._stream.readinto(buffer))
        self._position += num_bytes
        return num_bytes

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET:
            raise io.UnsupportedOperation("only positions from the beginning")
        if offset < self._position:
            self._stream.close()
            self._stream = _decompressed(self._path)
            self._position = 0
        while self._position < offset:
            skipped = len(self._stream.read(min(_SKIPPED_BYTES, offset - self._position)))
            if not skipped:
                break
            self._position += skipped
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def _decompressed(path: Path) -> Any:
    # Imported here because it takes a fraction of a second, and other files do not need it.
    import pyarrow  # type: ignore[import-untyped]

    return pyarrow.input_stream(str(path), compression="zstd")
