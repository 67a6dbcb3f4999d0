"""``log.txt`` in the run directory: the messages of a run as text, for a person. No program reads it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.errors import LeaseLost

_MAX_WAITING = 1000
"""Messages that are kept before the file is opened: a run without checkpoints never opens it."""


class TextLog:
    """An append-only text file with a timestamp before each message. Thread-safe, and raises nothing.

    Messages before :meth:`open` are written when the file is opened: the run directory belongs to this run only then.
    The file is never shortened, also not by a resume from an earlier step. A message that cannot be written, for
    example on a full disk, is dropped: this file must never fail a run.
    """

    def __init__(self) -> None:
        self._waiting: list[str] | None = []
        self._file: IO[bytes] | None = None
        self._before_writing: Callable[[], None] = lambda: None
        self._is_writing = False
        self._lock = threading.RLock()

    def open(self, path: Path, before_writing: Callable[[], None]) -> None:
        """Append to *path* from here on, first the messages so far.

        *before_writing* is called before each change of the file. It raises :class:`LeaseLost` if another run owns the
        directory; then nothing is written.
        """
        with self._lock:
            waiting = self._waiting or []
            self._waiting = None
            self._before_writing = before_writing
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                self._file = os.fdopen(descriptor, "ab", buffering=0)
            self._append("".join(waiting))

    def write(self, message: str) -> None:
        """Append a message of one or more lines, with the present date and time."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        text = "".join(f"{stamp} {line}\n" for line in message.split("\n"))
        with self._lock:
            if self._waiting is None:
                self._append(text)
            elif len(self._waiting) < _MAX_WAITING:
                self._waiting.append(text)

    def close(self) -> None:
        """Write nothing more."""
        with self._lock:
            self._waiting = None
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
            self._file = None

    def _append(self, text: str) -> None:
        # before_writing() may log a message itself.
        if self._file is None or self._is_writing or not text:
            return
        self._is_writing = True
        try:
            with contextlib.suppress(OSError, LeaseLost):
                self._before_writing()
                # A name that is not valid UTF-8 has surrogates.
                self._file.write(text.encode("utf-8", "backslashreplace"))
        finally:
            self._is_writing = False
