"""Allow one live run per directory, with a lock that the kernel releases and a heartbeat for where locks do not work.

The owner has an exclusive ``flock`` on ``.run.lock``. The content of the file identifies the owner by a unique token,
and changes every few seconds (the heartbeat). A second run cannot lock the file, and is rejected immediately.

A granted lock is not sufficient: two mounts of a directory (FUSE, NFS without a lock service, other nodes) do not share
locks, so both runs are granted one. A run that finds the record of another owner therefore watches its heartbeat, and
takes over only if there is none. It need not watch if it can prove that the owner has ended: the lock is shared (same
boot of the same kernel, same mounted file system), or the owner's process does not exist in the same process namespace.

Taking over replaces the lock file by rename. An owner that was only suspended then finds another token in the file:
:meth:`Lease.check`, called before everything that the run publishes or logs, raises :class:`LeaseLost`.

The lock file is opened for every read, because network file systems compare their caches with the server when a file is
opened. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from automodel_ckpt.base.durable_io import (
    file_system_identity,
    file_system_of,
    is_gone,
    kernel_boot_id,
    lock,
    open_lock_file,
    pid_namespace,
)
from automodel_ckpt.checkpoint.files.layout import LOCK_FILE
from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.checkpoint.parts.failures import STALLED
from automodel_ckpt.errors import LeaseLost, RecipeError

RUN_HINT = "wait for it or stop it, or give this run its own checkpoint.checkpoint_dir"
COMMAND_HINT = "wait until it ends, then run this command again"
BEAT_SECONDS = 5.0
SETTLE_SECONDS = 2.0
"""The time after a takeover in which another run that watched the same dead owner may also take over."""


class Lease:
    """The right to write in a run directory, from construction until :meth:`release` or the end of the process.

    *beat_seconds* is the time between two heartbeats. *watch_seconds* is how long another owner must have no heartbeat
    (default: by the type of file system). Raises :class:`RecipeError` with the owner and *hint* if another live process
    uses the directory, OSError if the directory cannot be written.
    """

    def __init__(
        self,
        root: Path,
        *,
        beat_seconds: float = BEAT_SECONDS,
        watch_seconds: float | None = None,
        hint: str = RUN_HINT,
    ) -> None:
        self._path = root / LOCK_FILE
        self._hint = hint
        self._process = os.getpid()
        self._token = uuid.uuid4().hex
        self._beats = 0
        self._descriptor = -1
        self._loss: LeaseLost | None = None
        self._file_guard = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.taken_over: Holder | None = None
        """The previous owner, if it ended without releasing the directory; otherwise None."""
        # Before the file exists: release_all() must find it if a signal interrupts the acquisition.
        _held.add(self)
        try:
            self._acquire(usual_watch_seconds(root) if watch_seconds is None else watch_seconds)
        # A signal's exception is not caught here, so that release_all() still removes the file.
        except (OSError, RecipeError):
            self._forget()
            raise
        self._thread = threading.Thread(
            target=self._keep_beating, args=(beat_seconds,), daemon=True, name="lease"
        )
        try:
            self._thread.start()
        except RuntimeError:
            # At a limit of threads: the caller can try again after raising it.
            self.release()
            raise
        # A forked data-loader worker must not keep the lock of a trainer that was killed.
        os.register_at_fork(after_in_child=self._forget)

    # ---------------------------------------------------------------- checking and releasing

    @property
    def token(self) -> tuple[Path, str]:
        """The lock file, and the token that it must contain: for :func:`check_token` in another process of the run."""
        return self._path, self._token

    @property
    def is_lost(self) -> bool:
        """Whether a heartbeat or a check has found that another run took over. Reads no file."""
        return self._loss is not None

    def check(self) -> None:
        """Check that the lock file contains the token of this run, and that this is the process that has the lease.

        Raises :class:`LeaseLost` if it does not, and in all later calls. Raises OSError if it cannot be read.
        """
        if os.getpid() != self._process:
            # The child of a fork has a copy of this object, and the parent still writes.
            raise LeaseLost(
                "this process was forked from the run's process, which alone may write in its directory",
                where=self._path.parent,
                value=f"process {os.getpid()}, a child of {self._process}",
                hint="",
            )
        with self._file_guard:
            os.close(self._open_own(os.O_RDONLY))

    def release(self) -> None:
        """Allow the next run to start immediately. Does nothing if it was called before, or if the lease is lost."""
        # A forked child has a copy of this object and must not remove the file of its parent.
        if os.getpid() != self._process or self not in _held:
            return
        self._stop.set()
        # Without an identifier, it did not start: at a limit of threads, or because of an interruption.
        if self._thread is not None and self._thread.ident is not None:
            # Not under the guard: a heartbeat in progress needs it, and join() would never return.
            self._thread.join()
        with contextlib.suppress(OSError, LeaseLost), self._file_guard:
            # The file may belong to a run that took over. Removing it would allow a third run to start.
            os.close(self._open_own(os.O_RDONLY))
            os.unlink(self._path)
        self._forget()

    def _open_own(self, flags: int) -> int:
        """Open the lock file, which contains the token of this run. Raises :class:`LeaseLost` or OSError."""
        if self._loss is not None:
            raise self._loss
        try:
            descriptor = open_lock_file(self._path, flags)
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                raise  # the whole directory was removed, which the next save reports
            self._loss = lost(self._path, None)
            raise self._loss from None
        holder = None
        try:
            holder = Holder.read(descriptor)
        except PermissionError:
            # On SMB, a lock is mandatory and belongs to a handle: other handles of this process cannot read either.
            os.close(descriptor)
            descriptor = os.dup(self._descriptor)
            holder = Holder.read(descriptor)
        finally:
            if holder is None or holder.token != self._token:
                os.close(descriptor)
        if holder is None or holder.token != self._token:
            self._loss = lost(self._path, holder)
            raise self._loss
        return descriptor

    def _keep_beating(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            # The next save reports a full or stalled disk, and the next check raises a loss.
            with contextlib.suppress(OSError, LeaseLost):
                self._beat()

    def _beat(self) -> None:
        """Write the next heartbeat, and close the file, because network file systems send it to the server then.

        If another run takes over between the check of the token and the write, it has replaced the file, and the write
        changes a file without a name.
        """
        with self._file_guard:
            descriptor = self._open_own(os.O_RDWR)
            try:
                self._beats += 1
                os.pwrite(descriptor, self._record(descriptor).to_bytes(), 0)
            finally:
                os.close(descriptor)

    def _record(self, descriptor: int) -> Holder:
        device, file_system_id = file_system_identity(descriptor)
        return Holder(
            host=socket.gethostname(),
            # Without a boot id, this equals no boot id, so that only the heartbeat shows an end.
            boot_id=kernel_boot_id() or socket.gethostname(),
            pid=os.getpid(),
            command=" ".join(sys.argv)[:500],
            beat=self._beats,
            token=self._token,
            pid_namespace=pid_namespace(),
            device=device,
            file_system_id=file_system_id,
        )

    def _forget(self) -> None:
        _held.discard(self)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # ---------------------------------------------------------------- acquiring

    def _acquire(self, watch_seconds: float) -> None:
        while True:
            found = self._lock_existing()
            if found is None:
                if self._place(replace=False):
                    return
                continue
            descriptor, is_locked = found
            try:
                before = Holder.read(descriptor)
                watched = before is not None and not before.has_ended(descriptor, is_locked)
                if watched and is_beating(self._path, watch_seconds):
                    raise rejection(self._path, before, self._hint)
                if not is_at(self._path, descriptor):
                    # The owner removed the file, and another run may have created a new one, between opening and
                    # locking it or during the watch. A lock on a file without a name excludes no process.
                    continue
                if not self._place(replace=True):
                    continue
                self.taken_over = before
            finally:
                os.close(descriptor)
            if watched:
                self._await_rivals(watch_seconds)
            return

    def _lock_existing(self) -> tuple[int, bool] | None:
        """Open and lock the existing lock file. Returns its descriptor, and whether the file system supports locks.

        Returns None when there is no lock file. Raises :class:`RecipeError` if another run has locked it.
        """
        reject_special_file(self._path)
        try:
            descriptor = open_lock_file(self._path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            return descriptor, lock(descriptor)
        except BlockingIOError:
            holder = Holder.read(descriptor)
            os.close(descriptor)
            raise rejection(self._path, holder, self._hint) from None
        except BaseException:
            os.close(descriptor)
            raise

    def _place(self, *, replace: bool) -> bool:
        """Create the lock file with a complete record, already locked.

        Returns False if the file has to be looked at again: another run removed the temporary one as a leftover, or,
        without *replace*, has created the file meanwhile.
        """
        temporary = self._path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
        descriptor = open_lock_file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        placed = False
        try:
            lock(descriptor)
            os.pwrite(descriptor, self._record(descriptor).to_bytes(), 0)
            # The owner of the directory removes temporary files, which usually are from killed runs.
            with contextlib.suppress(FileNotFoundError):
                if replace:
                    os.rename(temporary, self._path)
                    placed = True
                else:
                    placed = link_or_rename(temporary, self._path)
        finally:
            if not placed:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if placed:
            self._descriptor = descriptor
        return placed

    def _await_rivals(self, watch_seconds: float) -> None:
        """Raise :class:`RecipeError` if another run took over from the same dead owner at the same time."""
        time.sleep(min(SETTLE_SECONDS, watch_seconds))
        try:
            self.check()
        except LeaseLost as loss:
            raise RecipeError(
                "another process took over this directory at the same time",
                where=self._path.parent,
                value=loss.problems[0].value,
                hint=self._hint,
            ) from None


_held: set[Lease] = set()
"""The leases of this process."""


def release_all() -> None:
    """Release all leases of this process. For a process that ends during its start, when no object owns them yet."""
    for lease in list(_held):
        lease.release()


def check_token(lock_file: Path, token: str) -> None:
    """Check that a lock file contains the *token* of the run that this process belongs to.

    Raises :class:`LeaseLost` if it does not, OSError if it cannot be read.
    """
    try:
        descriptor = open_lock_file(lock_file, os.O_RDONLY)
    except FileNotFoundError:
        raise lost(lock_file, None) from None
    try:
        holder = Holder.read(descriptor)
    except PermissionError:
        return  # on SMB, the lock of the run's main process prevents reading
    finally:
        os.close(descriptor)
    if holder is None or holder.token != token:
        raise lost(lock_file, holder)


# ---------------------------------------------------------------- the lock file


WATCH_SECONDS = 20.0
CACHED_WATCH_SECONDS = 90.0
"""The watch on a FUSE mount: gcsfuse caches for 60 seconds, sshfs for 20."""
_RECORD_BYTES = 2048
_NO_HARD_LINKS_HERE = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of a lock file. Fields with defaults may be missing."""

    host: str
    boot_id: str
    pid: int
    command: str
    beat: int
    token: str = ""
    pid_namespace: str = ""
    device: int = -1
    file_system_id: int = -1

    @classmethod
    def read(cls, descriptor: int) -> Holder | None:
        """Read the record at the start of an open lock file. Returns None when the content is not a record."""
        try:
            # A record can exceed its padding: JSON escapes the command's non-ASCII characters.
            raw = parse_json(os.pread(descriptor, 2 * _RECORD_BYTES, 0))
            fields = {name: raw[name] for name in cls.__slots__ if name in raw}
            holder = cls(**fields)
        except (ValueError, TypeError):
            return None
        texts = [holder.host, holder.boot_id, holder.command, holder.token, holder.pid_namespace]
        numbers = (holder.pid, holder.beat, holder.device, holder.file_system_id)
        if not all(isinstance(text, str) for text in texts):
            return None
        if not all(type(number) is int for number in numbers):
            return None
        return holder

    def to_bytes(self) -> bytes:
        """Convert to JSON, padded to a fixed size, so that a shorter record overwrites a longer one completely."""
        content = json.dumps(asdict(self)).encode()
        return content.ljust(_RECORD_BYTES)

    def is_this_process(self) -> bool:
        """Whether this process is the owner."""
        here = (os.getpid(), kernel_boot_id() or socket.gethostname(), pid_namespace())
        return (self.pid, self.boot_id, self.pid_namespace) == here

    def has_ended(self, descriptor: int, is_locked: bool) -> bool:
        """Whether the holder's process has certainly ended. *is_locked*: this run has locked the open file.

        False if that cannot be determined: on another node, in another container, or if another process has the same
        number now.
        """
        if self.boot_id != kernel_boot_id():
            return False
        # On the same mounted file system, the kernel has one set of locks for each file.
        if is_locked and (self.device, self.file_system_id) == file_system_identity(descriptor):
            return True
        return (
            bool(self.pid_namespace) and self.pid_namespace == pid_namespace() and is_gone(self.pid)
        )


