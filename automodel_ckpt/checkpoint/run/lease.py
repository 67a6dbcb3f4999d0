"""One live run per directory: a lock that the kernel frees when its holder dies, and a heartbeat where locks end.

The holder keeps an exclusive ``flock`` on ``.run.lock`` and writes who it is, then a beat every few seconds. A second
run on the same machine is refused by the lock at once. Where the lock is free but another machine's name stands in the
file (a file system that does not share locks, a container that was killed), the newcomer watches the beat: it is
refused when the beat goes on, and takes over when it has stopped. A holder that ends by itself removes the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

from automodel_ckpt.errors import RecipeError

LOCK_FILE = ".run.lock"
BEAT_SECONDS = 5.0
WATCH_SECONDS = 20.0
_NO_LOCKS_HERE = (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)


class Lease:
    """The right to write in a run directory, held from construction until :meth:`release` or death.

    Raises :class:`RecipeError`, naming the holder, where another live run has it; OSError where the directory cannot be
    written. *beat_seconds* and *watch_seconds* are for file systems without shared locks.
    """

    def __init__(self, root: Path, *, beat_seconds: float = BEAT_SECONDS, watch_seconds: float = WATCH_SECONDS) -> None:
        self._path = root / LOCK_FILE
        self._owner = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._descriptor, locked = self._opened()
        self._beats = 0
        before = _holder(self._descriptor)
        reached = locked and before.get("boot_id") == boot_id()
        if before and not reached and _still_beating(self._descriptor, watch_seconds):
            os.close(self._descriptor)
            raise self._refusal(before)
        _held.add(self)
        self.taken_over = before
        self._beat()
        self._thread = threading.Thread(target=self._keep_beating, args=(beat_seconds,), daemon=True, name="lease")
        self._thread.start()
        # A forked data-loader worker must not keep the lock of a trainer that was killed.
        os.register_at_fork(after_in_child=self._forget)

    def release(self) -> None:
        """Let the next run in at once. Harmless when called again."""
        if self._descriptor < 0 or os.getpid() != self._owner:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            if os.fstat(self._descriptor).st_ino == os.stat(self._path).st_ino:
                os.unlink(self._path)
        self._forget()

    def _opened(self) -> tuple[int, bool]:
        """The lock file that has the name now (not one removed meanwhile), and whether the kernel locked it for us."""
        while True:
            locked = True
            self._refuse_special()
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    holder = _holder(descriptor)
                    os.close(descriptor)
                    raise self._refusal(holder) from None
                if error.errno not in _NO_LOCKS_HERE:
                    os.close(descriptor)
                    raise
                locked = False
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._path).st_ino == os.fstat(descriptor).st_ino:
                    return descriptor, locked
            os.close(descriptor)

    def _refuse_special(self) -> None:
        """The beat is written into the lock file: a device in its place must not even be opened."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(self._path).st_mode):
                raise RecipeError(
                    "the lock file of this directory is not a regular file", where=str(self._path),
                    value=stat.filemode(os.lstat(self._path).st_mode), remedy="remove it: no run makes such a file",
                )  # fmt: skip

    def _refusal(self, holder: dict[str, Any]) -> RecipeError:
        known = f"process {holder['pid']} on {holder['host']}, running {holder['command']}" if holder else "unknown"
        return RecipeError(
            "another run is alive in this directory",
            where=str(self._path.parent),
            value=known,
            remedy="wait for it or stop it, or give this run its own checkpoint.checkpoint_dir",
        )

    def _keep_beating(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            with contextlib.suppress(OSError):  # a full or stalled disk is the next save's matter
                self._beat()

    def _beat(self) -> None:
        self._beats += 1
        content = json.dumps(
            {
                "host": socket.gethostname(),
                "boot_id": boot_id(),
                "pid": os.getpid(),
                "command": " ".join(sys.argv)[:500],
                "beat": self._beats,
                "time": time.time(),
            }
        ).encode()
        # One write of padded length: a reader never sees half of it, and no old tail stays.
        os.pwrite(self._descriptor, content.ljust(1024), 0)

    def _forget(self) -> None:
        _held.discard(self)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_held: set[Lease] = set()
"""Those of this process."""


def release_all() -> None:
    """For a process that ends in the middle of starting, where nobody may know of a lease but its beat."""
    for lease in list(_held):
        lease.release()


def boot_id() -> str:
    """A name for this boot of this machine, the same in all its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _holder(descriptor: int) -> dict[str, Any]:
    """Who wrote the lock file; empty where nobody has, or not in this form."""
    with contextlib.suppress(ValueError, RecursionError):
        raw = json.loads(os.pread(descriptor, 4096, 0))
        if isinstance(raw, dict) and {"host", "pid", "command", "boot_id", "beat"} <= raw.keys():
            return raw
    return {}


def _still_beating(descriptor: int, seconds: float) -> bool:
    first, end = _holder(descriptor), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(0.2, seconds / 10))
        if _holder(descriptor) != first:
            return True
    return False
