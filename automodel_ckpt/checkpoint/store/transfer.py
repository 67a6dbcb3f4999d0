"""How fast and in how many threads bytes are sent, and what an interrupted upload has sent already."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.run.notes import Damaged, read_note, write_note

_MAX_MEMORY_BYTES = 64 << 20


class Throttle:
    """Limits the rate of all threads together to *bytes_per_second*; None: no limit. Also counts the bytes."""

    def __init__(
        self,
        bytes_per_second: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self.nbytes = 0
        self._stopped = threading.Event()
        # A wait that stop() ends: at a low rate, it can take minutes.
        self._clock, self._sleep = clock, sleep or self._stopped.wait
        self._lock = threading.Lock()
        self._free_at = clock()

    def stop(self) -> None:
        """Make :meth:`take` raise from here on, so that uploads end after the requests in progress."""
        self._stopped.set()

    def take(self, nbytes: int) -> None:
        """Wait until *nbytes* more may be sent. Raises InterruptedError after :meth:`stop`."""
        if self._stopped.is_set():
            raise InterruptedError("the upload was stopped")
        with self._lock:
            self.nbytes += nbytes
            if self.bytes_per_second is None:
                return
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self.bytes_per_second
        if begin > now:
            self._sleep(begin - now)
            if self._stopped.is_set():
                raise InterruptedError("the upload was stopped")


@dataclass
class UploadMemory:
    """What an interrupted upload of one checkpoint has sent, in a file on the local disk.

    It belongs to the checkpoint whose manifest has the *digest*, and to the store at *url*. *done* are the files that
    are in the store. *parts* are uploads of large files in parts: the ID of the upload and the bytes of a part, by
    file.
    """

    path: Path
    digest: str
    url: str
    done: set[str] = field(default_factory=set)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def read(cls, path: Path, digest: str, url: str) -> UploadMemory:
        """Read the memory of the upload with the manifest *digest* to *url*; empty if there is none, or if it is
        damaged."""
        memory = cls(path, digest, url)
        found = read_note(path.parent, path.name, _MAX_MEMORY_BYTES)
        # What was sent to another store is not in this one.
        if found.get("digest") == digest and found.get("url") == url:
            with contextlib.suppress(*Damaged):
                done = {str(name) for name in found["done"]}
                memory.parts = {str(name): dict(entry) for name, entry in found["parts"].items()}
                memory.done = done
        return memory

    def note_done(self, name: str) -> None:
        """Record that a file is in the store."""
        with self._lock:
            self.done.add(name)
            self.parts.pop(name, None)
            self._write()

    def note_parts(self, name: str, entry: dict[str, Any] | None) -> None:
        """Record the upload of a file in parts; None: there is none."""
        with self._lock:
            if entry is None:
                self.parts.pop(name, None)
            else:
                self.parts[name] = entry
            self._write()

    def forget(self) -> None:
        """Remove the file: the upload is complete, or must start from the beginning."""
        with _ignoring_read_only():
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        document = {
            "digest": self.digest,
            "url": self.url,
            "done": sorted(self.done),
            "parts": self.parts,
        }
        with _ignoring_read_only():
            write_note(self.path, document)


@contextlib.contextmanager
def _ignoring_read_only() -> Iterator[None]:
    """Ignore that a directory must not be written, such as that of a checkpoint on an archive that is mounted
    read-only.

    Without the memory, a later attempt sends all files again.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