def is_beating(path: Path, seconds: float) -> bool:
    """Watch the lock file for *seconds*. Returns True as soon as its record changes; False if it does not."""
    first = read_holder(path)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(0.2, seconds / 10))
        now = read_holder(path)
        if now is None and not os.path.lexists(path):
            return False  # the owner released the directory
        if first is None:
            first = now
        if now is not None and now != first:
            return True
    return False


def read_holder(path: Path) -> Holder | None:
    """Return the current record in the lock file, or None when it cannot be read."""
    with contextlib.suppress(OSError), os.fdopen(open_lock_file(path, os.O_RDONLY), "rb") as file:
        return Holder.read(file.fileno())
    return None


def usual_watch_seconds(root: Path) -> float:
    """How long an owner of the run directory *root* must have no heartbeat, by the type of its file system."""
    kind = file_system_of(Path(os.path.realpath(root))) or ""
    if kind.startswith(("fuse", "virtiofs")):
        return CACHED_WATCH_SECONDS
    return WATCH_SECONDS


def is_at(path: Path, descriptor: int) -> bool:
    """Whether *path* is still the name of the open file."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def link_or_rename(source: Path, target: Path) -> bool:
    """Name the file *source* *target*, by a hard link if the file system has them. Returns False if *target* exists."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS_HERE:
            raise
        # Two runs that start at the same time may both rename. The first check of one of them detects that.
        if os.path.lexists(target):
            return False
        os.rename(source, target)
    return True


def reject_special_file(path: Path) -> None:
    """Raise :class:`RecipeError` if the lock file is a link or a device, which must not be opened."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise RecipeError(
                "the lock file of this directory is not a regular file, and must be removed",
                where=path,
                value=stat.filemode(mode),
                hint="",
            )


class HeldByThisProcess(RecipeError):
    """Another object of this process holds the directory."""


def rejection(path: Path, holder: Holder | None, hint: str) -> RecipeError:
    """The error of a process that finds another live one, or itself, in the directory of the lock file *path*."""
    if holder is not None and holder.is_this_process():
        return HeldByThisProcess(
            "this process uses this directory already, in another run or Checkpointer that is not closed",
            where=path.parent,
            value=_described(holder),
            hint=hint,
        )
    return RecipeError(
        "another process is using this directory",
        where=path.parent,
        value=_described(holder),
        hint=hint,
    )


def lost(path: Path, holder: Holder | None) -> LeaseLost:
    """The error of a run if its lock file has the record *holder* of another run, or is gone (None)."""
    return LeaseLost(
        "this run lost the lock on its directory: another run has taken over, or its lock file was removed",
        where=path,
        value=_described(holder),
        hint=STALLED,
    )


def _described(holder: Holder | None) -> str:
    if holder is None:
        return "unknown"
    return f"process {holder.pid} on {holder.host}, running {holder.command}"
